"""HTTP/1.1 connections that another thread can break off, and what goes wrong on them."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from upriver.errors import (
    ConfigError,
    NotAuthorized,
    Overloaded,
    ProtocolError,
    ServerUnavailable,
    UpriverError,
)
from upriver.protocol import error_from
from upriver.text import said
from upriver.types import require_finite

ERROR_BODY_BYTES = 64 * 1024
"""Longest error body read; ours have a few hundred bytes."""

SEND_BYTES = 1 << 20
"""Sent at once: a socket's timeout covers one send, however much it is given."""

BROKEN = (OSError, http.client.HTTPException)
"""What sockets, TLS and http.client raise when the other side is not there, stops, or talks nonsense."""

Place = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""What `socket.getaddrinfo` says of one of a host's addresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long to wait for a server.

    Attributes:
        connect_s: For a connection to one of a host's addresses, and then for TLS. 5 s: a round trip around
            the world takes 0.3 s, a lost first packet costs 1 s and a second one 3 s.
        read_s: For the next bytes of an answer. 120 s: a micro-batch of the slowest network measured takes 11
            s on one core, and some others may be queued before it. That a silent server is alive is seen much
            sooner by the pool, which asks /livez.
        question_s: For a short question (what are you, do you have this program, a probe) and all of its
            answer, however it trickles. 10 s: a front answers within milliseconds; a lost packet costs it 1
            to 3 s, and the store that it asks for a program some more.
    """

    connect_s: float = 5.0
    read_s: float = 120.0
    question_s: float = 10.0

    def __post_init__(self) -> None:
        require_finite("connect_s", self.connect_s, positive=True)
        require_finite("read_s", self.read_s, positive=True)
        require_finite("question_s", self.question_s, positive=True)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, taken apart once."""

    url: str
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str, tls: ssl.SSLContext | None) -> Address:
        """Check an address; ``tls`` is used for https.

        Raises:
            ConfigError: If it is none.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigError(f"a server is http://HOST:PORT or https://HOST:PORT, got {url!r}") from None
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"the port of {url!r} must lie in 0..65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"a server is http://HOST:PORT or https://HOST:PORT, got {url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError(
                "a server's address has no credentials, query or fragment; the token goes apart"
            )
        secure = parts.scheme == "https"
        return cls(
            url=url.rstrip("/"),
            host=parts.hostname,
            port=port or (443 if secure else 80),
            path=parts.path.rstrip("/"),
            tls=(tls or ssl.create_default_context()) if secure else None,
        )

    def connection(self) -> Connection:
        """A connection that is not yet open."""
        if self.tls is None:
            return Connection(http.client.HTTPConnection(self.host, self.port), None)
        return Connection(http.client.HTTPSConnection(self.host, self.port, context=self.tls), self.tls)


class Connection:
    """An `http.client` connection that another thread can break off, also while it is being made.

    Args:
        connection: Not yet connected.
        tls: What it speaks TLS by; None where it does not.
    """

    def __init__(self, connection: http.client.HTTPConnection, tls: ssl.SSLContext | None) -> None:
        self._connection, self._tls = connection, tls
        self._socket: socket.socket | None = None
        self._found: SimpleQueue[Sequence[Place] | BaseException | None] = SimpleQueue()
        self.broken_off = False

    def open(self, timeouts: Timeouts, timeout_s: float | None) -> None:
        """Connect if need be; set the timeout of the next answer."""
        if self._connection.sock is None:
            self._connection.sock = self._made(min(timeouts.connect_s, timeout_s or timeouts.connect_s))
        self._use(self._connection.sock)
        self._connection.sock.settimeout(timeout_s or timeouts.read_s)

    def ask(
        self, method: str, path: str, body: Sequence[bytes | memoryview], headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send a request and wait for the head of its answer."""
        connection = self._connection
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        views = [memoryview(part).cast("B") for part in body]
        if views:
            connection.putheader("Content-Type", "application/octet-stream")
            connection.putheader("Content-Length", str(sum(len(view) for view in views)))
        connection.endheaders()
        # A server that refuses a body may answer and close before it has read all of it: its answer says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            for view in views:
                for start in range(0, len(view), SEND_BYTES):
                    connection.send(view[start : start + SEND_BYTES])
        return connection.getresponse()

    def break_off(self) -> None:
        """Wake whoever reads or writes; the descriptor is closed by its owner."""
        self.broken_off = True
        self._found.put(None)
        if self._socket is not None:
            with suppress(OSError):
                # Not SSLSocket's own, which takes its state away from under the reader.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close, from the thread that owns it."""
        self._connection.close()

    def leave(self) -> None:
        """In a child of the process that uses it: let go of it, and leave it open for that one.

        Whoever still has it here finds another file in its place: a number that were free would be given to
        something else.
        """
        self.broken_off = True
        if self._socket is not None and self._socket.fileno() >= 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self._socket.fileno(), inheritable=False)
            os.close(nothing)

    def _use(self, sock: socket.socket) -> None:
        """From here on breaking off means to shut this one down."""
        self._socket = sock
        if self.broken_off:  # before
            raise ConnectionAbortedError("broken off")

    def _made(self, connect_s: float) -> socket.socket:
        """A socket that is connected, TLS included."""
        sock = self._joined(connect_s)
        try:
            if self._tls is None:
                return sock
            host = self._connection.host
            # A handshake that has begun cannot be broken off before there is the socket that does it.
            sock = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            self._use(sock)
            sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        return sock

    def _joined(self, connect_s: float) -> socket.socket:
        """One that is connected to the first of the host's addresses that answers."""
        last = OSError("the host has no address")
        for family, kind, protocol, _, address in self._look_up():
            sock = socket.socket(family, kind, protocol)
            try:
                self._use(sock)
                sock.settimeout(connect_s)
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                if self.broken_off:
                    raise
                last = error
            else:
                return sock
        raise last

    def _look_up(self) -> Sequence[Place]:
        """Where the host is. A resolver cannot be interrupted: one that hangs is left behind."""
        host, port = self._connection.host, self._connection.port
        with suppress(socket.gaierror):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)

        def ask() -> None:
            try:
                self._found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except BaseException as error:
                self._found.put(error)

        threading.Thread(target=ask, name="upriver-lookup", daemon=True).start()
        found = self._found.get()
        if found is None:
            raise ConnectionAbortedError("broken off")
        if isinstance(found, BaseException):
            raise found
        return found


