"""Test direct reads: each byte is the object's, in its place, or obstore reads it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some
from tests.server.running import wait_for
from tests.store.faulty_server import FaultyServer, _Faulty
from tests.store.s3_server import _etag
from tests.store.test_store_faults import connect, num_opened, opened, tried
from upriver.errors import ObjectChanged, StoreError
from upriver.store import Store, direct
from upriver.store.buffers import BufferSequence
from upriver.store.direct import (
    MOST_HEAD_BYTES,
    MOST_REFUSALS,
    ROOM_BYTES,
    SCRATCH_BYTES,
    SIGNED_S,
    Direct,
    _Connection,
    _Refused,
)

BIG = random.Random(1).randbytes(3_000_000)
Crook = Callable[[bytes, dict[str, str]], bytes]


class Crooked(FaultyServer):
    """S3 double that answers the next GETs of parts with the raw bytes that each crook makes."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Crooked
        self.crooks: list[Crook] = []
        self.connections = 0
        self.heads: list[dict[str, str]] = []

    def verify_request(self, *_: Any) -> bool:
        self.connections += 1
        return True


class _Crooked(_Faulty):
    server: Crooked

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.server.heads.append({"path": self.path, **dict(self.headers)})
        if status == 206 and self.server.crooks:
            self.wfile.write(self.server.crooks.pop(0)(body, headers or {}))
            self.close_connection = True
            return
        super()._answer(status, body, headers)


@pytest.fixture
def server() -> Iterator[Crooked]:
    with Crooked() as running:
        yield running


@pytest.fixture
def store(server: Crooked) -> Store:
    store = connect(server)
    store.put("a", BIG)
    return store


def views_of(room: bytearray, sizes: tuple[int, ...]) -> list[memoryview]:
    """Return its memory in pieces of these sizes, and the rest."""
    views, rest = [], memoryview(room)
    for size in sizes:
        views.append(rest[:size])
        rest = rest[size:]
    return [*views, rest]


async def into(
    store: Store, by: Direct, room: bytearray, start: int = 0, *, sizes: tuple[int, ...] = (), **options: Any
) -> None:
    await store.read_into_async("a", start, views_of(room, sizes), etag=_etag(BIG), direct=by, **options)


def read(store: Store, start: int = 0, nbytes: int = len(BIG), num: int = 1, **options: Any) -> bytes:
    room = bytearray(nbytes)

    async def reading() -> None:
        async with opened(store, num) as by:
            await into(store, by, room, start, **options)

    asyncio.run(reading())
    return bytes(room)


