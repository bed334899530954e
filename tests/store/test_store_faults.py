"""Test a store behind a faulty network: a read returns the right bytes, or an error that names the cause."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.examples import some
from tests.store.faulty_server import FaultyServer
from upriver.errors import ConfigError, ObjectChanged, ObjectNotFound, StoreError
from upriver.store import Store
from upriver.store.direct import Direct
from upriver.store.s3 import secrets_of

CONTENT = bytes(number % 251 for number in range(200_000))
START, STOP = 1_000, 199_000

PATIENT_S = "2"
"""Seconds to wait for the next bytes, long enough that a busy machine does not seem silent."""

Read = Callable[[Store, str | None], bytes]


def in_a_thread(store: Store, etag: str | None) -> bytes:
    return store.get_range("a", START, STOP, etag=etag)


def on_a_loop(store: Store, etag: str | None) -> bytes:
    return asyncio.run(store.get_range_async("a", START, STOP, etag=etag))


def into_memory(store: Store, etag: str | None) -> bytes:
    room = bytearray(STOP - START)
    store.read_into("a", START, memoryview(room), etag=etag)
    return bytes(room)


def into_memory_on_a_loop(store: Store, etag: str | None) -> bytes:
    room = bytearray(STOP - START)
    asyncio.run(store.read_into_async("a", START, memoryview(room), etag=etag))
    return bytes(room)


def directly(store: Store, etag: str | None) -> bytes:
    room = bytearray(STOP - START)

    async def reading() -> None:
        async with opened(store) as direct:
            await store.read_into_async("a", START, memoryview(room), etag=etag, direct=direct)

    asyncio.run(reading())
    return bytes(room)


@asynccontextmanager
async def opened(store: Store, num: int = 1) -> AsyncIterator[Direct]:
    """Open ``num`` connections."""
    async with tried(store, num) as direct:
        assert len(direct._idle) == num
        yield direct


@asynccontextmanager
async def tried(store: Store, num: int) -> AsyncIterator[Direct]:
    """Open as many of ``num`` connections as possible."""
    direct = store.direct(8)
    assert direct is not None
    async with direct:
        direct.open("a", num)
        await asyncio.gather(*direct._opening)
        yield direct


def num_opened(store: Store) -> int:
    """Return how many of two connections can be opened."""

    async def trying() -> int:
        async with tried(store, 2) as direct:
            return len(direct._idle)

    return asyncio.run(trying())


@pytest.fixture(params=some(3, [in_a_thread, on_a_loop, directly, into_memory, into_memory_on_a_loop]))
def read(request: pytest.FixtureRequest) -> Read:
    found: Read = request.param
    return found


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer() as running:
        yield running


@pytest.fixture
def etag(server: FaultyServer) -> str:
    store = connect(server)
    store.put("a", CONTENT)
    return store.head("a").etag


def connect(server: FaultyServer, **options: str) -> Store:
    settings = {"access_key_id": "alice:reader", "secret_access_key": "top+secret", "max_retries": "3"}
    return Store.open("s3://bucket/p", name="here", options={"endpoint": server.url, **settings, **options})


# ------------------------------------------------------------------------------------ stalls and silence


def test_a_body_that_stalls_is_resumed_where_it_stopped(server: FaultyServer, etag: str, read: Read) -> None:
    server.faults = ["stalled"]
    assert read(connect(server, read_timeout_s=PATIENT_S), etag) == CONTENT[START:STOP]
    assert server.reads == [f"bytes={START}-{STOP - 1}", f"bytes={(START + STOP) // 2}-{STOP - 1}"]


def test_a_store_that_says_nothing_is_asked_again(server: FaultyServer, etag: str, read: Read) -> None:
    server.faults = ["silent", 503, "silent"]
    assert read(connect(server, read_timeout_s=PATIENT_S), etag) == CONTENT[START:STOP]
    assert server.reads == [f"bytes={START}-{STOP - 1}"] * 4


@pytest.mark.parametrize("fault", ["stalled", "silent", 503, 500])
def test_a_store_that_does_not_get_well_is_given_up(
    server: FaultyServer, etag: str, read: Read, fault: int | str
) -> None:
    server.faults = [fault] * 20
    with pytest.raises(StoreError, match=r"cannot read 'a' in store 'here'") as caught:
        read(connect(server, read_timeout_s="0.3"), etag)
    assert not isinstance(caught.value, ObjectChanged | ObjectNotFound)
    assert len(server.reads) == 1 + 3 + (read is directly)


def test_a_connection_that_is_reset_is_resumed(server: FaultyServer, etag: str, read: Read) -> None:
    server.faults = ["reset"]
    assert read(connect(server), etag) == CONTENT[START:STOP]
    assert len(server.reads) == 2


def test_an_object_that_ends_early_is_said_to(server: FaultyServer, etag: str, read: Read) -> None:
    server.faults = ["short"] * 2
    with pytest.raises(
        StoreError, match=rf"'a' in store 'here' ended early: bytes {START} to {STOP} asked for"
    ):
        read(connect(server), etag)


def test_reading_into_memory_is_broken_off_at_once_on_a_loop(server: FaultyServer, etag: str) -> None:
    store, room = connect(server, read_timeout_s="200"), bytearray(len(CONTENT))

    async def broken_off() -> None:
        begun = asyncio.Event()

        async def came(num_bytes: int) -> None:
            begun.set()

        reading = asyncio.create_task(store.read_into_async("a", 0, memoryview(room), on_bytes=came))
        await begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    for fault in ("stalled", "stalled", None):
        server.faults = [fault] if fault else []
        asyncio.run(broken_off())
    assert len(server.reads) == 3


# --------------------------------------------------------------------------------- changes in mid-body


def test_an_object_that_changes_while_it_is_read_is_said_to_have_changed(
    server: FaultyServer, etag: str, read: Read
) -> None:
    server.faults = ["changed"]
    with pytest.raises(ObjectChanged, match=r"'a' in store 'here'.*index again"):
        read(connect(server), etag)
    assert len(server.reads) == 2


def test_two_halves_of_two_objects_are_never_put_together(
    server: FaultyServer, etag: str, read: Read
) -> None:
    """This holds too where the reader named no ETag."""
    server.faults = ["changed"]
    with pytest.raises(StoreError):
        read(connect(server), None)


def test_an_object_that_goes_while_it_is_read_is_said_to_be_gone(
    server: FaultyServer, etag: str, read: Read
) -> None:
    server.faults = ["gone"]
    with pytest.raises(ObjectNotFound, match=r"no object 'a' in store 'here'"):
        read(connect(server), etag)


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_store_and_no_key(server: FaultyServer, etag: str, status: int) -> None:
    store = connect(server)
    uses: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.put("a", b"2"),
        lambda: list(store.list()),
    ]
    for use in uses:
        server.faults = [status]  # the answer repeats the request's Authorization header, as real ones do
        with pytest.raises(StoreError, match=r"store 'here'.*the store refuses these credentials") as caught:
            use()
        for secret in ("alice", "top+secret", "Signature"):
            assert secret not in str(caught.value)
    assert store.get("a") == CONTENT


def test_secrets_are_known_as_they_stand_in_a_url() -> None:
    known = secrets_of({"access_key_id": "alice:reader", "secret_access_key": "a/b"})
    assert {"alice:reader", "alice%3Areader", "a/b", "a%2Fb"} <= set(known)
    assert list(known) == sorted(known, key=len, reverse=True)


@pytest.mark.parametrize("variable", ["AWS_SESSION_TOKEN", "AWS_TOKEN"])
def test_keys_of_the_options_are_not_joined_to_a_token_of_the_environment(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "of-somebody-else")
    with pytest.raises(ConfigError, match=f"access_key_id is given.*{variable}") as caught:
        connect(server)
    assert "of-somebody-else" not in str(caught.value)
    connect(server, session_token="my-own").put("a", b"1")
    assert server.objects == {"bucket/p/a": b"1"}


# ------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with ``ca.pem``, and ``server.pem`` for 127.0.0.1, which it signed."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is not here")
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    ca = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
    commands = [
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=tests"],
        ["req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1"],
        ["x509", "-req", "-in", "server.csr", *ca, "-days", "2", "-extfile", "names", "-out", "server.crt"],
    ]
    for command in commands:
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
    both = (folder / "server.crt").read_text() + (folder / "server.key").read_text()
    (folder / "server.pem").write_text(both)
    return folder


def test_an_operators_own_authority_is_trusted_when_it_is_named(certificates: Path) -> None:
    with FaultyServer(certificates / "server.pem") as server:
        trusting = connect(server, ca_file=str(certificates / "ca.pem"))
        trusting.put("a", CONTENT)
        assert trusting.get("a", etag=trusting.head("a").etag) == CONTENT
        with pytest.raises(StoreError, match="cannot read 'a'"):
            connect(server, max_retries="0").get("a")
        assert server.num_signed == 0
        assert directly(trusting, trusting.head("a").etag) == CONTENT[START:STOP]
        assert server.num_signed == 1
        assert num_opened(connect(server)) == 0


@pytest.mark.parametrize("piece_bytes", [1, 70_000, 300_000, 10**7])
def test_a_kernel_that_waits_for_a_piece_waits_for_no_more_than_tls_has_left_there(
    certificates: Path, piece_bytes: int, alone: None
) -> None:
    """Some of the rest may have been read already, up to the middle of a record."""
    content = CONTENT * 5 + b"abc"
    with FaultyServer(certificates / "server.pem") as server:
        store = connect(server, ca_file=str(certificates / "ca.pem"))
        store.put("a", content)
        etag = store.head("a").etag
        room, told = bytearray(len(content)), list[int]()

        async def came(num_bytes: int) -> None:
            told.append(num_bytes)
            await asyncio.sleep(0.001 * (len(told) % 3))

        async def reading() -> None:
            async with opened(store) as direct:
                for _ in range(2):
                    room[:] = bytes(len(room))
                    await store.read_into_async(
                        "a",
                        0,
                        memoryview(room),
                        etag=etag,
                        direct=direct,
                        on_bytes=came,
                        piece_bytes=piece_bytes,
                    )
                    assert room == content

        asyncio.run(reading())
        assert sum(told) == 2 * len(content)


def test_an_authority_that_cannot_be_read_is_named(server: FaultyServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca_file: cannot read '.*nothing'"):
        connect(server, ca_file=str(tmp_path / "nothing"))
    (tmp_path / "empty").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot open store"):
        connect(server, ca_file=str(tmp_path / "empty"))
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match=r"ca_file: cannot read '.*image': it is no PEM file"):
        connect(server, ca_file=str(tmp_path / "image"))


def in_one_request(store: Store, content: bytes) -> None:
    store.put("a", content)


def in_one_request_on_a_loop(store: Store, content: bytes) -> None:
    asyncio.run(store.put_async("a", content))


def in_parts(store: Store, content: bytes) -> None:
    half = len(content) // 2
    store.put_stream("a", [content[:half], content[half:]])


WRITES = (in_one_request, in_one_request_on_a_loop, in_parts)


@pytest.mark.parametrize("write", WRITES)
def test_sending_much_may_take_longer_than_a_read_may_be_silent(
    server: FaultyServer, write: Callable[[Store, bytes], None]
) -> None:
    server.put_s = 1.0
    content = CONTENT * 12
    write(connect(server, read_timeout_s="0.25"), content)
    server.put_s = 0.0
    assert connect(server).get("a") == content
    assert [method for method, _, _ in server.requests].count("PUT") == 1


@pytest.mark.parametrize("write", WRITES)
def test_sending_much_ends_when_an_attempt_may_take_no_longer(
    server: FaultyServer, write: Callable[[Store, bytes], None]
) -> None:
    server.put_s = 1.0
    with pytest.raises(StoreError, match="cannot write 'a'"):
        write(connect(server, timeout_s="0.25", max_retries="0"), CONTENT * 12)


def test_a_store_that_does_not_answer_to_a_few_bytes_is_given_up_soon(server: FaultyServer) -> None:
    server.put_s = 1.0
    with pytest.raises(StoreError, match="cannot write 'a'"):
        connect(server, read_timeout_s="0.25", max_retries="0").put("a", CONTENT)
