"""Running the application: uvicorn, a socket of our own, and a clean way out."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping

import uvicorn

from upriver.errors import ConfigError
from upriver.server.app import create_app
from upriver.server.config import ServerConfig
from upriver.server.http import HttpLimits, bounded_http

OnListening = Callable[[Mapping[str, object]], None]


def serve(config: ServerConfig, *, on_listening: OnListening | None = None) -> None:
    """Serve until SIGTERM or SIGINT; what is running then may finish within ``config.grace_s``.

    Returns after SIGTERM and raises KeyboardInterrupt after SIGINT, unless the caller has its own handlers.

    Args:
        config: The operator's decisions.
        on_listening: Told once the first worker is ready: ``{"listening": URL, "pid": N}``. Connections are
            accepted before that, and told to wait.

    Raises:
        ConfigError: If the address cannot be bound, a store's URI is not understood, or no worker can start.
        StoreError: If a store is not there.
    """
    server = Server(config, on_listening=on_listening)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises what it caught once more
    try:
        asyncio.run(server.serve(sockets=[server.socket]))
    finally:
        server.socket.close()
    if server.failure is not None:
        raise server.failure


class Server(uvicorn.Server):
    """Uvicorn with our settings, on a socket that is bound already.

    Args:
        config: The operator's decisions.
        on_listening: See `serve`.

    Attributes:
        failure: Why it stopped by itself, if it did.
    """

    failure: Exception | None = None

    def __init__(self, config: ServerConfig, *, on_listening: OnListening | None = None) -> None:
        app = create_app(config)
        self.socket = bind(config.host, config.port)
        self._on_listening = on_listening
        self._first_worker = app.state.front.pool.first
        self._announcing: asyncio.Task[None] | None = None
        settings = uvicorn.Config(
            app,
            # Both are what was measured: with uvloop a buffer is still being sent when `send` returns.
            loop="asyncio",
            http=bounded_http(
                HttpLimits(
                    head_timeout_s=config.head_timeout_s,
                    stall_timeout_s=config.stall_timeout_s,
                    max_connections=config.max_connections,
                    on_refused=lambda code: app.state.front.metrics.errors.labels(code).inc(),
                )
            ),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(config.idle_timeout_s),
            timeout_graceful_shutdown=max(1, round(config.grace_s)),
        )
        super().__init__(settings)

    @property
    def url(self) -> str:
        """Where clients reach it."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so when there is someone to work."""
        await super().startup(sockets=sockets)
        if self.started:
            self._announcing = asyncio.create_task(self._announce())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop."""
        if self._announcing is not None:
            self._announcing.cancel()
        await super().shutdown(sockets=sockets)

    async def _announce(self) -> None:
        try:
            await self._first_worker()
            if self._on_listening is not None:
                self._on_listening({"listening": self.url, "pid": os.getpid()})
        except Exception as error:
            self.failure = error
            self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: If the address is not this machine's, or taken.
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
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror}") from None
    return listener