# --------------------------------------------------------------------------------------- placement of bytes


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.sampled_from([0, 1, 7, ROOM_BYTES - 1, ROOM_BYTES, SCRATCH_BYTES + 3]), max_size=8),
    piece_bytes=st.sampled_from([1, 1000, 300_000, 10**7]),
)
def test_whatever_memory_they_belong_to_they_are_there(seed: int, sizes: list[int], piece_bytes: int) -> None:
    """Call the protocol itself, as a transport does: in as many pieces as it likes."""
    content = BIG[: sum(sizes) + 5]
    rooms = [bytearray(size) for size in (*sizes, 5)]
    head = b"HTTP/1.1 206 x\r\nContent-Range: bytes 3-%d/9999999\r\nContent-Length: %d\r\n\r\n"
    said = head % (len(content) + 2, len(content)) + content
    transport, told, rng = _Transport(), [], random.Random(seed)

    async def reading() -> None:
        connection = _Connection()
        connection.connection_made(transport)
        places = BufferSequence([memoryview(room) for room in rooms])
        asking = asyncio.create_task(connection.ask(b"request", 3, places, 60))
        at = 0

        async def come() -> None:
            nonlocal at
            while at < len(said):
                buffer = connection.get_buffer(-1)
                assert len(buffer) > 0
                most = min(len(buffer), len(said) - at)
                nbytes = min(most, rng.choice([1 + len(said) // 50, 30 + rng.randrange(100_000), most]))
                buffer[:nbytes] = said[at : at + nbytes]
                at += nbytes
                connection.buffer_updated(nbytes)
                await asyncio.sleep(0)

        await asyncio.sleep(0)
        coming = asyncio.create_task(come())
        await asking
        while num_bytes := await connection.more(piece_bytes, 60):
            told.append(num_bytes)
        await coming
        assert connection.is_open

    asyncio.run(reading())
    assert b"".join(rooms) == content and transport.written == [b"request"]
    assert sum(told) == len(content) and all(nbytes >= piece_bytes for nbytes in told[:-1])


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reading, self.paused, self.aborted = True, 0, False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def pause_reading(self) -> None:
        self.reading, self.paused = False, self.paused + 1

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("start", [0, 1, 1_234_567])
def test_a_part_of_an_object_comes_as_it_is(store: Store, alone: None, start: int) -> None:
    assert read(store, start, len(BIG) - start) == BIG[start:]
    assert read(store, start, 17, sizes=(1, 2, 3)) == BIG[start : start + 17]


def test_pieces_are_told_of_once_they_are_there(store: Store, alone: None) -> None:
    room, told = bytearray(len(BIG)), [0]

    async def came(num_bytes: int) -> None:
        told.append(told[-1] + num_bytes)
        assert room[: told[-1]] == BIG[: told[-1]]
        await asyncio.sleep(0.001)

    async def reading() -> None:
        async with opened(store) as by:
            await into(store, by, room, on_bytes=came, piece_bytes=100_000)

    asyncio.run(reading())
    assert told[1] == 0 and told[-1] == len(BIG)


def test_a_connection_serves_one_request_after_the_other(store: Store, server: Crooked, alone: None) -> None:
    async def reading() -> None:
        async with opened(store) as by:
            for start in range(0, 2_000_000, 500_000):
                room = bytearray(500_000)
                await into(store, by, room, start)
                assert room == BIG[start : start + 500_000]
            assert server.connections == 2  # the first one wrote the object

    asyncio.run(reading())


def test_several_read_at_once_and_never_more_than_allowed(store: Store, server: Crooked) -> None:
    rooms = [bytearray(100_000) for _ in range(30)]

    async def reading() -> None:
        by = store.direct(3)
        assert by is not None
        async with by:
            for _ in range(2):
                by.open("a", 10)
                assert len(by._opening) == 3
            await asyncio.gather(*(into(store, by, room, 10 * n) for n, room in enumerate(rooms)))
            by.open("a", 10)
            await asyncio.gather(*by._opening)
            assert len(by._idle) == 3 and not by._busy

    asyncio.run(reading())
    assert [bytes(room) for room in rooms] == [BIG[10 * n : 10 * n + 100_000] for n in range(30)]


def test_a_connection_that_ended_while_idle_is_not_used(store: Store, alone: None) -> None:
    async def reading() -> None:
        async with opened(store, 2) as by:
            by._idle[-1].close()
            room = bytearray(100)
            await into(store, by, room, 7)
            assert room == BIG[7:107] and by._refusals == 0

    asyncio.run(reading())


def test_without_a_connection_nobody_waits_for_one(store: Store, server: Crooked) -> None:
    room = bytearray(len(BIG))

    async def reading() -> None:
        by = store.direct(3)
        assert by is not None
        async with by:
            await into(store, by, room)
            assert not by._busy

    asyncio.run(reading())
    assert room == BIG


def test_what_is_asked_for_without_an_etag_is_left_to_obstore(store: Store, server: Crooked) -> None:
    room = bytearray(100)

    async def reading() -> None:
        async with opened(store) as by:
            await store.read_into_async("a", 5, memoryview(room), direct=by)

    asyncio.run(reading())
    assert room == BIG[5:105]
    assert "X-Amz-Signature" not in server.heads[-1]["path"]


def test_other_stores_have_none(tmp_path: Any) -> None:
    assert Store.open(tmp_path.as_uri()).direct(3) is None
    assert Store.open("memory://direct").direct(3) is None


# ------------------------------------------------------------------------------------------------ requests


def test_urls_are_signed_and_anonymous_ones_are_not(
    store: Store, server: Crooked, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(store, 0, 10) == BIG[:10]
    assert "X-Amz-Signature=" in server.heads[-1]["path"]
    options = {"endpoint": server.url, "anonymous": "true"}
    for anybody in (options, {"endpoint": server.url}):
        if anybody is not options:
            monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        there = Store.open("s3://bucket/p", options=anybody)
        assert read(there, 0, 10) == BIG[:10]
        assert server.heads[-1]["path"] == "/bucket/p/a"
        assert "Authorization" not in server.heads[-1]


def test_a_request_asks_for_these_bytes_of_this_object_as_they_are(
    store: Store, server: Crooked, alone: None
) -> None:
    assert read(store, 5, 10) == BIG[5:15]
    asked = server.heads[-1]
    assert asked["Range"] == "bytes=5-14" and asked["If-Match"] == _etag(BIG)
    assert asked["Accept-Encoding"] == "identity"


def test_an_object_that_was_replaced_gives_no_bytes(store: Store, server: Crooked) -> None:
    connect(server).put("a", BIG[::-1])
    with pytest.raises(ObjectChanged):
        read(store, 5, 10)


def test_names_are_quoted(server: Crooked, alone: None) -> None:
    store, name, room = connect(server), "folder/ü b+c%.bin", bytearray(3)
    store.put(name, b"123")

    async def reading() -> None:
        async with opened(store) as by:
            await store.read_into_async(name, 0, memoryview(room), etag=store.head(name).etag, direct=by)

    asyncio.run(reading())
    assert room == b"123"


@pytest.mark.parametrize("etag", ['"a"\r\nRange: bytes=0-1', '"ü"', "\x00"])
def test_an_etag_that_cannot_be_sent_is_not(store: Store, server: Crooked, etag: str) -> None:
    async def reading() -> None:
        async with opened(store) as by:
            asked = len(server.heads)
            with pytest.raises(StoreError, match="no object has the ETag"):
                await store.read_into_async("a", 0, memoryview(bytearray(5)), etag=etag, direct=by)
            assert not any("X-Amz-Signature" in head["path"] for head in server.heads[asked:])

    asyncio.run(reading())


def test_a_proxy_is_left_to_obstore(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert num_opened(store) == 0
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert num_opened(store) == 2
    for name in ("http_proxy", "no_proxy"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    assert num_opened(store) == 0


@pytest.mark.parametrize(
    ("scheme", "port"),
    [("https", 443), ("http", 80), ("https://host:9443", 9443), ("http://host:9000", 9000)],
)
def test_a_connection_goes_to_the_port_of_its_scheme(
    store: Store, monkeypatch: pytest.MonkeyPatch, scheme: str, port: int
) -> None:
    url = scheme if "://" in scheme else f"{scheme}://host"

    async def opening() -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        async def refused(_protocol: Any, host: str, port: int, *, ssl: Any) -> Any:
            asked.append((host, port, ssl is not None))
            raise ConnectionRefusedError

        async def signed(_path: str) -> Any:
            return urlsplit(f"{url}/bucket/a")

        by = store.direct(1)
        assert by is not None
        monkeypatch.setattr(by, "_url_of", signed)
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refused)
        async with by:
            by.open("a", 1)
            await asyncio.gather(*by._opening)
        return asked

    assert asyncio.run(opening()) == [("host", port, scheme.startswith("https"))]


def test_nothing_is_opened_once_all_is_closed(store: Store) -> None:
    async def closing() -> None:
        async with opened(store) as by:
            pass
        by.open("a", 1)
        assert not by._opening

    asyncio.run(closing())


# ----------------------------------------------------------------------------------------- rejected answers


def _said(body: bytes, headers: dict[str, str], status: bytes = b"206 Partial Content") -> bytes:
    lines = [b"HTTP/1.1 " + status, *(f"{name}: {value}".encode() for name, value in headers.items())]
    return b"\r\n".join([*lines, b"", b""]) + body


def _with(body: bytes, headers: dict[str, str], **others: str) -> bytes:
    length = {"Content-Length": str(len(body))}
    return _said(body, headers | length | {name.replace("_", "-"): value for name, value in others.items()})


def _without_length(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "Content-Length"}


def _wrong(body: bytes) -> bytes:
    """Return other bytes, which an accepted answer would show."""
    return bytes(byte ^ 0xFF for byte in body)


CROOKS: dict[str, Crook] = {
    "another range": lambda body, headers: _with(
        _wrong(body), headers, Content_Range=f"bytes 1-{len(body)}/3000000"
    ),
    "another start": lambda body, headers: _with(
        _wrong(body), headers, Content_Range=re.sub(r"\d+-", "3-", headers["Content-Range"])
    ),
    "a shorter range": lambda body, headers: _with(
        _wrong(body), headers, Content_Range=headers["Content-Range"].replace("-", "-1")
    ),
    "another unit": lambda body, headers: _with(
        _wrong(body), headers, Content_Range=headers["Content-Range"].replace("bytes", "lines")
    ),
    "no range": lambda body, headers: _said(_wrong(body), {"Content-Length": str(len(body))}),
    "the whole": lambda body, headers: _said(BIG, {"Content-Length": str(len(BIG))}, b"200 OK"),
    "another status": lambda body, headers: _said(
        _wrong(body), headers | {"Content-Length": str(len(body))}, b"200 OK"
    ),
    "another length": lambda body, headers: _with(body, headers, Content_Length="7"),
    "a length too small": lambda body, headers: _with(
        _wrong(body), headers, Content_Length=str(len(body) - 1)
    ),
    "a length too large": lambda body, headers: _with(
        _wrong(body), headers, Content_Length=str(len(body) + 1)
    ),
    "no length": lambda body, headers: _said(_wrong(body), _without_length(headers)),
    "negative length": lambda body, headers: _with(_wrong(body), headers, Content_Length="-1"),
    "chunks": lambda body, headers: _said(
        b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        _without_length(headers) | {"Transfer-Encoding": "chunked"},
    ),
    "chunks with a length": lambda body, headers: _with(_wrong(body), headers, Transfer_Encoding="chunked"),
    **{
        f"packed by {encoding}": lambda body, headers, encoding=encoding: _with(  # type: ignore[misc]
            _wrong(body), headers, Content_Encoding=encoding
        )
        for encoding in ("gzip", "zstd", "br", "aws-chunked", "identity, gzip")
    },
    "elsewhere": lambda body, headers: _said(b"", {"Location": "http://127.0.0.1:1/"}, b"307 Go"),
    "no HTTP": lambda body, headers: b"SSH-2.0-OpenSSH_9.2\r\n\r\n" + body,
    "nothing": lambda body, headers: b"",
    "half a head": lambda body, headers: b"HTTP/1.1 206 Partial",
    "a head without end": lambda body, headers: b"HTTP/1.1 206 x\r\n" + b"a" * (2 * MOST_HEAD_BYTES),
    "a line without end": lambda body, headers: _with(body, headers, x="a" * MOST_HEAD_BYTES),
    "many lines": lambda body, headers: _with(body, headers, **{f"x{n}": "1" for n in range(200)}),
    "half a body": lambda body, headers: _with(body, headers)[: -len(body) // 2],
    "more than asked for": lambda body, headers: _with(body, headers) + b"more",
}


@pytest.mark.parametrize("name", some(4, CROOKS))
def test_any_other_answer_is_left_to_obstore(store: Store, server: Crooked, name: str) -> None:
    for start, nbytes in ((0, 200), (5, 2_900_000)):
        server.crooks = [CROOKS[name]]
        assert read(store, start, nbytes) == BIG[start : start + nbytes]
        assert not server.crooks


def test_after_some_refusals_nothing_more_is_asked(
    store: Store, server: Crooked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, direct.__name__)

    async def reading() -> None:
        async with opened(store, MOST_REFUSALS) as by:
            for number in range(MOST_REFUSALS + 2):
                server.crooks = [CROOKS["no range"]] * (number < MOST_REFUSALS)
                room = bytearray(50)
                await into(store, by, room)
                assert room == BIG[:50] and not server.crooks
            by.open("a", 3)
            assert not by._opening

    asyncio.run(reading())
    told = [record.getMessage() for record in caplog.records if record.name == direct.__name__]
    assert told == ["a read is left to obstore: _Refused"] * MOST_REFUSALS, "and no signed URL"


def test_refusals_count_only_where_they_follow_each_other(store: Store, server: Crooked) -> None:
    async def reading() -> None:
        async with store.direct(8) as by:  # type: ignore[union-attr]
            for number in range(3 * MOST_REFUSALS):
                by.open("a", 1)
                await asyncio.gather(*by._opening)
                assert len(by._idle) == 1, "one answer that is as it should be was between each two"
                server.crooks = [CROOKS["no range"]] * (number % MOST_REFUSALS != MOST_REFUSALS - 1)
                room = bytearray(50)
                await into(store, by, room)
                assert room == BIG[:50] and not server.crooks

    asyncio.run(reading())


def test_a_store_that_nobody_reaches_is_left_to_obstore(server: Crooked) -> None:
    with Crooked() as gone:
        store = connect(gone, max_retries="0")

    async def reading() -> None:
        async with tried(store, 2) as by:
            assert not by._idle
            with pytest.raises(StoreError, match="cannot read 'a'"):
                await store.read_into_async("a", 0, memoryview(bytearray(5)), etag='"x"', direct=by)

    asyncio.run(reading())


# ----------------------------------------------------------------------------- interrupted and slow answers


def test_what_is_broken_off_writes_nothing_any_more(store: Store, server: Crooked) -> None:
    room = bytearray(len(BIG))

    async def reading() -> None:
        async with opened(store, 2) as by:
            begun = asyncio.Event()

            async def came(num_bytes: int) -> None:
                if num_bytes:
                    begun.set()
                    await asyncio.sleep(60)

            task = asyncio.create_task(into(store, by, room, on_bytes=came, piece_bytes=1000))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not by._busy and len(by._idle) == 1
            before = bytes(room)
            await asyncio.sleep(0.05)
            assert room == before != BIG
            memory = memoryview(room)
            memory.release()

    asyncio.run(reading())
    room.clear()  # which is an error while a view exists


class Dribbling:
    """Send the answer to each request bit by bit."""

    HEAD = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-%d/%d\r\nContent-Length: %d\r\n\r\n"

    def __init__(self, content: bytes, bit_bytes: int) -> None:
        self.content, self.bit_bytes = content, bit_bytes
        self.ended = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"end"):
                size = len(self.content)
                writer.write(self.HEAD % (size - 1, size, size))
                for at in range(0, size, self.bit_bytes):
                    writer.write(self.content[at : at + self.bit_bytes])
                    await writer.drain()
                    await asyncio.sleep(0.002)
        writer.close()
        self.ended.set()


@pytest.mark.parametrize("sizes", [(), (1, 70_000, 5, 100_000)])
def test_the_kernel_wakes_nobody_for_less_than_is_waited_for(sizes: tuple[int, ...]) -> None:
    """Check also that the kernel never waits for more than the rest, for any last piece and memory."""
    content, told = BIG[:500_001], list[int]()

    async def reading() -> int:
        dribbling = Dribbling(content, 2_500)
        server = await asyncio.start_server(dribbling, "127.0.0.1", 0)
        times = 0

        class Counting(_Connection):
            def buffer_updated(self, nbytes: int) -> None:
                nonlocal times
                times += 1
                super().buffer_updated(nbytes)

        def low_bytes() -> int:
            found: int = connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)  # type: ignore[union-attr]
            return found

        async with server:
            address = server.sockets[0].getsockname()
            _, connection = await asyncio.get_running_loop().create_connection(Counting, *address)
            for piece_bytes in (150_000, 10**7, 1):
                room = bytearray(len(content))
                assert low_bytes() == 1
                await connection.ask(b"end", 0, BufferSequence(views_of(room, sizes)), 60)
                while num_bytes := await connection.more(piece_bytes, 60):
                    told.append(num_bytes)
                assert bytes(room) == content and connection.is_open
                if piece_bytes == 10**7:
                    whole = times
            connection.close()
            await dribbling.ended.wait()
        return whole

    times = asyncio.run(reading())
    assert sum(told) == 3 * len(content)
    # Two answers of 200 bits each, one read in four pieces: once each, and once for each memory.
    assert times <= 40


@pytest.mark.parametrize("sizes", [(), (1, 10_000, 5)])
def test_what_came_before_a_silence_is_told_although_it_is_no_piece(sizes: tuple[int, ...]) -> None:
    content, room = BIG[:500_000], bytearray(500_000)

    async def stalling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"end")
        writer.write(Dribbling.HEAD % (len(content) - 1, len(content), len(content)))
        for start, stop in ((0, 200_000), (200_000, 240_000)):
            await asyncio.sleep(0.05)  # the kernel receives each separately
            writer.write(content[start:stop])
        with suppress(OSError):
            await reader.read()
        writer.close()

    async def reading() -> list[int]:
        async with await asyncio.start_server(stalling, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, *address)
            await connection.ask(b"end", 0, BufferSequence(views_of(room, sizes)), 60)
            told = [await connection.more(150_000, 60), await connection.more(150_000, 0.5)]
            with pytest.raises(TimeoutError):
                await connection.more(150_000, 60)
            connection.close()
            await asyncio.sleep(0.05)  # the server learns of it meanwhile
            return told

    told = asyncio.run(reading())
    assert sum(told) == 240_000 and 150_000 <= told[0] <= 200_000
    assert room[:240_000] == content[:240_000] and not any(room[240_000:])


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 206 x\r\n"])
def test_who_waits_is_told_at_once_that_the_store_hung_up(said: bytes) -> None:
    async def hanging_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"end")
        writer.write(said)
        writer.close()

    async def reading() -> None:
        async with await asyncio.start_server(hanging_up, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, *address)
            with pytest.raises(ConnectionResetError, match="the store hung up"):
                await connection.ask(b"end", 0, BufferSequence(memoryview(bytearray(9))), 60)
            assert not connection.is_open

    asyncio.run(reading())


def test_nothing_is_left_open(store: Store) -> None:
    read(store, 0, 10, num=4)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert read(store, 0, 10, num=4) == BIG[:10]
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the server's descriptors are among them


def test_a_connection_does_not_read_ahead_of_who_does_not_take_it() -> None:
    transport, content = _Transport(), bytes(400_000)

    async def reading() -> None:
        connection, room = _Connection(), bytearray(len(content))
        connection.connection_made(transport)
        head = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-399999/400000\r\nContent-Length: 400000\r\n\r\n"

        def come(said: bytes) -> None:
            connection.get_buffer(-1)[: len(said)] = said
            connection.buffer_updated(len(said))

        asking = asyncio.create_task(connection.ask(b"", 0, BufferSequence(memoryview(room)), 60))
        await asyncio.sleep(0)
        come(head)
        await asking
        first = asyncio.create_task(connection.more(1000, 60))
        await asyncio.sleep(0)
        come(bytes(2000))
        assert await first == 2000 and transport.reading
        come(bytes(1500))
        assert not transport.reading
        assert await connection.more(1000, 60) == 1500
        rest = asyncio.create_task(connection.more(10**6, 60))
        await asyncio.sleep(0)
        assert transport.reading
        for _ in range(2):
            come(bytes((len(content) - 3500) // 2))
        assert await rest == len(content) - 3500
        assert transport.paused == 1

    asyncio.run(reading())


@pytest.mark.parametrize(
    ("status", "said", "stays_open"),
    [
        ("HTTP/1.1", "", True),
        ("HTTP/1.1", "Connection: keep-alive\r\n", True),
        ("HTTP/1.1", "Connection: close\r\n", False),
        ("HTTP/1.1", "connection:Close\r\n", False),
        ("HTTP/1.0", "", False),
        ("HTTP/1.0", "Connection: keep-alive\r\n", True),
    ],
)
@pytest.mark.parametrize("nbytes", [5, 100_000])
def test_a_connection_is_used_again_only_where_the_store_keeps_it(
    status: str, said: str, stays_open: bool, nbytes: int
) -> None:
    """The store may or may not have hung up before the answer arrives."""
    content, room, transport = BIG[:nbytes], bytearray(nbytes), _Transport()
    head = (
        f"{status} 206 x\r\nContent-Range: bytes 0-{nbytes - 1}/*\r\nContent-Length: {nbytes}\r\n{said}\r\n"
    )

    async def reading() -> None:
        connection = _Connection()
        connection.connection_made(transport)
        asking = asyncio.create_task(connection.ask(b"", 0, BufferSequence(memoryview(room)), 60))
        await asyncio.sleep(0)
        for piece in (head.encode(), content):
            connection.get_buffer(-1)[: len(piece)] = piece
            connection.buffer_updated(len(piece))
        await asking
        assert await connection.more(nbytes, 60) == nbytes and await connection.more(nbytes, 60) == 0
        assert connection.is_open is stays_open

    asyncio.run(reading())
    assert room == content


@pytest.mark.parametrize("nbytes", [ROOM_BYTES - 1, ROOM_BYTES])
def test_a_buffer_with_room_enough_is_read_into_without_a_copy(nbytes: int) -> None:
    room = bytearray(nbytes)
    head = b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-%d/*\r\nContent-Length: %d\r\n\r\n" % (
        nbytes - 1,
        nbytes,
    )

    async def reading() -> object:
        connection = _Connection()
        connection.connection_made(_Transport())
        asking = asyncio.create_task(connection.ask(b"", 0, BufferSequence(memoryview(room)), 60))
        await asyncio.sleep(0)
        connection.get_buffer(-1)[: len(head)] = head
        connection.buffer_updated(len(head))
        await asking
        return connection.get_buffer(-1).obj

    assert (asyncio.run(reading()) is room) == (nbytes == ROOM_BYTES)


def test_a_head_that_goes_on_and_on_is_read_no_further() -> None:
    async def reading() -> None:
        connection, num_bytes = _Connection(), 0
        connection.connection_made(_Transport())
        asking = asyncio.create_task(connection.ask(b"", 0, BufferSequence(memoryview(bytearray(9))), 60))
        await asyncio.sleep(0)
        while not asking.done():
            piece = b"a" * 4096 if num_bytes else b"HTTP/1.1 206 x\r\nx: ".ljust(4096, b"a")
            connection.get_buffer(-1)[: len(piece)] = piece
            connection.buffer_updated(len(piece))
            num_bytes += len(piece)
            assert num_bytes <= MOST_HEAD_BYTES + len(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(_Refused):
            await asking
        assert not connection.is_open

    asyncio.run(reading())


def test_what_nobody_asked_for_ends_a_connection() -> None:
    connection, transport = _Connection(), _Transport()
    connection.connection_made(transport)
    connection.get_buffer(-1)[:3] = b"abc"
    connection.buffer_updated(3)
    assert transport.aborted and not connection.is_open


def test_a_signature_is_used_for_half_its_life(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request at the end of that half has the other half to arrive in."""
    signed: list[Any] = []
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    now_s = [0.0]
    sign = direct.obstore.sign_async

    def counted(*args: Any) -> Any:
        signed.append((args[2], args[3].total_seconds()))
        return sign(*args)

    monkeypatch.setattr(direct.obstore, "sign_async", counted)
    monkeypatch.setattr(direct, "time", clock)
    by = store.direct(1)
    assert by is not None
    for now_s[0], times in ((0.0, 1), (SIGNED_S / 2 - 1, 1), (SIGNED_S / 2 + 1, 2), (SIGNED_S - 1, 2)):
        asyncio.run(by._url_of("a"))
        assert signed == [("a", SIGNED_S)] * times
    asyncio.run(by._url_of("b"))
    assert signed[-1] == ("b", SIGNED_S)
