"""Check that an index reads every readable sample, and names, counts and refuses all other candidates."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipeline.indexing.test_builder import JPEG, STAGES, stored
from tests.pipeline.making import encoded, npy, pixels, shard, write
from tests.store.s3_server import S3Server
from upriver.cli import main
from upriver.errors import ConfigError, DatasetError, StoreError
from upriver.pipeline import Dataset, Decode, LeftOut, ToFloat, index
from upriver.pipeline.formats.image import decode
from upriver.store import Store

GREY = encoded(pixels(6, 5)[..., 0], "PPM")


def left_out(uri: str, path: str = "", **options: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the count and examples per reason; without ``report`` the index must refuse the dataset."""
    dataset = index(uri, path, stages=STAGES, on_left_out="report", **options)
    assert dataset.left_out
    with pytest.raises(DatasetError, match="on_left_out='report'"):
        index(uri, path, stages=STAGES, **options)
    return {reason: (each.count, each.examples) for reason, each in dataset.left_out.items()}


# -------------------------------------------------------------------------------------- class folders


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("1.JPE", JPEG),
        ("1.jfif", JPEG),
        ("1.ppm", encoded(pixels(6, 5), "PPM")),
        ("1.PNM", encoded(pixels(6, 5), "PPM")),
        ("1.pgm", GREY),
        ("1.bmp", encoded(pixels(6, 5), "BMP")),
        ("x.jpg/1.png", encoded(pixels(6, 5), "PNG")),
        ("__pair__/1.jpg", JPEG),
        ("a.b.c.jpg", JPEG),
    ],
)
def test_index_of_a_name_that_image_folder_reads_holds_it(tmp_path: Path, name: str, data: bytes) -> None:
    uri = write(tmp_path, {"__background__/0.jpg": JPEG, f"cat/{name}": data})
    assert stored(uri) == [("__background__/0.jpg", 0, JPEG), (f"cat/{name}", 1, data)]
    assert index(uri, stages=STAGES).left_out == {}


@pytest.mark.parametrize(
    ("text", "pixels_of"),
    [
        (b"P2\n# grey\n2 1\n255\n0 200\n", [[[0] * 3, [200] * 3]]),
        (b"P3 1 1 255 1 2 3\n", [[[1, 2, 3]]]),
        (b"P1\n2 1\n01", [[[255] * 3, [0] * 3]]),
        (b"P4\n3 1\n\xa0", [[[0] * 3, [255] * 3, [0] * 3]]),
        (b"P5\n2 1\n15\n\x00\x0f", [[[0] * 3, [255] * 3]]),
        (b"P6\n1 1\n255\n\x09\x08\x07", [[[9, 8, 7]]]),
    ],
)
def test_decode_of_every_kind_of_ppm_gives_its_pixels(text: bytes, pixels_of: list[Any]) -> None:
    assert decode(text, max_pixels=100, orient=True).tolist() == pixels_of


@pytest.mark.parametrize(
    ("files", "reason", "examples"),
    [
        ({"cat/2.tif": b"II*\0", "cat/3.gif": b"GIF89a"}, "format", ("cat/2.tif", "cat/3.gif")),
        ({"cat/0001": JPEG}, "format", ("cat/0001",)),
        ({"cat/2.jpg.bak": JPEG}, "format", ("cat/2.jpg.bak",)),
        ({"cat/2.heic": b""}, "format", ("cat/2.heic",)),
        ({"cat/images.zip": b"PK"}, "format", ("cat/images.zip",)),
        ({".new/2.jpg": JPEG, "cat/.3.jpg": JPEG}, "hidden", (".new/2.jpg", "cat/.3.jpg")),
        ({"2.jpg": JPEG}, "no_class_folder", ("2.jpg",)),
        ({"cat/2\n.jpg": JPEG}, "name", ("cat/2\n.jpg",)),
        ({"cat/caf\udce9.jpg": JPEG}, "name", ("cat/caf\\udce9.jpg",)),
        ({"more.tar.gz": b"\x1f\x8b"}, "compressed", ("more.tar.gz",)),
    ],
)
def test_index_of_class_folders_names_what_it_leaves_out(
    tmp_path: Path, files: dict[str, bytes], reason: str, examples: tuple[str, ...]
) -> None:
    uri = write(tmp_path, {"cat/1.jpg": JPEG, "dog/1.jpg": JPEG, **files})
    assert left_out(uri) == {reason: (len(examples), examples)}
    dataset = index(uri, stages=STAGES, on_left_out="report")
    assert dataset.classes == ("cat", "dog")
    assert dataset.names([0, 1]) == ["cat/1.jpg", "dog/1.jpg"]


