"""Test one contract over every kind of store, and the extra duties of a file store."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.finetune.children import ended, fork
from tests.store.s3_server import S3Server
from upriver.errors import ConfigError, ObjectChanged, ObjectNotFound, ProgramError, StoreError
from upriver.program.graph.fetch import get_at_most
from upriver.store import ObjectInfo, Store
from upriver.store import store as store_module


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        yield Store.open(tmp_path.as_uri(), name="here")
    elif request.param == "memory":
        yield Store.open(f"memory://{tmp_path.name}", name="here")
    else:
        with S3Server() as server:
            options = {"endpoint": server.url, "access_key_id": "KEY", "secret_access_key": "SECRET"}
            yield Store.open("s3://bucket/some/prefix", name="here", options=options)


def test_what_is_put_can_be_read_whole_and_in_ranges(store: Store) -> None:
    store.put("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"
    assert store.get_range("a/b.bin", 2, 5) == b"234"
    assert store.get_range("a/b.bin", 3, 3) == b""
    info = store.head("a/b.bin")
    assert (info.path, info.size) == ("a/b.bin", 10)
    assert info.etag
    assert store.get("a/b.bin", etag=info.etag) == b"0123456789"
    assert store.get_range("a/b.bin", 9, 10, etag=info.etag) == b"9"


def test_put_of_a_private_object_can_be_read_as_any(store: Store) -> None:
    for data in (b"first", b"second"):
        store.put("a/b/c.bin", data, private=True)
        assert store.get("a/b/c.bin") == data
    store.put("a/b/c.bin", b"public")
    assert [(info.path, info.size) for info in store.list("a")] == [("a/b/c.bin", 6)]


def test_who_reads_a_whole_object_is_told_of_it_before_and_can_refuse_it(store: Store) -> None:
    store.put("a/b.bin", b"0123456789")
    told: list[ObjectInfo] = []
    assert store.get("a/b.bin", on_answer=told.append) == b"0123456789"
    assert told == [store.head("a/b.bin")]
    assert get_at_most(store, "a/b.bin", 10) == b"0123456789"
    with pytest.raises(ProgramError, match=r"^a/b\.bin has 10 bytes; at most 9 are allowed$"):
        get_at_most(store, "a/b.bin", 9)
    with pytest.raises(ObjectNotFound):
        get_at_most(store, "a/c.bin", 9)


def test_the_async_half_does_the_same(store: Store) -> None:
    async def run() -> None:
        await store.put_async("a/b.bin", bytearray(b"0123456789"))
        assert await store.get_async("a/b.bin") == b"0123456789"
        assert await store.get_range_async("a/b.bin", 2, 5) == b"234"
        assert await store.get_range_async("a/b.bin", 0, 0) == b""
        info = await store.head_async("a/b.bin")
        assert info == store.head("a/b.bin")
        assert await store.exists_async("a/b.bin")
        assert not await store.exists_async("a/c.bin")
        await store.put_async("a/b.bin", b"another")
        with pytest.raises(ObjectChanged, match=r"a/b\.bin.*here"):
            await store.get_range_async("a/b.bin", 0, 2, etag=info.etag)
        with pytest.raises(ObjectChanged):
            await store.get_async("a/b.bin", etag=info.etag)
        with pytest.raises(ObjectNotFound, match=r"a/c\.bin.*here"):
            await store.get_async("a/c.bin")
        with pytest.raises(StoreError, match=r"a/b\.bin.*ended early"):
            await store.get_range_async("a/b.bin", 2, 50)

    asyncio.run(run())


def test_a_changed_object_is_noticed(store: Store) -> None:
    store.put("a", b"first")
    etag = store.head("a").etag
    store.put("a", b"second")
    assert store.head("a").etag != etag
    with pytest.raises(ObjectChanged, match="'a' in store 'here'"):
        store.get_range("a", 0, 3, etag=etag)
    with pytest.raises(ObjectChanged):
        store.get("a", etag=etag)


def test_a_stream_becomes_one_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "STREAM_PART_BYTES", 5 * 2**20)
    large = np.random.default_rng(0).integers(0, 256, 12 * 2**20, dtype=np.uint8)
    small = [b"", b"01", memoryview(b"23")]
    for pieces in ([], [b"0123"], small, [b"x", large.data, b"y"], large.reshape(12, -1)):
        store.put_stream("a/b.bin", (memoryview(piece) for piece in pieces))
        assert store.get("a/b.bin") == b"".join(pieces)


def test_a_stream_that_breaks_off_leaves_what_was_there(store: Store) -> None:
    def broken() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(2**20)
        raise ProgramError("no more")

    store.put("old", b"before")
    for name in ("old", "new"):
        with pytest.raises(ProgramError, match="no more"):
            store.put_stream(name, broken())
    assert [(info.path, info.size) for info in store.list()] == [("old", 6)]


Into = Callable[..., None]


def in_a_thread(store: Store, path: str, start: int, into: Any, **options: Any) -> None:
    store.read_into(path, start, into, **options)


def on_a_loop(store: Store, path: str, start: int, into: Any, **options: Any) -> None:
    if told := options.get("on_bytes"):

        async def on_bytes(num_bytes: int) -> None:
            told(num_bytes)

        options["on_bytes"] = on_bytes
    asyncio.run(store.read_into_async(path, start, into, **options))


@pytest.fixture(params=[in_a_thread, on_a_loop])
def read_into(request: pytest.FixtureRequest) -> Into:
    found: Into = request.param
    return found


def test_a_range_is_read_into_memory(store: Store, read_into: Into) -> None:
    content = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8)
    store.put("a/b.bin", content.data)
    etag = store.head("a/b.bin").etag
    for start, stop in ((0, len(content)), (7, 8), (1_000_001, 2_999_999), (5, 5)):
        came: list[int] = []
        room = np.zeros(stop - start, dtype=np.uint8)
        read_into(store, "a/b.bin", start, room.data, etag=etag, on_bytes=came.append, piece_bytes=100_000)
        assert np.array_equal(room, content[start:stop])
        assert sum(came) == stop - start
        assert came[:1] == ([0] if start < stop else [])


def test_a_range_is_read_into_several_buffers(store: Store, read_into: Into) -> None:
    content = np.random.default_rng(1).integers(0, 256, 1_200_000, dtype=np.uint8)
    store.put("a", content.data)
    rooms = [
        np.zeros(shape, dtype) for shape, dtype in (((3, 5), "f4"), (0, "f8"), (70_001, "i8"), ((), "u1"))
    ]
    rooms += [np.zeros(1, "u1") for _ in range(300)]
    read_into(store, "a", 11, [memoryview(room) for room in rooms], piece_bytes=4096)
    found = b"".join(room.tobytes() for room in rooms)
    assert found == content[11 : 11 + len(found)].tobytes()
    read_into(store, "a", 11, [])


def test_reading_into_memory_fails_as_other_reads_do(store: Store, read_into: Into) -> None:
    store.put("a", b"0123456789")
    etag = store.head("a").etag
    store.put("a", b"012345678")
    room = memoryview(bytearray(4))
    with pytest.raises(ObjectChanged, match="'a' in store 'here'"):
        read_into(store, "a", 0, room, etag=etag)
    with pytest.raises(ObjectNotFound, match=r"'not/there' in store 'here'"):
        read_into(store, "not/there", 0, room)
    with pytest.raises(StoreError, match=r"'a' in store 'here' ended early: bytes 7 to 11 asked for, 2 got"):
        read_into(store, "a", 7, room)
    with pytest.raises(StoreError, match=r"'a' in store 'here'"):
        read_into(store, "a", 30, room)
    with pytest.raises(ConfigError, match="byte range"):
        read_into(store, "a", -1, room)
    with pytest.raises(ConfigError, match="object name"):
        read_into(store, "../a", 0, room)


def test_memory_that_cannot_be_written_is_refused(store: Store, read_into: Into) -> None:
    store.put("a", b"0123456789")
    with pytest.raises(ConfigError, match="one of 4 cannot be written"):
        read_into(store, "a", 0, memoryview(b"1234"))
    with pytest.raises(ConfigError, match="one of 2 has gaps"):
        read_into(store, "a", 0, [memoryview(bytearray(4))[::2]])


def test_what_is_told_of_bytes_may_end_the_reading(store: Store, read_into: Into) -> None:
    store.put("a", bytes(100_000))

    def enough(num_bytes: int) -> None:
        if num_bytes:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        read_into(store, "a", 0, memoryview(bytearray(100_000)), on_bytes=enough, piece_bytes=10)


def test_a_missing_object_is_named(store: Store) -> None:
    for read in (store.get, store.head, lambda path: store.get_range(path, 0, 1)):
        with pytest.raises(ObjectNotFound, match=r"'not/there' in store 'here'"):
            read("not/there")
    assert not store.exists("not/there")


def test_a_range_past_the_end_is_an_error_not_fewer_bytes(store: Store) -> None:
    store.put("a", b"12345")
    for start, stop in ((3, 9), (5, 6), (30, 39)):
        with pytest.raises(StoreError, match=r"'a'.*here"):
            store.get_range("a", start, stop)
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ConfigError, match="byte range"):
            store.get_range("a", start, stop)


def test_listing_knows_what_is_there_and_agrees_with_head(store: Store) -> None:
    names = ["x/1", "x/y/2", "xy/3", "z"]
    for name in names:
        store.put(name, name.encode())
    assert sorted(info.path for info in store.list()) == names
    assert sorted(info.path for info in store.list("x")) == ["x/1", "x/y/2"]
    assert sorted(info.path for info in store.list("x/")) == ["x/1", "x/y/2"]
    assert [info.path for info in store.list("x/1")] == ["x/1"]
    assert list(store.list("nothing")) == []
    assert all(info == store.head(info.path) for info in store.list())


def test_a_fork_of_a_process_that_has_used_stores_is_told_and_waits_for_nothing(store: Store) -> None:
    store.put("a", b"abc")

    async def written() -> None:
        await store.put_async("b", b"c")

    def is_told() -> bool:
        uses: list[Callable[[], object]] = [
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.exists("a"),
            lambda: store.get_range("a", 0, 1),
            lambda: store.put("b", b"c"),
            lambda: store.put_stream("b", [b"c"]),
            lambda: store.delete("a"),
            lambda: asyncio.run(written()),
        ]
        if not store.uri.startswith("file"):  # files are listed, and read into memory, without obstore
            uses += [lambda: list(store.list()), lambda: store.read_into("a", 0, memoryview(bytearray(3)))]
        for use in uses:
            with pytest.raises(StoreError, match=r"'here' .*was forked from one that has used stores"):
                use()
        return True

    assert ended(fork(is_told)) == 0
    assert store.get("a") == b"abc" and [found.path for found in store.list()] == ["a"]


def test_a_fork_may_be_the_first_to_use_stores(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    code = """if True:
        import os, sys
        from upriver.store import Store
        store = Store.open(sys.argv[1])
        for _ in range(2):
            child = os.fork()
            if not child:
                os._exit(store.get("a") != b"abc")
            assert os.waitpid(child, 0)[1] == 0
        assert store.get("a") == b"abc"
    """
    subprocess.run([sys.executable, "-c", code, tmp_path.as_uri()], check=True, timeout=300)


def test_deleting(store: Store) -> None:
    store.put("a", b"1")
    store.delete("a")
    assert not store.exists("a")


def test_awkward_names_are_only_names(store: Store) -> None:
    for name in ("with space/é%2F+&?.txt", "a:b*c.bin", "ünï/日本"):
        store.put(name, name.encode())
        assert store.get(name) == name.encode()
        assert [info.path for info in store.list(name)] == [name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/./b",
        "a/",
        "http://h/x",
        "a\nb",
        "\x00",
        "x" * 1025,
        "\udcff",
    ],
)
def test_a_name_cannot_be_a_way_out(store: Store, name: str) -> None:
    for use in (store.get, store.head, store.delete, store.exists, lambda path: store.put(path, b"")):
        with pytest.raises(ConfigError, match="object name"):
            use(name)
    if name not in ("", "a/"):
        with pytest.raises(ConfigError, match="object name"):
            list(store.list(name))


def test_memory_stores_of_one_uri_share_their_content() -> None:
    Store.open("memory://shared").put("a", b"1")
    assert Store.open("memory://shared/").get("a") == b"1"
    assert not Store.open("memory://another").exists("a")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "or a folder's path, got ''"),
        (5, "or a folder's path, got 5"),
        (b"/tmp", "or a folder's path"),
        ("http://host/x", "file:///PATH.* or a folder's path"),
        ("s3://", "file:///PATH"),
        ("a\0b", "null byte"),
        ("file://host/x", "file:///ABSOLUTE"),
        ("file:relative", "file:///ABSOLUTE"),
        ("memory://a?b=c", "no query"),
        ("s3://bucket/../x", "segment"),
    ],
)
def test_what_names_no_store_is_refused(uri: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Store.open(uri)


def test_only_s3_takes_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no options, got region"):
        Store.open(tmp_path.as_uri(), options={"region": "x"})


# ------------------------------------------------------------------------------------- file stores


def test_a_missing_directory_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ((tmp_path / "not_there").as_uri(), "./not_there", Path("not_there")):
        with pytest.raises(StoreError, match=rf"'{tmp_path}/not_there' of store .*does not exist"):
            Store.open(place)
    (tmp_path / "a_file").touch()
    with pytest.raises(StoreError, match=rf"'{tmp_path}/a_file' of store .* is a file"):
        Store.open("a_file")


@pytest.mark.parametrize("name", ["photos", "two words #1?", "näme%20", "s3", "a=b"])
def test_a_path_is_the_store_at_the_uri_of_its_absolute_path(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    folder.mkdir()
    by_uri = Store.open(folder.as_uri(), name="here")
    by_uri.put("a", b"abc")
    for place in (name, f"./{name}", f"{name}/", str(folder), Path(name), folder):
        store = Store.open(place, name="here")
        assert (store.uri, store.is_local) == (by_uri.uri, True)
        assert store.get("a") == b"abc"


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "real" / "a").write_bytes(b"1")
    return root


@pytest.mark.parametrize("link", ["out", "real/out"])
def test_a_link_out_of_the_root_is_refused(inside: Path, link: str) -> None:
    (inside / link).symlink_to(inside.parent)
    store, path = Store.open(inside.as_uri(), name="here"), f"{link}/secret.txt"
    uses = (
        store.get,
        store.head,
        store.delete,
        lambda name: store.put(name, b"x"),
        lambda name: store.get_range(name, 0, 1),
    )
    for use in uses:
        with pytest.raises(StoreError, match="symbolic link that leads out"):
            use(path)
    with pytest.raises(StoreError, match="symbolic link that leads out"):
        asyncio.run(store.get_async(path))
    with pytest.raises(StoreError, match=f"{link}' is a symbolic link to .*, which leads out"):
        list(store.list())
    assert (inside.parent / "secret.txt").read_bytes() == b"secret"


def test_a_linked_file_out_of_the_root_is_refused(inside: Path) -> None:
    (inside / "file").symlink_to(inside.parent / "secret.txt")
    with pytest.raises(StoreError, match="symbolic link that leads out"):
        Store.open(inside.as_uri()).get("file")


def test_a_link_within_the_root_is_as_good_as_a_file(inside: Path) -> None:
    (inside / "linked").symlink_to("real")
    (inside / "real" / "again").symlink_to(inside)  # leads back up: listing must end
    store = Store.open(inside.as_uri())
    assert store.get("linked/a") == b"1"
    assert [info.path for info in store.list()] == ["linked/a", "real/a"]


def test_a_link_that_leads_nowhere_is_named(inside: Path) -> None:
    (inside / "real" / ".#b").symlink_to("locked-by-an-editor")
    store = Store.open(inside.as_uri())
    assert [info.path for info in store.list()] == ["real/a"]
    (inside / "real" / "b.jpg").symlink_to("nothing")
    with pytest.raises(
        StoreError, match=r"'real/b\.jpg' is a symbolic link to 'nothing', which leads nowhere"
    ):
        list(store.list())


def test_a_fifo_is_named(inside: Path) -> None:
    os.mkfifo(inside / "real" / "b.jpg")
    with pytest.raises(StoreError, match=r"'real/b\.jpg' is neither file nor directory"):
        list(Store.open(inside.as_uri()).list("real"))


def test_a_root_that_is_a_link_itself_is_the_operators_choice(inside: Path) -> None:
    (inside.parent / "link").symlink_to(inside)
    assert Store.open((inside.parent / "link").as_uri()).get("real/a") == b"1"


def test_what_an_upload_left_behind_is_not_an_object(inside: Path) -> None:
    (inside / "real" / "b#1").write_bytes(b"half")
    assert [info.path for info in Store.open(inside.as_uri()).list()] == ["real/a"]


def test_a_file_that_is_written_in_place_while_it_is_read_has_changed(
    tmp_path: Path, read_into: Into
) -> None:
    store, file = Store.open(tmp_path.as_uri(), name="here"), tmp_path / "a"
    file.write_bytes(bytes(100))
    os.utime(file, (1, 1))
    etag, told = store.head("a").etag, []

    def written(num_bytes: int) -> None:
        told.append(num_bytes)
        if num_bytes:
            with file.open("r+b") as opened:
                opened.write(b"1")

    room = memoryview(bytearray(100))
    with pytest.raises(ObjectChanged, match="'a' in store 'here'"):
        read_into(store, "a", 0, room, etag=etag, on_bytes=written, piece_bytes=10)
    assert told == [0, 10]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_only_a_file_is_read_into_memory(
    tmp_path: Path, read_into: Into, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "a")
    with pytest.raises(ObjectNotFound, match="'a' in store 'here'"):
        read_into(Store.open(tmp_path.as_uri(), name="here"), "a", 0, memoryview(bytearray(1)))


FULL_DISK = """
import resource, signal, sys
from upriver.errors import StoreError
from upriver.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store.open(sys.argv[1], name="here")
store.put("old", b"before")
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
for name in ("old", "new"):
    try:
        store.put(name, bytes(int(sys.argv[2])))
    except StoreError as exc:
        print(exc)
