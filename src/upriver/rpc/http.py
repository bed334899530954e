"""Provide HTTP/1.1 connections that another thread can break off, and their errors."""

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

from upriver._threads.background import BackgroundThread
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
"""Longest error body read; upriver's own have a few hundred bytes."""

SEND_BYTES = 1 << 20
"""Bytes per send: a socket's timeout covers one send, however much it is given."""

BROKEN = (OSError, http.client.HTTPException)
"""Errors of sockets, TLS and http.client if the peer is unreachable, stops, or violates the protocol."""

Place = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
"""One of a host's addresses, as returned by `socket.getaddrinfo`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Timeouts for a server, in seconds.

    Attributes:
        connect_s: For a connection to one of a host's addresses, and then for TLS. 5 s: a round trip around
            the world takes 0.3 s, a lost first packet costs 1 s and a second one 3 s.
        read_s: For the next bytes of an answer. 120 s: a micro-batch of the slowest network measured takes 11
            s on one core, and several others may be queued before it. The pool, which probes /livez, detects
            a dead server much sooner.
        question_s: For a short request (server information, a program's existence, a probe) and its complete
            answer, however slowly it arrives. 10 s: a front answers within milliseconds; a lost packet costs
            1 to 3 s, and asking the store for a program some more.
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
    """The parsed address of a server."""

    url: str
    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str, tls: ssl.SSLContext | None) -> Address:
        """Parse and check an address; ``tls`` is used for https.

        Raises:
            ConfigError: If it is invalid.
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
        """Return a connection that is not yet open."""
        if self.tls is None:
            return Connection(http.client.HTTPConnection(self.host, self.port), None)
        return Connection(http.client.HTTPSConnection(self.host, self.port, context=self.tls), self.tls)


class Connection:
    """An `http.client` connection that another thread can break off, even while it connects.

    Args:
        connection: A connection that is not yet open.
        tls: TLS context; None for a plain connection.
    """

    def __init__(self, connection: http.client.HTTPConnection, tls: ssl.SSLContext | None) -> None:
        self._connection, self._tls = connection, tls
        self._socket: socket.socket | None = None
        self._found: SimpleQueue[Sequence[Place] | BaseException | None] = SimpleQueue()
        self.broken_off = False

    def open(self, timeouts: Timeouts, timeout_s: float | None) -> None:
        """Connect if necessary, and set the timeout of the next answer."""
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
        # A server that rejects a body may answer and close before it has read all of the body. Its answer
        # says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            for view in views:
                for start in range(0, len(view), SEND_BYTES):
                    connection.send(view[start : start + SEND_BYTES])
        return connection.getresponse()

    def break_off(self) -> None:
        """Wake every reader or writer; the owner closes the descriptor."""
        self.broken_off = True
        self._found.put(None)
        if self._socket is not None:
            with suppress(OSError):
                # SSLSocket's own shutdown would discard the TLS state while the reader uses it.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, from the thread that owns it."""
        self._connection.close()

    def leave(self) -> None:
        """Detach a forked child from the connection, and leave it open for the parent.

        The child's descriptor then refers to another file. A freed number could be reused for an unrelated
        file, while some code in the child still holds it.
        """
        self.broken_off = True
        if self._socket is not None and self._socket.fileno() >= 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, self._socket.fileno(), inheritable=False)
            os.close(nothing)

    def _use(self, sock: socket.socket) -> None:
        """Make ``sock`` the socket that `break_off` shuts down."""
        self._socket = sock
        if self.broken_off:  # broken off before the socket existed
            raise ConnectionAbortedError("broken off")

    def _made(self, connect_s: float) -> socket.socket:
        """Return a connected socket, TLS included."""
        sock = self._joined(connect_s)
        try:
            if self._tls is None:
                return sock
            host = self._connection.host
            # Breaking off a handshake needs the TLS socket, so the handshake runs after the socket exists.
            sock = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            self._use(sock)
            sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        return sock

    def _joined(self, connect_s: float) -> socket.socket:
        """Return a socket connected to the first of the host's addresses that answers."""
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
        """Resolve the host. A resolver cannot be interrupted: a hanging one is left in its thread."""
        host, port = self._connection.host, self._connection.port
        with suppress(socket.gaierror):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)

        def ask() -> None:
            try:
                self._found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except BaseException as error:
                self._found.put(error)

        BackgroundThread(ask, name="lookup").start()
        found = self._found.get()
        if found is None:
            raise ConnectionAbortedError("broken off")
        if isinstance(found, BaseException):
            raise found
        return found


class ConnectionHolder:
    """Let one thread break off the connection that another one uses for an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.closed = False

    def hold(self, connection: Connection) -> None:
        """Hold the connection that is about to be used."""
        with self._lock:
            self._connection = connection
            if self.closed:
                connection.break_off()

    def release(self) -> None:
        """Release the connection before another request uses it."""
        with self._lock:
            self._connection = None

    def close(self) -> None:
        """Break off the held connection, or the next one."""
        with self._lock:
            self.closed = True
            if self._connection is not None:
                self._connection.break_off()


@contextmanager
def within(seconds: float, break_off: Callable[[], None], *, url: str) -> Iterator[None]:
    """Break off an exchange after ``seconds`` in total; a socket's timeout covers only a single read.

    Raises:
        ServerUnavailable: If it took longer, in place of the error that breaking off caused.
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
    # Check even without an error: http.client accepts a head that breaks off as complete.
    if over.is_set():
        raise ServerUnavailable(f"{url}: no answer in time ({seconds:g} s in all)") from cause


def read_to_end(response: http.client.HTTPResponse) -> None:
    """Read the rest of a response if it is short, so that the connection can carry another request."""
    with suppress(*BROKEN):
        response.read(ERROR_BODY_BYTES)


def error_of(response: http.client.HTTPResponse, url: str) -> UpriverError:
    """Return the error that a response with an error status carries."""
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
    """Return Retry-After in seconds; its other form, a date, is not used by upriver's servers."""
    return float(text) if text and text.isascii() and text.isdigit() else None
