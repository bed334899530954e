"""Run the application: uvicorn, a bound socket, and an orderly shutdown.

A server that is told to stop accepts no new work. It says so in its answers, so load balancers and clients go
elsewhere. Running requests may finish within the operator's grace. Then the server exits, whatever still
runs, with every process that it started.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn

from upriver import tracing
from upriver._threads.background import BackgroundThread
from upriver.errors import ConfigError
from upriver.protocol import PROCESS_HEADER
from upriver.server.app import Front, create_app
from upriver.server.config import ServerConfig
from upriver.server.http.limits import HeldConnection, HttpLimits, bounded_http, make_room
from upriver.server.http.tls import bounded_https, server_context
from upriver.server.sandbox.rlimits import connections

log = logging.getLogger(__name__)

OnListening = Callable[[Mapping[str, object]], None]

LAST_S = 4.0
"""Seconds after the grace: to cancel requests and end workers takes one. Anything that delays this (a store
that does not answer, a disk that hangs) is then abandoned. With 25 s of grace the process exits within the 30
s after which Kubernetes, and others, would kill it."""

AT_ONCE_S = 1.0
"""Seconds to exit after a second signal."""

WATCH_S = 0.25
"""Seconds between a thread's checks of the time to exit."""

ACCEPTED = 8
"""Connections accepted between two checks of the number of connections. Each takes the front half a
millisecond, and a descriptor before a connection that is ended for it returns its own."""

NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors with which accepting a connection fails until other connections end."""

QUEUED = 1024
"""Connections that the kernel holds until they are accepted. The kernel drops further ones, and their clients
retry after a second. A longer queue would make each wait longer under a flood of connections."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that stop a server."""

EXIT_INTERRUPTED = 130
"""Exit code of shells for SIGINT."""

SERVICE = "upriver-server"
"""Name of a server in traces."""