@pytest.mark.parametrize(
    "name",
    [
        *("README", "cat/README.md", "LICENSE", "cat/LICENSE.txt", "classes.txt", "meta.bin"),
        *("cat/1.json", "cat/1.txt", "cat/labels.csv", "cat/1.XML", "SHA256SUMS", "images.zip"),
        *("cat/1.jpg.xmp", "cat/IMG_1.AAE", "cat/1.jpg:Zone.Identifier"),
        *(".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "cat/desktop.ini", "cat/._1.jpg", ".nomedia"),
        *("cat/.ipynb_checkpoints/1-checkpoint.jpg", "__MACOSX/cat/._1.jpg", "annotations/1.xml"),
        *(".git/objects/1.jpg", "cat/.gitkeep", "cat/__init__.py", "_SUCCESS"),
    ],
)
def test_index_beside_what_is_no_sample_is_not_blocked(tmp_path: Path, name: str) -> None:
    dataset = index(write(tmp_path, {"cat/1.jpg": JPEG, name: b"no sample"}), stages=STAGES)
    assert (dataset.names([0]), len(dataset), dataset.classes) == (["cat/1.jpg"], 1, ("cat",))
    assert dataset.left_out == {}


def test_index_of_a_class_folder_without_samples_keeps_the_numbers_of_others(tmp_path: Path) -> None:
    uri = write(
        tmp_path,
        {
            "s/b/1.jpg": JPEG,
            "s/d/1.jpg": JPEG,
            "s/c/1.tif": b"II*\0",
            "s/e/about.txt": b"x",
            "s/ab/README.md": b"x",
        },
    )
    (tmp_path / "s/a").mkdir()
    assert left_out(uri, "s") == {"format": (1, ("s/c/1.tif",)), "empty_class": (3, ("s/a", "s/ab", "s/c"))}
    dataset = index(uri, "s", stages=STAGES, on_left_out="report")
    assert (dataset.classes, dataset.targets.tolist()) == (("a", "ab", "b", "c", "d"), [2, 4])


def test_index_of_empty_files_leaves_media_out_and_lets_others_be(tmp_path: Path) -> None:
    uri = write(tmp_path, {"cat/1.jpg": b"", "cat/2.jpg": JPEG, "cat/marker": b"", "dog/1.jpg": b""})
    assert left_out(uri) == {"empty": (2, ("cat/1.jpg", "dog/1.jpg"))}
    with pytest.raises(DatasetError, match=r"sample 'cat/1\.jpg' in 'cat/1\.jpg' is empty\. In all 2"):
        index(uri, stages=STAGES)
    dataset = index(uri, stages=STAGES, on_left_out="report")
    assert (dataset.names([0]), dataset.classes) == (["cat/2.jpg"], ("cat", "dog"))


def test_index_of_shards_with_an_empty_member_leaves_its_key_out(tmp_path: Path) -> None:
    members = [("1.jpg", b""), ("1.cls", b"0"), ("2.jpg", JPEG), ("2.cls", b"0")]
    uri = write(tmp_path, {"a.tar": shard(members)})
    assert left_out(uri) == {"empty": (1, ("a.tar: 1",))}
    assert stored(uri, on_left_out="report") == [("2", 0, JPEG)]


@pytest.mark.parametrize("path", [".cache/birds", "__data", "a/.b/c", "x.jpg"])
@pytest.mark.parametrize("layout", ["folders", "webdataset"])
def test_index_of_a_path_below_a_hidden_folder_takes_what_lies_in_it(
    tmp_path: Path, path: str, layout: str
) -> None:
    one = {"folders": {"c/1.jpg": JPEG}, "webdataset": {"1.tar": shard([("1.jpg", JPEG), ("1.cls", b"0")])}}
    uri = write(tmp_path, {f"{path}/{name}": data for name, data in one[layout].items()})
    assert [blob for *_, blob in stored(uri, path)] == [JPEG]
    if layout == "webdataset":
        assert len(stored(uri, f"{path}/1.tar")) == 1


def test_index_that_leaves_everything_out_says_so(tmp_path: Path) -> None:
    uri = write(tmp_path, {"cat/1.tif": b"II*\0"})
    with pytest.raises(DatasetError, match=r"no samples in store .*; left out: 1 of a format .*'cat/1.tif'"):
        index(uri, stages=STAGES, on_left_out="report")
    with pytest.raises(DatasetError, match=r"'cat/1\.tif': \.tif is not supported"):
        index(uri, stages=STAGES)


def test_index_counts_all_and_names_a_few(tmp_path: Path) -> None:
    uri = write(tmp_path, {"cat/1.jpg": JPEG, **{f"cat/{n:02}.tif": b"II*\0" for n in range(12)}})
    with pytest.raises(
        DatasetError, match=r"In all 12 are left out of .*: 12 of a format .*'cat/04.tif', \.\.\."
    ):
        index(uri, stages=STAGES)
    ((count, examples),) = left_out(uri).values()
    assert (count, len(examples)) == (12, 5)


def test_on_left_out_of_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_left_out must be error or report, got 'skip'"):
        index(tmp_path.as_uri(), stages=STAGES, on_left_out="skip")  # type: ignore[arg-type]


def test_left_out_of_a_published_dataset_is_kept(tmp_path: Path) -> None:
    uri = write(tmp_path, {"cat/1.jpg": JPEG, "cat/1.tif": b"II*\0"})
    dataset = index(uri, stages=STAGES, on_left_out="report")
    dataset.publish()
    expected = {"format": LeftOut(count=1, examples=("cat/1.tif",))}
    assert Dataset.open(dataset.store, dataset.digest).left_out == expected
    assert dataset.with_stages([Decode(), ToFloat()]).left_out == expected


def test_command_reports_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = write(tmp_path, {"cat/1.jpg": JPEG, "cat/1.tif": b"II*\0"})
    assert main(["index", uri, "--json"]) == 2
    assert "'cat/1.tif': .tif is not supported" in capsys.readouterr().err
    assert main(["index", uri, "--json", "--on-left-out", "report"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["left_out"] == {"format": {"count": 1, "examples": ["cat/1.tif"]}}
    assert "left out: 1 of a format that is not read ('cat/1.tif')" in told.err


# --------------------------------------------------------------------------------------------- shards


def sample(key: str, target: int = 0, data: bytes = JPEG) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", data), (f"{key}.cls", str(target).encode())]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("b.tar.gz", b"\x1f\x8b", "compressed"),
        ("b.TGZ", b"\x1f\x8b", "compressed"),
        ("b.tar.zst", b"\x28\xb5\x2f\xfd", "compressed"),
        ("b.tar", gzip.compress(shard(sample("y"))), "compressed"),
        ("b.tar", bz2.compress(shard(sample("y"))), "compressed"),
        ("b.tar", lzma.compress(shard(sample("y"))), "compressed"),
        ("b.tar.part", shard(sample("y")), "format"),
        ("b.zip", b"PK\3\4", "format"),
        (".b.tar", shard(sample("y")), "hidden"),
        ("b\udce9.tar", shard(sample("y")), "name"),
    ],
)
def test_index_of_shards_names_the_ones_it_leaves_out(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    uri = write(tmp_path, {"a.tar": shard(sample("x")), name: data})
    assert left_out(uri) == {reason: (1, (name.encode(errors="backslashreplace").decode(),))}
    assert index(uri, stages=STAGES, on_left_out="report").names([0]) == ["x"]


@pytest.mark.parametrize("name", ["README.md", "a.idx", "a.tar.md5", "sizes.json", ".a.tar.swp", "x.bin"])
def test_index_of_shards_beside_what_is_no_shard_is_not_blocked(tmp_path: Path, name: str) -> None:
    assert len(stored(write(tmp_path, {"a.tar": shard(sample("x")), name: b"no shard"}))) == 1


def test_index_of_shards_in_upper_case_reads_them(tmp_path: Path) -> None:
    uri = write(
        tmp_path, {"a.tar": shard(sample("x")), "B.TAR": shard(sample("y")), "c.Tar": shard(sample("z"))}
    )
    assert sorted(key for key, *_ in stored(uri)) == ["x", "y", "z"]


@pytest.mark.parametrize("gap", [0, 512, 10240, 40 * 512 + 1024, 3 * 2**20])
def test_index_of_joined_archives_holds_the_samples_of_all(tmp_path: Path, gap: int) -> None:
    parts = [shard(sample(key, target)) for target, key in enumerate("abc")]
    uri = write(tmp_path, {"a.tar": bytes(gap).join(parts)})
    assert stored(uri) == [("a", 0, JPEG), ("b", 1, JPEG), ("c", 2, JPEG)]


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (b"garbage" * 100, "what follows its end mark at byte .* is no tar archive"),
        (shard(sample("b"))[:1000], "truncated|not a whole tar"),
        (shard(sample("a")), "'a': two .cls members"),
    ],
)
def test_index_of_an_archive_with_anything_else_behind_it_is_refused(
    tmp_path: Path, tail: bytes, problem: str
) -> None:
    uri = write(tmp_path, {"a.tar": shard(sample("a")) + tail})
    for choice in ("error", "report"):
        with pytest.raises(DatasetError, match=problem):
            index(uri, stages=STAGES, on_left_out=choice)  # type: ignore[arg-type]