"""


@pytest.mark.parametrize("size", [2 * 2**20, 65 * 2**20], ids=["one piece", "in parts"])
def test_a_put_that_fails_leaves_what_was_there(tmp_path: Path, size: int) -> None:
    command = [sys.executable, "-c", FULL_DISK, tmp_path.as_uri(), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot write 'old' in store 'here'" in done.stdout
    assert "cannot write 'new' in store 'here'" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"before"


# ------------------------------------------------------------------------------------- private files


def _modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in root.rglob("*")}


@pytest.fixture
def usual_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_put_of_a_private_object_makes_file_and_folders_private(tmp_path: Path, usual_mask: None) -> None:
    store = Store.open(tmp_path.as_uri())
    store.put("a/there", b"public")
    store.put("a/b/c/private", b"private", private=True)
    store.put("d/private", b"private", private=True)
    public = {"a": 0o755, "a/there": 0o644}
    private = {"a/b": 0o700, "a/b/c": 0o700, "a/b/c/private": 0o600, "d": 0o700, "d/private": 0o600}
    assert _modes(tmp_path) == public | private
    store.put("a/there", b"private", private=True)
    store.put("d/private", b"again")
    assert _modes(tmp_path) == public | private | {"a/there": 0o600}


def test_put_of_a_private_object_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    store = Store.open(tmp_path.as_uri())
    with pytest.raises(StoreError, match="cannot write 'a/b/"):
        store.put(f"a/b/{'c' * 250}", b"x", private=True)  # too long with the suffix of an unfinished file
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- files written in place


def _keeping_times(write: Callable[[Path], None], file: Path) -> None:
    """Overwrite a file, and set its modification time back to what it was."""
    before = file.stat()
    time.sleep(0.01)  # a tick of the kernel's clock for files
    write(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert file.read_bytes() == b"new content"


def _write_in_place(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"new")


def _write_mapped(file: Path) -> None:
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[:3] = b"new"


def _write_anew(file: Path) -> None:
    file.write_bytes(b"new content")


def _write_by_another_name(file: Path) -> None:
    other = file.parent.parent / "other"
    os.link(file, other)
    _write_in_place(other)


def _replace(file: Path) -> None:
    other = file.parent.parent / "other"
    other.write_bytes(b"new content")
    os.replace(other, file)


OVERWRITES = [_write_in_place, _write_mapped, _write_anew, _write_by_another_name, _replace]
READS: dict[str, Callable[[Store, str], object]] = {
    "get": lambda store, etag: store.get("a", etag=etag),
    "get_async": lambda store, etag: asyncio.run(store.get_async("a", etag=etag)),
    "get_range": lambda store, etag: store.get_range("a", 0, 3, etag=etag),
    "get_range_async": lambda store, etag: asyncio.run(store.get_range_async("a", 0, 3, etag=etag)),
    "read_into": lambda store, etag: store.read_into("a", 0, memoryview(bytearray(3)), etag=etag),
}


@pytest.mark.parametrize("overwrite", OVERWRITES)
def test_file_overwritten_with_its_size_and_time_kept_has_changed(
    tmp_path: Path, overwrite: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"old content")
    store = Store.open(root.as_uri())
    (listed,) = store.list()
    for read in READS.values():
        read(store, listed.etag)
    _keeping_times(overwrite, root / "a")
    for read in READS.values():
        with pytest.raises(ObjectChanged, match="'a' in store"):
            read(store, listed.etag)
    assert store.get("a", etag=store.head("a").etag) == b"new content"


def test_etag_of_a_file_is_the_same_from_every_side(tmp_path: Path) -> None:
    store = Store.open(tmp_path.as_uri())
    store.put("a", b"content")
    told: list[ObjectInfo] = []
    store.get("a", on_answer=told.append)

    async def first() -> bytes:
        return b"".join([piece async for piece in store.read_first_async("a", 3, on_answer=told.append)])

    assert asyncio.run(first()) == b"con"
    assert set(told) | set(store.list()) == {store.head("a")} == {asyncio.run(store.head_async("a"))}


def test_etag_of_a_file_outlasts_what_leaves_it_alone(tmp_path: Path) -> None:
    store = Store.open(tmp_path.as_uri())
    store.put("folder/a", b"content")
    etag = store.head("folder/a").etag
    store.get("folder/a")
    (tmp_path / "folder").rename(tmp_path / "other")
    (tmp_path / "other/b").write_bytes(b"")
    assert store.get("other/a", etag=etag) == b"content"


def test_etag_that_an_older_index_holds_is_still_the_file(tmp_path: Path) -> None:
    store, file = Store.open(tmp_path.as_uri()), tmp_path / "a"
    store.put("a", b"content")
    status = file.stat()
    older = f'"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-{status.st_size:x}"'
    assert store.get_range("a", 0, 3, etag=older) == b"con"
    os.utime(file, (1, 1))
    with pytest.raises(ObjectChanged):
        store.get_range("a", 0, 3, etag=older)


@pytest.mark.parametrize("read", [name for name in READS if name != "read_into"])
def test_folder_is_no_object_of_a_file_store(tmp_path: Path, read: str) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ObjectNotFound):
        READS[read](Store.open(tmp_path.as_uri()), '"1-2-3"')