def serve(config: ServerConfig, *, on_listening: OnListening | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Running requests may then finish within ``config.grace_s``.

    A second signal stops the server at once. If shutdown takes much longer than it may, the process exits
    from here.

    Returns after SIGTERM and raises KeyboardInterrupt after SIGINT, unless the caller has its own handlers.

    Args:
        on_listening: Called once the first worker is ready: ``{"listening": URL, "pid": N}``. Connections are
            accepted before that, and told to wait.

    Raises:
        ConfigError: If the address cannot be bound, a store's URI is invalid, a certificate cannot be used,
            traces cannot be made, or no worker can start.
        StoreError: If a store does not exist.
    """
    with ExitStack() as ending:
        ending.enter_context(_traces(config.trace_endpoint))  # first, as stores are traced when opened
        server = Server(config, on_listening=on_listening)
        ending.callback(server.socket.close)
        if threading.current_thread() is not threading.main_thread():
            _run(server, ending.pop_all())
            return
        with server.told_by_signals(), server.ending_in_time():
            _run(server, ending.pop_all())


def _run(server: Server, ending: ExitStack) -> None:
    with ending:  # within the exit's time limit: a collector may not answer
        asyncio.run(server.serve(sockets=[server.socket]))
    if server.failure is not None:
        raise server.failure


@contextmanager
def _traces(endpoint: str | None) -> Iterator[None]:
    """Send spans to the operator's collector, if one is configured, while the block runs."""
    if endpoint is None:
        yield
        return
    tracing.configure(SERVICE, endpoint)
    try:
        yield
    finally:
        tracing.configure(SERVICE, None)  # sends the remaining spans


class Server(uvicorn.Server):
    """Uvicorn with upriver's settings, on a bound socket.

    Attributes:
        failure: Error that made the server stop by itself, if any.
    """

    failure: Exception | None = None

    def __init__(self, config: ServerConfig, *, on_listening: OnListening | None = None) -> None:
        context = server_context(config)
        config = replace(config, max_connections=connections(config.max_connections))
        app = create_app(config)
        self.socket = bind(config.host, config.port)
        self._scheme = "http" if context is None else "https"
        self._grace_s = config.grace_s
        self._front: Front = app.state.front
        self._on_listening = on_listening
        self._stop_at: float | None = None  # end of the grace of running requests
        self._exit_at: float | None = None  # time at which the process exits in any case
        self._exit_code = 0
        self._announcing: asyncio.Task[None] | None = None
        limits = HttpLimits(
            head_timeout_s=config.head_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            max_connections=config.max_connections,
            on_refused=lambda code: self._front.metrics.errors.labels(code).inc(),
        )
        settings = uvicorn.Config(
            app,
            # Measurements used both: with uvloop a buffer is still being sent when `send` returns.
            loop="asyncio",
            http=bounded_http(limits) if context is None else bounded_https(limits, context),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=[(PROCESS_HEADER, secrets.token_hex(16))],
            backlog=ACCEPTED,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(config.idle_timeout_s),
            timeout_graceful_shutdown=max(1, math.ceil(config.grace_s)),
        )
        super().__init__(settings)

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        host, port = self.socket.getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and announce the server when a worker is ready."""
        await super().startup(sockets=sockets)
        self.socket.listen(QUEUED)  # asyncio has set it to the number accepted at once
        asyncio.get_running_loop().set_exception_handler(self._failed)
        audit = self._front.audit
        if audit.path is not None and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, audit.reopen)
        if self.started:
            self._announcing = asyncio.create_task(self._announce())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept no new work, and stop at once at a second signal. Runs between any two instructions."""
        again = self._exit_at is not None
        self._front.draining = True
        self._exit_at = time.monotonic() + (AT_ONCE_S if again else self._grace_s + LAST_S)
        if sig == signal.SIGINT:
            self._exit_code = EXIT_INTERRUPTED
        super().handle_exit(sig, frame)
        self.force_exit = self.force_exit or again

    @contextmanager
    def told_by_signals(self) -> Iterator[None]:
        """Stop the server on SIGTERM or SIGINT while the block runs, and then restore the earlier handlers.

        The caught signals are raised again when everything is closed. An earlier handler's exception or exit
        within the loop would interrupt the shutdown.
        """
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        ends_quietly = before[signal.SIGTERM] is signal.SIG_DFL
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for caught in reversed(self._captured_signals):
            if not (caught == signal.SIGTERM and ends_quietly):
                signal.raise_signal(caught)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's handlers, which work inside the loop: `told_by_signals` works outside."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop now.

        A draining server waits for running requests, and refuses new ones meanwhile.
        """
        if not await super().on_tick(counter):
            return False
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._grace_s
            self._front.draining = True
            self._front.metrics.draining.set(1)
            self._close_idle()
        return self.force_exit or not self._busy or time.monotonic() >= self._stop_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: running requests may use up the rest of their time, and then workers end."""
        if self._announcing is not None:
            self._announcing.cancel()
        if self._stop_at is not None:
            self.config.timeout_graceful_shutdown = max(1, math.ceil(self._stop_at - time.monotonic()))
            self._break_off()
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # then uvicorn does not
            await self.lifespan.shutdown()

    @contextmanager
    def ending_in_time(self) -> Iterator[None]:
        """Exit the process from a thread if the block still runs when its time is over.

        Workers notice, and end; nothing else that the server started outlives the process.
        """
        through = threading.Event()

        def watch() -> None:
            while not through.wait(WATCH_S):
                if self._exit_at is not None and time.monotonic() >= self._exit_at:
                    log.warning("something is in the way of ending in time; exiting all the same")
                    os._exit(self._exit_code)

        BackgroundThread(watch, name="ending").start()
        try:
            yield
        finally:
            through.set()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Free descriptors if a connection could not be accepted; asyncio accepts again after a second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_DESCRIPTOR):
            loop.default_exception_handler(context)
            return
        log.warning("no connection could be accepted: %s", error.strerror)
        make_room(self.server_state.connections, HeldConnection())

    @property
    def _busy(self) -> bool:
        """Return whether any request is being answered."""
        return any(isinstance(held, HeldConnection) and held.busy for held in self.server_state.connections)

    def _close_idle(self) -> None:
        """Close connections between two requests; the others close after their response.

        A new connection stays: its first request may have arrived, and would be lost without an answer.
        """
        for connection in list(self.server_state.connections):
            if not (isinstance(connection, HeldConnection) and connection.unused):
                connection.shutdown()

    def _break_off(self) -> None:
        """Abort connections whose requests have used up their time; without a client they end quietly."""
        for held in list(self.server_state.connections):
            if isinstance(held, HeldConnection) and held.busy:
                held.transport.abort()

    async def _announce(self) -> None:
        try:
            await self._front.units.first()
            if self._on_listening is not None:
                self._on_listening({"listening": self.url, "pid": os.getpid()})
        except Exception as error:
            self.failure = error
            self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: If the address is not this machine's, or in use.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(QUEUED)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}") from None
    return listener
