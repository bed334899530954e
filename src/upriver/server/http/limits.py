"""Bound what a client without a token can make the server hold.

Uvicorn's fast protocol accepts heads of any size, waits for their end without limit, and queues every request
that a connection pipelines. `BoundedHttp` limits all three, and the number of connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import nsmallest
from http import HTTPStatus
from typing import ClassVar, Literal

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from upriver.errors import Overloaded, ProtocolError, TooLarge, UpriverError
from upriver.protocol import error_body

log = logging.getLogger(__name__)

HEAD_BYTES = 64 * 1024
"""Most bytes of a request line and its headers, and of trailers and chunk heads between parts of a body.
upriver's clients send a few hundred."""

HEAD_FIELDS = 100
"""Most headers of a request. Short headers take twenty times as many bytes as Python objects as on the
wire."""

PIPELINED = 1
"""Requests that may wait for the previous response on one connection. upriver's clients never pipeline."""

LINGER_S = 2.0
"""Seconds for which input after a refusal is discarded. An immediate reset could overtake the response."""

ABORT = "abort"
"""Key in a request's state: a function that aborts the connection and drops what was not sent yet."""

KNOWN = "known"
"""Key in a request's state: a function that tells the connection that a tenant uses it."""

CORK = "cork"
"""Key in a request's state: a function that makes the connection hold short writes back, or release them.

Each send wakes the client: a head that leaves with the first bytes of the body saves one wake-up. Linux holds
short writes for at most 200 ms (tcp(7), TCP_CORK)."""

MADE_AT_ONCE = 64
"""Divisor: above the limit, one in this many connections is aborted at once. To find the oldest, all
connections are scanned."""

PEER_CERTIFICATE = "peer_certificate"
"""Key in a request's state: the client's certificate, in the form of `ssl.SSLSocket.getpeercert`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Limits that `bounded_http` enforces.

    Attributes:
        head_timeout_s: Seconds for a request's head; see `upriver.server.ServerConfig`, as for the next two.
        stall_timeout_s: Seconds after which a client that reads nothing is dropped.
        max_connections: Most connections at once.
        on_refused: Called with the code of each error that this layer sends.
    """

    head_timeout_s: float
    stall_timeout_s: float
    max_connections: int
    on_refused: Callable[[str], None]


def bounded_http(limits: HttpLimits) -> type[HttpToolsProtocol]:
    """Return the protocol class that uvicorn instantiates for each connection."""
    return type("LimitedHttp", (BoundedHttp,), {"limits": limits})


class HeldConnection:
    """Keep what decides which connection ends when a new one needs room.

    Attributes:
        since: Time of its last request, or of its start.
        known: Whether a tenant has used the connection.
        given_up: Whether it was aborted to make room.
    """

    transport: asyncio.Transport
    since: float = 0.0
    known: bool = False
    given_up: bool = False

    @property
    def busy(self) -> bool:
        """Return whether a request is being answered."""
        return False

    @property
    def unused(self) -> bool:
        """Return whether the connection has brought no request so far; the first may be on its way."""
        return True


