"""Read an object of an S3-compatible store from a connection directly into its final memory.

obstore passes bytes on in pieces. Its threads copy each piece twice and need the interpreter for it. On a
link of some Gbit/s a load spends its time on that. Here the kernel, or the TLS library, writes the bytes to
their destination. Only responses that match the request exactly are read this way. obstore handles all
others, since it knows credentials, redirects, proxies, retries and errors: `Direct.filling` then ends early
and raises nothing. obstore signs the requests in their URLs, and ``http.client`` parses the responses' heads.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import logging
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, cast
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore

from upriver.store.buffers import BufferSequence
from upriver.store.s3 import S3Access

if TYPE_CHECKING:
    from obstore.store import S3Store

log = logging.getLogger(__name__)

SCRATCH_BYTES, ROOM_BYTES = 256 * 1024, 64 * 1024
"""Bytes that are read at once if the next buffer has fewer than `ROOM_BYTES` left, as small tensors do."""

RECORDS_BYTES = 64 * 1024
"""Bytes that the TLS library may have read from a socket and not passed on yet: more than any record has."""

MOST_HEAD_BYTES = 64 * 1024
SIGNED_S = 900.0
"""Lifetime of a signed URL, which proxies and servers may log. Half of the time is used."""

MOST_REFUSALS = 2
"""Consecutive bad responses after which all reads are left to obstore."""

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class Direct:
    """Connections to a store, of one event loop.

    A request uses an idle connection. While there is none, obstore reads its bytes, and no request waits.

    Args:
        access: Access to the bucket.
        most: Most concurrent connections.
    """

    def __init__(self, access: S3Access, *, most: int) -> None:
        self._access, self._most = access, most
        self._signed: dict[str, tuple[SplitResult, float]] = {}
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._context: ssl.SSLContext | None = None
        self._signing: S3Store | None = None
        self._refusals = 0

    async def __aenter__(self) -> Direct:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        self._refusals = MOST_REFUSALS
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in (*self._idle, *self._busy):
            connection.close()
        await asyncio.sleep(0)  # the event loop closes their sockets

    def open(self, path: str, num: int) -> None:
        """Start to open connections to an object's host, up to `num` in all and within the bound."""
        self._idle = [each for each in self._idle if each.is_open]
        there = len(self._idle) + len(self._busy) + len(self._opening)
        if self._refusals < MOST_REFUSALS:
            for _ in range(min(num, self._most) - there):
                task = asyncio.get_running_loop().create_task(self._open(path))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    async def filling(
        self, path: str, start: int, places: BufferSequence, etag: str, piece_bytes: int
    ) -> AsyncGenerator[int, None]:
        """Fill memory from an object that still has this ETag.

        Args:
            places: The memory. Some of it stays unfilled if the rest is left to obstore.
            piece_bytes: Fewest bytes of a piece, except the last.

        Yields:
            0 when the response begins, then the size of each written piece.
        """
        connection = self._taken()
        if connection is None:
            return
        self._busy.add(connection)
        try:
            url = await self._url_of(path)
            request = _request(url, start, start + places.left, etag)
            silence_s = self._access.read_timeout_s
            await connection.ask(request, start, places, silence_s)
            yield 0
            while num_bytes := await connection.more(piece_bytes, silence_s):
                yield num_bytes
            self._refusals = 0
            if connection.is_open:
                self._idle.append(connection)
        except (OSError, _Refused, obstore.exceptions.BaseError) as error:
            self._gives_up(error)
        finally:
            self._busy.discard(connection)
            if connection not in self._idle:
                connection.close()

    def _taken(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    def _gives_up(self, error: Exception) -> None:
        self._refusals += 1
        # The error's text is not logged: it may hold a URL with a signature.
        log.debug("a read is left to obstore: %s", type(error).__name__)

    async def _open(self, path: str) -> None:
        try:
            url = await self._url_of(path)
            if self._is_proxied(url):
                self._refusals = MOST_REFUSALS
                return
            async with asyncio.timeout(self._access.connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection,
                    url.hostname or "",
                    url.port or (443 if url.scheme == "https" else 80),
                    ssl=await self._tls() if url.scheme == "https" else None,
                )
        except (OSError, ValueError, obstore.exceptions.BaseError) as error:
            self._gives_up(error)
        else:
            self._idle.append(connection)

    @cached_property
    def _proxies(self) -> dict[str, str]:
        return getproxies()  # inspects each environment variable

    def _is_proxied(self, url: SplitResult) -> bool:
        proxy = self._proxies.get(url.scheme) or self._proxies.get("all")
        return bool(proxy) and not proxy_bypass(url.netloc)

    async def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            trusted = self._access.trusted

            def made() -> ssl.SSLContext:
                context = ssl.create_default_context()
                if trusted:
                    context.load_verify_locations(cadata=trusted)
                return context

            self._context = await asyncio.to_thread(made)  # there are many certificates
        return self._context

    async def _url_of(self, path: str) -> SplitResult:
        url, until_s = self._signed.get(path, (None, 0.0))
        if url is None or time.monotonic() > until_s:
            if self._signing is None:
                self._signing = self._access.signing()
            signed = await obstore.sign_async(self._signing, "GET", path, timedelta(seconds=SIGNED_S))
            url = urlsplit(signed)
            if self._access.anonymous:
                url = url._replace(query="")
            self._signed[path] = url, time.monotonic() + SIGNED_S / 2
        return url


class _Refused(Exception):
    """Signal a response that does not match its request."""


class _Connection(asyncio.BufferedProtocol):
    """Connection with one request at a time.

    Attributes:
        is_open: True if another request may be sent.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._kept_bytes, self._low_bytes = 0, 1
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._room = self._scratch
        self._head: bytearray | None = None
        self._places: BufferSequence | None = None
        self._start = self._left = self._pending = self._piece_bytes = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False

    async def ask(self, request: bytes, start: int, places: BufferSequence, silence_s: float) -> None:
        """Send a request and wait for the response to begin.

        Raises:
            _Refused: If the response does not match the request.
            OSError: If the connection breaks, or no response begins within `silence_s`.
        """
        assert self._transport is not None
        self._start, self._left, self._places = start, places.left, places
        self._head, self._pending = bytearray(), 0
        self._transport.write(request)
        while self._head is not None:
            await self._wait(silence_s)

    async def more(self, piece_bytes: int, silence_s: float) -> int:
        """Wait for `piece_bytes` more written bytes, or the last ones. Return their number, 0 at the end.

        Raises:
            OSError: If the connection breaks, or too few bytes arrive within `silence_s`, after all arrived
                bytes were returned.
        """
        self._piece_bytes = piece_bytes
        self._sleeps()
        while self._left and self._pending < piece_bytes and not (self._pending and self._error):
            await self._wait(silence_s)
        num_bytes, self._pending = self._pending, 0
        if not num_bytes:
            self._places, self._room = None, self._scratch
        return num_bytes

    def close(self) -> None:
        """Close at once. Nothing is written afterwards."""
        self.is_open = False
        self._places, self._room = None, self._scratch
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, silence_s: float) -> None:
        if self._error is not None:
            raise self._error
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(silence_s):
                await self._waiter
        except TimeoutError as error:
            await self._take_the_rest()
            self._breaks(error)
        finally:
            self._waiter = None

    async def _take_the_rest(self) -> None:
        """Read the bytes that have arrived, of a connection that brings less than was awaited."""
        self._kept_bytes, left = self._left, None
        self._sleeps()
        while left != self._left:
            left = self._left
            for _ in range(2):  # first the loop learns that there are bytes, then it reads them
                await asyncio.sleep(0)

    def _sleeps(self) -> None:
        """Let the kernel wake this thread for all awaited bytes, and for no packet before.

        Each wake-up takes the processor and its caches from the threads that compute.
        """
        wanted = min(self._piece_bytes - self._pending, self._left) - self._kept_bytes
        low_bytes = max(1, wanted)
        if self._socket is not None and low_bytes != self._low_bytes:
            with suppress(OSError):  # the socket is closed, or its system lacks the option
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_bytes)
                self._low_bytes = low_bytes

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _breaks(self, error: Exception) -> None:
        self._error, self.is_open = self._error or error, False
        self._wake()

    # -------------------------------------------------------------------------------- of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement `asyncio.BaseProtocol`."""
        self._transport, self.is_open = cast(asyncio.Transport, transport), True
        self._socket = transport.get_extra_info("socket")
        self._kept_bytes = 0 if transport.get_extra_info("ssl_object") is None else RECORDS_BYTES

    def connection_lost(self, exc: Exception | None) -> None:
        """Implement `asyncio.BaseProtocol`."""
        self._breaks(exc if isinstance(exc, OSError) else ConnectionResetError("the store hung up"))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes: their destination, or scratch memory."""
        self._room = self._scratch
        if self._places is not None and self._head is None:
            room = self._places.room(self._left)
            self._room = room if len(room) >= ROOM_BYTES else self._scratch[: self._left or None]
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes that have arrived, and pass scratch bytes on."""
        if self._places is None or (self._head is None and not self._left):
            self.close()  # no request has asked for these bytes
            return
        if self._head is not None:
            self._head += self._scratch[:nbytes]
            self._read_head(self._head)
            return
        if self._room.obj is self._scratch.obj:
            self._places.take(self._room[:nbytes])
        else:
            self._places.filled(nbytes)
        self._came(nbytes)

    def _came(self, nbytes: int) -> None:
        self._left -= nbytes
        self._pending += nbytes
        self._sleeps()
        if self._pending >= self._piece_bytes or not self._left:
            self._wake()
            if self._waiter is None and self._left and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()

    def _read_head(self, came: bytearray) -> None:
        end = came.find(b"\r\n\r\n")
        if end < 0:
            if len(came) > MOST_HEAD_BYTES:
                self._breaks(_Refused("its head has no end"))
            return
        body = bytes(came[end + 4 :])
        try:
            answer = http.client.HTTPResponse(cast("socket.socket", _Said(came[: end + 4])), method="GET")
            answer.begin()
            self._check(answer, len(body))
        except (_Refused, http.client.HTTPException, ValueError) as error:
            self._breaks(error if isinstance(error, _Refused) else _Refused(str(error)))
            return
        self.is_open = not answer.will_close
        self._head = None
        if body and self._places is not None:
            self._places.take(body)
            self._came(len(body))
        self._wake()

    def _check(self, answer: http.client.HTTPResponse, num_body: int) -> None:
        """Check that a response matches its request."""
        found = _RANGE.fullmatch(answer.getheader("Content-Range", ""))
        stop = self._start + self._left
        if answer.status != 206 or found is None or (int(found[1]), int(found[2])) != (self._start, stop - 1):
            raise _Refused("it is not of this range")
        plain = answer.getheader("Content-Encoding", "identity") == "identity"
        if answer.chunked or not plain or answer.length != self._left or num_body > self._left:
            raise _Refused("it is not of this length")


class _Said:
    """Wrap received bytes for ``http.client``."""

    def __init__(self, came: bytes | bytearray) -> None:
        self._came = came

    def makefile(self, _: str) -> io.BytesIO:
        """Return the bytes as a file, see `socket.socket.makefile`."""
        return io.BytesIO(self._came)


def _request(url: SplitResult, start: int, stop: int, etag: str) -> bytes:
    """Return the bytes of a request."""
    target = f"{url.path}?{url.query}" if url.query else url.path
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {url.netloc}",
        f"Range: bytes={start}-{stop - 1}",
        f"If-Match: {etag}",
        "Accept: */*",
        "Accept-Encoding: identity",
        "User-Agent: upriver",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii")