class Holder:
    """Lets one thread break off the connection that another one uses for an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.closed = False

    def hold(self, connection: Connection) -> None:
        """Take the connection that is about to be used."""
        with self._lock:
            self._connection = connection
            if self.closed:
                connection.break_off()

    def release(self) -> None:
        """The connection is about to serve someone else."""
        with self._lock:
            self._connection = None

    def close(self) -> None:
        """Break off what is held, now or later."""
        with self._lock:
            self.closed = True
            if self._connection is not None:
                self._connection.break_off()


@contextmanager
def within(seconds: float, break_off: Callable[[], None], *, url: str) -> Iterator[None]:
    """Break off what takes longer than ``seconds`` in all; a socket's timeout covers one read, not their sum.

    Raises:
        ServerUnavailable: If it took longer, in place of the error that being broken off led to.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        break_off()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    cause: UpriverError | None = None
    try:
        yield
    except UpriverError as error:
        if not over.is_set():
            raise
        cause = error
    finally:
        timer.cancel()
    # Without an error too: http.client takes a head that breaks off for one that ends.
    if over.is_set():
        raise ServerUnavailable(f"{url}: no answer in time ({seconds:g} s in all)") from cause


def read_to_end(response: http.client.HTTPResponse) -> None:
    """Read what is left, if it is little: the connection can then take another request."""
    with suppress(*BROKEN):
        response.read(ERROR_BODY_BYTES)


def error_of(response: http.client.HTTPResponse, url: str) -> UpriverError:
    """The error that an answer with an error status carries."""
    retry_after_s = _seconds(response.getheader("Retry-After"))
    with suppress(ValueError, RecursionError):
        body = json.loads(response.read(ERROR_BODY_BYTES))
        if isinstance(body, dict) and "error" in body:
            error = error_from(body)
            if isinstance(error, Overloaded) and retry_after_s is not None:
                error.retry_after_s = retry_after_s
            return error
    status = f"{url} answered {response.status} {said(response.reason, 80)}".rstrip()
    if response.status in (401, 403):
        return NotAuthorized(status)
    if response.status in (429, 503):
        return Overloaded(status, retry_after_s=1.0 if retry_after_s is None else retry_after_s)
    if response.status >= 500:
        return ServerUnavailable(status)
    return ProtocolError(f"{status}: is it an upriver server of this version?")


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is not used by our servers."""
    return float(text) if text and text.isascii() and text.isdigit() else None
