"""Uvicorn's HTTP with limits: what a stranger can make the server hold, before anyone has looked at a token.

Uvicorn's fast protocol takes heads of any size, waits for their end for ever, and queues as many requests of
a connection as come. Here all of that is bounded, and so is the number of connections.
"""

from __future__ import annotations

import asyncio
import logging
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
"""Of a request line and its headers; ours have a few hundred. As much may come between parts of a body."""

HEAD_FIELDS = 100
"""Headers of a request: as Python objects, short ones take twenty times what they took on the wire."""

PIPELINED = 1
"""Requests that may wait for the answer to the one before them. Our clients never send one early."""

LINGER_S = 2.0
"""After a refusal, what still comes is thrown away for so long: a reset could overtake the answer."""

ABORT = "abort"
"""Where in a request's state it stands how its connection is broken off, with what was not sent yet."""

KNOWN = "known"
"""Where in a request's state it stands how its connection is told that a tenant uses it."""

CORK = "cork"
"""Where in a request's state it stands how its connection holds short writes back, and lets them go again.
Each send wakes the client: a head that goes with the first of a body saves one. Linux holds them for 200 ms
at most (tcp(7), TCP_CORK)."""

MADE_AT_ONCE = 64
"""Part of the connections that is ended at once where there are too many: 1 in so many. Finding the oldest
looks at all of them."""

PEER_CERTIFICATE = "peer_certificate"
"""Where in a request's state the client's certificate stands, as `ssl.SSLSocket.getpeercert` tells it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """What `bounded_http` enforces.

    Attributes:
        head_timeout_s: See `upriver.server.ServerConfig`, as for the next two.
        stall_timeout_s: For what is sent.
        max_connections: At once.
        on_refused: Told the code of each error that is answered here.
    """

    head_timeout_s: float
    stall_timeout_s: float
    max_connections: int
    on_refused: Callable[[str], None]


def bounded_http(limits: HttpLimits) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, which makes an object of it for each connection."""
    return type("LimitedHttp", (BoundedHttp,), {"limits": limits})


class HeldConnection:
    """A connection, as far as making room for another one goes.

    Attributes:
        transport: To abort.
        since: When it last had a request, or came.
        known: Whether a tenant has used it.
        given_up: Room was made of it.
    """

    transport: asyncio.Transport
    since: float = 0.0
    known: bool = False
    given_up: bool = False

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return False


def make_room(connections: Collection[object], newcomer: HeldConnection) -> bool:
    """End connections, strangers' first, then tenants' without a request. False if there is none to end.

    Among each the one goes first that has gone longest without a request.
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
    """One connection.

    While no request is being answered one of two clocks runs: uvicorn's own between two requests, and ours
    from a connection's start, or the first byte of a later head, to the end of the head. Ours also bounds how
    long the rest of a body may take that was answered before it was there (401, say). While a request is
    being answered its own handler has the clock.
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
    _running: RequestResponseCycle | None = None  # where `cycle` is the one that waits for it

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not (self.cycle.response_complete or self.cycle.disconnected)

    # ---------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it if need be, and wait for its first head."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self._start_clock(self.limits.head_timeout_s, self._too_slow)
        most = self.limits.max_connections
        if len(self.connections) > most and not make_room(self.connections, self):
            self._refuse(503, Overloaded(f"all of {most} connections are in use"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handlers, and stop the clocks."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_clock()
        self._stop_write_clock()
        if self._running is not None:  # uvicorn tells only the last one
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse no more at a time than may still come without being part of a body."""
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
        """The client takes less than we send: not for ever."""
        super().pause_writing()
        self._write_clock = self.loop.call_later(self.limits.stall_timeout_s, self._takes_nothing)

    def resume_writing(self) -> None:
        """It took some."""
        super().resume_writing()
        self._stop_write_clock()

    # -------------------------------------------------------------------- what the parser has found

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        if len(self.pipeline) >= PIPELINED:
            raise self._because(ProtocolError("wait for an answer before you send the next request"))
        self._phase = "head"
        super().on_message_begin()
        self.scope["state"][PEER_CERTIFICATE] = self.transport.get_extra_info("peercert")
        self.scope["state"][ABORT] = self.transport.abort
        self.scope["state"][KNOWN] = self._become_known
        self.scope["state"][CORK] = self._cork

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if len(self.headers) >= HEAD_FIELDS:
            raise self._because(TooLarge(f"a request has at most {HEAD_FIELDS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of a head; its request is answered from here on, or waits for its turn."""
        before = self.cycle if self.busy else None
        self._phase, self._progress = "body", True
        super().on_headers_complete()
        self._running = before

    def on_body(self, body: bytes) -> None:
        """Some of a body."""
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._phase, self._progress = "before", True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The end of an answer; the rest of its request may not be here yet."""
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
        """As uvicorn does, but for its lines in the log, which any stranger could have it write without end.

        A request for another protocol is answered as if it had not asked for one.
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
        """Nothing was asked for long; what the client has not taken by now it never will."""
        self.transport.abort()

    def _watch(self) -> None:
        """Have the right clock running."""
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
            left_s = self.since + self.timeout_keep_alive - self.loop.time()  # empty lines win no more
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
        """Keep a reason: of an error in a callback the parser tells only that there was one."""
        self._reason = error
        return error

    def _refuse(self, status: int, error: UpriverError) -> None:
        """Listen no more, and answer with an error: after the answers to what came whole before."""
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
        """The request whose body came to no good end is not answered by its handler, if it has one yet."""
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()
        if self._running is not None:
            self.pipeline.popleft()
            self.cycle, self._running = self._running, None

    def _say(self, status: int, error: UpriverError) -> None:
        """Answer with an error, as the last thing on this connection."""
        body = msgspec.json.encode(error_body(error))
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self._linger()

    def _linger(self) -> None:
        """Close when the client has read what it was told."""
        if self.transport.can_write_eof():  # TLS has no end of one direction; the answer says its length
            self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self._start_clock(LINGER_S, self.transport.abort)