Build = Callable[[tarfile.TarFile], None]


def archive(*entries: tuple[str, bytes | str | None, bytes]) -> bytes:
    """Return a tar file: name, content or link target, and type of each member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as built:
        for name, content, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if isinstance(content, str):
                entry.linkname = content
            entry.size = len(content) if isinstance(content, bytes) else 0
            built.addfile(entry, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


FILE, SYM, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
OTHER = encoded(pixels(9, 9, seed=3))


@pytest.mark.parametrize(
    "entries",
    [
        [
            ("d/y.jpg", "../o/a.jpg", SYM),
            ("d/y.cls", b"1", FILE),
            ("o/a.jpg", OTHER, FILE),
            ("o/a.cls", b"0", FILE),
        ],
        [
            ("y.jpg", "./z.link", SYM),
            ("y.cls", b"1", FILE),
            ("z.link", "o/a.jpg", SYM),
            ("o/a.jpg", OTHER, FILE),
        ],
        [("o/a.jpg", OTHER, FILE), ("l", "o", SYM), ("y.jpg", "l/a.jpg", SYM), ("y.cls", b"1", FILE)],
        [("./o/a.jpg", OTHER, FILE), ("y.jpg", "o/a.jpg", HARD), ("y.cls", b"1", FILE)],
        [
            ("o/a.jpg", OTHER, FILE),
            ("o/b.jpg", "a.jpg", SYM),
            ("o/y.jpg", "o/b.jpg", HARD),
            ("o/y.cls", b"1", FILE),
        ],
        [
            ("pool/1", b"1", FILE),
            ("pool/2", OTHER, FILE),
            ("y.cls", "pool/1", SYM),
            ("y.jpg", "pool/2", HARD),
        ],
        [("o/a.jpg", OTHER, FILE), ("y.jpg", "x/../o//a.jpg", SYM), ("y.cls", b"1", FILE)],
        [
            ("a.jpg", JPEG, FILE),
            ("a.cls", b"0", FILE),
            ("b.jpg", "a.jpg", HARD),
            ("y.jpg", OTHER, FILE),
            ("y.cls", b"1", FILE),
        ],
    ],
)
def test_index_of_a_shard_with_links_reads_where_they_lead(
    tmp_path: Path, entries: list[tuple[str, bytes | str | None, bytes]]
) -> None:
    uri = write(tmp_path, {"a.tar": archive(*entries)})
    dataset = index(uri, stages=STAGES, on_left_out="report")
    names = dataset.names(range(len(dataset)))
    (row,) = (at for at, name in enumerate(names) if name.rpartition("/")[2] == "y")
    (ref,) = dataset.locate([row])
    assert dataset.store.get_range(ref.object, ref.start, ref.stop, etag=ref.etag) == OTHER
    assert int(dataset.targets[row]) == 1


@pytest.mark.parametrize(
    ("entry", "reason", "words"),
    [
        (("y.jpg", "/data/y.jpg", SYM), "link", "symbolic link to '/data/y.jpg'"),
        (("y.jpg", "../y.jpg", SYM), "link", "symbolic link to '../y.jpg'"),
        (("y.jpg", "y.jpg", SYM), "link", "symbolic link to 'y.jpg'"),
        (("y.jpg", "nowhere.jpg", HARD), "link", "hard link to 'nowhere.jpg'"),
        (("y.jpg", "later.jpg", HARD), "link", "hard link to 'later.jpg'"),
        (("y.jpg", None, tarfile.FIFOTYPE), "special", "neither a file nor a link"),
        (("y.jpg", None, tarfile.CHRTYPE), "special", "neither a file nor a link"),
        (("y.tif", b"II*\0", FILE), "no_media", "must have one of jpg, .*; it has .tif"),
        ((".y.jpg", JPEG, FILE), "hidden", "hidden by a dot"),
    ],
)
def test_index_of_a_shard_names_the_member_it_leaves_out(
    tmp_path: Path, entry: tuple[str, bytes | str | None, bytes], reason: str, words: str
) -> None:
    built = archive(("x.jpg", JPEG, FILE), ("x.cls", b"0", FILE), entry, (entry[0][:-4] + ".cls", b"0", FILE))
    uri = write(tmp_path, {"a.tar": built})
    ((count, examples),) = (value for key, value in left_out(uri).items() if key == reason)
    assert count == 1
    assert "y" in examples[0]
    with pytest.raises(DatasetError, match=words):
        index(uri, stages=STAGES)
    assert index(uri, stages=STAGES, on_left_out="report").names([0]) == ["x"]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_index_of_a_member_whose_name_is_not_utf8_leaves_it_out_by_name(tmp_path: Path, form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="latin-1") as built:
        for name, data in [*sample("x"), *sample("d/caf\u00e9")]:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            built.addfile(entry, io.BytesIO(data))
    uri = write(tmp_path, {"a.tar": out.getvalue()})
    assert left_out(uri) == {"name": (1, ("a.tar: d/caf\\udce9",))}


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "LICENSE",
        "classes.txt",
        "__meta__.json",
        "__meta__",
        "d/__x.json",
        "._x.jpg",
        ".DS_Store",
    ],
)
def test_index_of_a_shard_with_what_is_no_sample_is_not_blocked(tmp_path: Path, name: str) -> None:
    uri = write(tmp_path, {"a.tar": shard([(name, b"no sample"), *sample("__x"), *sample("d/y")])})
    assert [key for key, *_ in stored(uri)] == ["__x", "d/y"]


def test_index_of_a_key_without_class_is_left_out_when_allowed(tmp_path: Path) -> None:
    uri = write(tmp_path, {"a.tar": shard([*sample("x"), ("y.jpg", JPEG), ("z.cls", b"0")])})
    assert left_out(uri) == {"no_media": (1, ("a.tar: z",)), "no_class": (1, ("a.tar: y",))}


@pytest.mark.parametrize(
    "text",
    [b"\xef\xbb\xbf1\r\n", b"\xef\xbb\xbf 1", b"1\0", b"\t1\x0b\x0c\n", b"01", b" " * 63 + b"1"],
)
def test_class_of_a_member_is_read_as_editors_write_it(tmp_path: Path, text: bytes) -> None:
    assert stored(write(tmp_path, {"a.tar": shard([("x.jpg", JPEG), ("x.cls", text)])})) == [("x", 1, JPEG)]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (b" " * 64 + b"1", "65 bytes"),
        (b"1 \xef\xbb\xbf", r"b'1 .xef.xbb.xbf'"),
        (b"\xff\xfe1\0", r"b'.xff.xfe1'"),
        (b"1_0", "b'1_0'"),
        (b"\xef\xbb\xbf", "b''"),
    ],
)
def test_class_of_a_member_that_is_no_number_is_refused(tmp_path: Path, text: bytes, got: str) -> None:
    uri = write(tmp_path, {"a.tar": shard([("x.jpg", JPEG), ("x.cls", text)])})
    with pytest.raises(DatasetError, match=rf"'x': \.cls must hold a whole number >= 0, got {got}$"):
        index(uri, stages=STAGES, on_left_out="report")


def test_keys_that_differ_by_a_slash_are_samples_each(tmp_path: Path) -> None:
    members = [*sample("/x", 1, OTHER), *sample("x"), *sample("./x", 2)]
    uri = write(tmp_path, {"a.tar": shard(members)})
    assert stored(uri) == [("/x", 1, OTHER), ("x", 0, JPEG), ("./x", 2, JPEG)]


@pytest.mark.parametrize(
    "name",
    ["labels.csv", "captions.json", "pax_global_header", "in.tar", "img.001.jpg", "y.jpg ", "__y.tif", "__y"],
)
def test_member_with_a_key_of_its_own_is_counted(tmp_path: Path, name: str) -> None:
    uri = write(tmp_path, {"a.tar": shard([*sample("x"), (name, b"some")])})
    assert left_out(uri) == {"no_media": (1, (f"a.tar: {name.partition('.')[0]}",))}


# ---------------------------------------------------------------------------------------- classes.txt


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        (b"\xef\xbb\xbf  cat \r\n\tdog\r\n\r\n \t\r\n", ("cat", "dog")),
        (b"cat\rdog\r", ("cat", "dog")),
        ("big cat\x0b\ndo\u2029g\x85s\n".encode(), ("big cat", "do\u2029g\x85s")),
        (b"cat\ncat\n", ("cat", "cat")),
        ("\u00e4 \u00f6\n\ufeffdog".encode(), ("\u00e4 \u00f6", "\ufeffdog")),
    ],
)
def test_class_names_as_editors_write_them_are_read(
    tmp_path: Path, text: bytes, classes: tuple[str, ...]
) -> None:
    members = [*sample("x", 0), *sample("y", 1)]
    assert (
        index(write(tmp_path, {"a.tar": shard(members), "classes.txt": text}), stages=STAGES).classes
        == classes
    )


@pytest.mark.parametrize("folder", ["", "train/"])
def test_class_names_beside_the_one_shard_that_is_indexed_are_read(tmp_path: Path, folder: str) -> None:
    uri = write(tmp_path, {f"{folder}a.tar": shard(sample("x")), f"{folder}classes.txt": b"cat\ndog\n"})
    assert index(uri, f"{folder}a.tar", stages=STAGES).classes == ("cat", "dog")
    (tmp_path / folder / "classes.txt").unlink()
    assert index(uri, f"{folder}a.tar", stages=STAGES).classes == ("0",)


@pytest.mark.parametrize("text", [b"cat\n\ndog\n", b"\ncat\ndog\n", b"\xef\xbb\xbf\r\ncat\r\ndog"])
def test_class_names_with_a_blank_line_between_are_refused(tmp_path: Path, text: bytes) -> None:
    uri = write(tmp_path, {"a.tar": shard(sample("x")), "classes.txt": text})
    with pytest.raises(DatasetError, match=r"'classes\.txt': line \d is blank and others follow"):
        index(uri, stages=STAGES)


# ------------------------------------------------------------------------------------------------- S3


@pytest.fixture
def bucket() -> Any:
    with S3Server() as server:
        yield server


def opened(server: S3Server, uri: str) -> Store:
    options = {"endpoint": server.url, "region": "us-east-1", "max_retries": "0"}
    keys = {"access_key_id": "key", "secret_access_key": "secret"}
    return Store.open(uri, options={**options, **keys})


@pytest.mark.parametrize(
    "keys",
    [
        ["/a/1.jpg", "/b/2.jpg"],
        ["/1.jpg", "a/1.jpg", "b/2.jpg"],
        ["a/1.jpg", "/.hidden"],
        ["/x.tar", "x.tar"],
    ],
)
def test_index_of_keys_that_begin_with_a_slash_is_refused(bucket: S3Server, keys: list[str]) -> None:
    bucket.objects = {f"photos/{key}": JPEG for key in keys}
    with pytest.raises(StoreError, match="holds keys that begin with '/'"):
        index(opened(bucket, "s3://photos"), stages=STAGES)


def test_store_of_a_folder_with_an_empty_name_is_refused(bucket: S3Server) -> None:
    for uri in ("s3://photos//a", "s3://photos/a//", "s3://photos/a//b"):
        with pytest.raises(ConfigError, match="empty segment"):
            opened(bucket, uri)


def test_index_of_folder_markers_takes_none_for_a_sample(bucket: S3Server) -> None:
    keys = {"s/": b"", "s/a/": b"", "s/b/": b"", "s/b/1.jpg": JPEG, "s/b/x.jpg/": b"", "s/b/y.jpg/": b""}
    bucket.objects = {f"photos/{key}": data for key, data in {**keys, "s/b/y.jpg/2.jpg": JPEG}.items()}
    store = opened(bucket, "s3://photos")
    dataset = index(store, "s", stages=STAGES, on_left_out="report")
    assert dataset.names([0, 1]) == ["b/1.jpg", "b/y.jpg/2.jpg"]
    assert (dataset.classes, len(dataset)) == (("a", "b"), 2)
    assert dataset.left_out == {"empty_class": LeftOut(count=1, examples=("s/a",))}


def test_index_of_keys_that_differ_by_a_last_slash_holds_each_once(bucket: S3Server) -> None:
    keys = {"s/a/1.jpg": JPEG, "s/a/1.jpg/": b"", "s/a/2.jpg": JPEG, "s/a/2.jpg/": OTHER, "t/a.tar/": b""}
    bucket.objects = {f"photos/{key}": data for key, data in {**keys, "t/a.tar": shard(sample("x"))}.items()}
    store = opened(bucket, "s3://photos")
    dataset = index(store, "s", stages=STAGES, on_left_out="report")
    refs = dataset.locate(range(len(dataset)))
    data = [store.get_range(ref.object, ref.start, ref.stop, etag=ref.etag) for ref in refs]
    assert (dataset.names([0, 1]), data) == (["a/1.jpg", "a/2.jpg"], [JPEG, JPEG])
    assert dataset.left_out == {"name": LeftOut(count=1, examples=("s/a/2.jpg",))}
    assert len(index(store, "t", stages=STAGES)) == 1


def test_index_of_a_memory_store_names_what_it_leaves_out() -> None:
    store = Store.open("memory://left-out")
    for name, data in {"a/1.npy": npy(np.zeros(1)), "a/1.npz": b"PK"}.items():
        store.put(name, data)
    with pytest.raises(DatasetError, match=r"'a/1\.npz': \.npz is not supported"):
        index(store, stages=STAGES)


def test_links_to_one_file_of_a_folder_are_samples_each(tmp_path: Path) -> None:
    uri = write(tmp_path, {"a/1.jpg": JPEG})
    os.symlink("1.jpg", tmp_path / "a/2.jpg")
    os.link(tmp_path / "a/1.jpg", tmp_path / "a/3.jpg")
    os.symlink("a", tmp_path / "b")
    assert [name for name, *_ in stored(uri)] == [f"{c}/{n}.jpg" for c in "ab" for n in (1, 2, 3)]