def make_room(connections: Collection[object], newcomer: HeldConnection) -> bool:
    """End connections: unknown clients' first, then tenants' connections without a request.

    Within each group the connection that is longest without a request ends first.

    Returns:
        False if no connection can be ended.
    """
    others = (other for other in connections if isinstance(other, HeldConnection) and other is not newcomer)
    unused = [other for other in others if not (other.known and other.busy) and not other.given_up]
    for oldest in nsmallest(max(1, len(connections) // MADE_AT_ONCE), unused, key=_claim):
        oldest.given_up = True
        oldest.transport.abort()
    return bool(unused)


def _claim(held: HeldConnection) -> tuple[bool, bool, float]:
    return held.known, held.busy, held.since


class BoundedHttp(HeldConnection, HttpToolsProtocol):
    """One connection with bounded heads, bodies and waits.

    While no request is being answered, one of two timers runs. Uvicorn's timer runs between two requests.
    This class's timer runs from the connection's start, or from the first byte of a later head, to the end of
    the head. It also bounds the rest of a body whose response (401, for example) was sent before the body had
    arrived. While a request is being answered, its handler keeps the time.
    """

    limits: ClassVar[HttpLimits]

    _phase: Literal["before", "head", "body"] = "before"
    _no_body_nbytes = 0
    _progress = False
    _deaf = False
    _reason: UpriverError | None = None
    _refusal: tuple[int, UpriverError] | None = None
    _clock: asyncio.TimerHandle | None = None
    _write_clock: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # the cycle that runs, while `cycle` waits for it

    @property
    def busy(self) -> bool:
        """Return whether a request is being answered."""
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.disconnected)

    @property
    def unused(self) -> bool:
        """Return whether the connection has brought no request so far; the first may be on its way."""
        return self.cycle is None

    # ---------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection if necessary, and wait for its first head."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self._start_clock(self.limits.head_timeout_s, self._too_slow)
        most = self.limits.max_connections
        if len(self.connections) > most and not make_room(self.connections, self):
            self._refuse(503, Overloaded(f"all of {most} connections are in use"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handlers, and stop the timers."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_clock()
        self._stop_write_clock()
        if self._running is not None:  # uvicorn tells only the last one
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse input in pieces no larger than what may still arrive outside a body."""
        while data and not self._deaf and not self.transport.is_closing():
            take = HEAD_BYTES + 1 - self._no_body_nbytes
            piece, data = data[:take], data[take:]
            self._progress = False
            self._parse(piece)
            self._no_body_nbytes = 0 if self._progress else self._no_body_nbytes + len(piece)
            if self._no_body_nbytes > HEAD_BYTES and not self._deaf:
                self._refuse(431, TooLarge(f"the head of a request has at most {HEAD_BYTES} bytes"))
        self._watch()

    def pause_writing(self) -> None:
        """Start the stall timer: the client reads more slowly than the server sends."""
        super().pause_writing()
        self._write_clock = self.loop.call_later(self.limits.stall_timeout_s, self._takes_nothing)

    def resume_writing(self) -> None:
        """Stop the stall timer: the client has read some bytes."""
        super().resume_writing()
        self._stop_write_clock()

    # ------------------------------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        """Begin a head, and refuse one that was pipelined too early."""
        if len(self.pipeline) >= PIPELINED:
            raise self._because(ProtocolError("wait for an answer before you send the next request"))
        self._phase = "head"
        super().on_message_begin()
        self.scope["state"][PEER_CERTIFICATE] = self.transport.get_extra_info("peercert")
        self.scope["state"][ABORT] = self.transport.abort
        self.scope["state"][KNOWN] = self._become_known
        self.scope["state"][CORK] = self._cork

    def on_header(self, name: bytes, value: bytes) -> None:
        """Accept a header or a trailer within `HEAD_FIELDS`."""
        if len(self.headers) >= HEAD_FIELDS:
            raise self._because(TooLarge(f"a request has at most {HEAD_FIELDS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head. Its request is answered from here on, or waits for its turn."""
        before = self.cycle if self.busy else None
        self._phase, self._progress = "body", True
        super().on_headers_complete()
        self._running = before

    def on_body(self, body: bytes) -> None:
        """Pass a part of a body on, and note the progress."""
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._phase, self._progress = "before", True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End the response. The rest of its request may not have arrived yet."""
        self.since = self.loop.time()
        self._running = None
        super().on_response_complete()
        if self._refusal is not None and not self.busy:
            self._say(*self._refusal)
        self._watch()

    def _become_known(self) -> None:
        self.known = True

    def _cork(self, corked: bool) -> None:
        if not self.transport.is_closing():
            self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, corked)

    def _parse(self, data: bytes) -> None:
        """Parse as uvicorn does, but without uvicorn's log lines, which any client could trigger without end.

        A request to upgrade to another protocol is answered as a plain request.
        """
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            error = self._reason or ProtocolError("Invalid HTTP request received.")
            self._refuse(431 if isinstance(error, TooLarge) else 400, error)

    # ------------------------------------------------------------------------------------- clocks

    def timeout_keep_alive_handler(self) -> None:
        """Abort an idle connection. A client that has not read the response by now never will."""
        self.transport.abort()

    def _watch(self) -> None:
        """Keep the timer running that fits the connection's phase."""
        if self._deaf:
            return
        if self.busy or self.transport.is_closing():
            self._stop_clock()
        elif self._phase != "before":
            self._unset_keepalive_if_required()
            if self._clock is None:
                self._start_clock(self.limits.head_timeout_s, self._too_slow)
        elif self.timeout_keep_alive_task is None:
            self._stop_clock()
            left_s = self.since + self.timeout_keep_alive - self.loop.time()  # empty lines gain no time
            self.timeout_keep_alive_task = self.loop.call_later(
                max(0.0, left_s), self.timeout_keep_alive_handler
            )

    def _too_slow(self) -> None:
        if self._phase == "head":
            self._refuse(408, ProtocolError(f"no whole head came within {self.limits.head_timeout_s:g} s"))
        else:
            self.transport.abort()

    def _takes_nothing(self) -> None:
        log.warning("dropped a client that took nothing for %g s", self.limits.stall_timeout_s)
        self.transport.abort()

    def _start_clock(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, then)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _stop_write_clock(self) -> None:
        if self._write_clock is not None:
            self._write_clock.cancel()
            self._write_clock = None

    # ------------------------------------------------------------------------------------ refusals

    def _because(self, error: UpriverError) -> UpriverError:
        """Keep the reason for a refusal: the parser reports only that a callback raised."""
        self._reason = error
        return error

    def _refuse(self, status: int, error: UpriverError) -> None:
        """Stop reading, and send an error after the responses to earlier complete requests."""
        self._deaf = True
        self.limits.on_refused(error.code)
        log.debug("refused what %s sent: %s", self.client, error)
        if self.transport.is_closing():
            return
        if self._phase == "body" and self.cycle.response_complete:
            self._linger()
        elif self._phase == "body" and self.cycle.response_started:
            self.transport.close()
        else:
            if self._phase == "body":
                self._take_back()
            if self.busy:
                self._refusal = status, error
            else:
                self._say(status, error)

    def _take_back(self) -> None:
        """Detach the handler, if one has started, from a request whose body is invalid."""
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()
        if self._running is not None:
            self.pipeline.popleft()
            self.cycle, self._running = self._running, None

    def _say(self, status: int, error: UpriverError) -> None:
        """Send an error as the last response on this connection."""
        body = msgspec.json.encode(error_body(error))
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        if isinstance(error, Overloaded):
            head.append(f"retry-after: {math.ceil(error.retry_after_s)}")
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Close after the client has had time to read the error."""
        if self.transport.can_write_eof():  # TLS cannot close one direction; the response has its length
            self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self._start_clock(LINGER_S, self.transport.abort)
