"""Serve HTTPS: the operator's certificates, and connections during their handshake.

asyncio's own TLS server keeps a connection with an unfinished handshake for a minute, and nothing can count
or end such connections. So each connection starts as a `TlsHandshake`, which `upriver.server.http.limits`
counts from its first moment. HTTP gets the connection after the handshake.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from upriver.errors import ConfigError
from upriver.secret_files import check_secret
from upriver.server.config import ServerConfig
from upriver.server.http.limits import HeldConnection, HttpLimits, bounded_http, make_room

log = logging.getLogger(__name__)

_NAME_KINDS = ("DNS", "email", "URI")
"""Kinds of alternative names that are text. An address identifies nobody."""


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context (1.2 or later), or None if the operator configured no certificate.

    Raises:
        ConfigError: If a file cannot be read or is invalid, or if others may read the key.
    """
    if config.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a handshake costs the server more than the client
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config.tls_certificate, config.tls_key)
    if config.tls_client_ca is not None:
        _load_authorities(context, config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def names_in(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the common name and the alternative names of a verified certificate.

    Args:
        certificate: In the form of `ssl.SSLSocket.getpeercert`.
    """
    if not certificate:
        return ()
    subject: Iterable[tuple[str, str]] = (pair for part in certificate.get("subject", ()) for pair in part)
    names = [value for kind, value in subject if kind == "commonName"]
    names += [value for kind, value in certificate.get("subjectAltName", ()) if kind in _NAME_KINDS]
    return tuple(dict.fromkeys(names))


def bounded_https(limits: HttpLimits, context: ssl.SSLContext) -> type[asyncio.Protocol]:
    """Return the protocol class that uvicorn instantiates for each connection."""
    return type(
        "LimitedHttps", (TlsHandshake,), {"limits": limits, "context": context, "http": bounded_http(limits)}
    )


class TlsHandshake(HeldConnection, asyncio.Protocol):
    """One connection until its TLS handshake has succeeded or failed.

    Bytes that the client sends right after its part of the handshake may arrive before HTTP is ready, and are
    kept.

    Args:
        config: Uvicorn's, as are the next two.
        server_state: Holds all connections.
        app_state: Copied into each request.
    """

    limits: ClassVar[HttpLimits]
    context: ClassVar[ssl.SSLContext]
    http: ClassVar[type[HttpToolsProtocol]]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = _loop or asyncio.get_running_loop()
        self._connections: set[Any] = server_state.connections
        self._make_http: Callable[[], HttpToolsProtocol] = partial(
            self.http, config=config, server_state=server_state, app_state=app_state, _loop=self._loop
        )
        self._early = bytearray()
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room for the connection if necessary, and begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # until TLS can read
        self.transport = transport
        self.since = self._loop.time()
        self._connections.add(self)
        if len(self._connections) > self.limits.max_connections:
            make_room(self._connections, self)  # if all are in use, HTTP sends the error
        self._opening = self._loop.create_task(self._open(transport))

    def data_received(self, data: bytes) -> None:
        """Keep the decrypted start of a request that arrived with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that ended before its handshake did."""
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Abort the connection; uvicorn calls this when the server stops."""
        self.transport.abort()

    async def _open(self, transport: asyncio.Transport) -> None:
        encrypted = await self._encrypted(transport)
        self._connections.discard(self)
        if encrypted is None or encrypted.is_closing():
            return
        http = self._make_http()
        encrypted.set_protocol(http)
        http.connection_made(encrypted)
        if self._early:
            http.data_received(bytes(self._early))

    async def _encrypted(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        if transport.is_closing():
            return None
        try:
            return await self._loop.start_tls(
                transport,
                self,
                self.context,
                server_side=True,
                ssl_handshake_timeout=self.limits.head_timeout_s,
                ssl_shutdown_timeout=self.limits.stall_timeout_s,
            )
        except OSError as error:  # TLS errors are `OSError`, too
            log.debug("no TLS with a client: %s", error)
            return None


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    try:
        # A key that is locked with a password is an error, and not a question on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        files = f"{certificate} is no" if key is None else f"{certificate} and {key} are no"
        raise ConfigError(
            f"{files} certificate with its private key, in PEM and without a password: {_why(error)}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the certificate {certificate} or its key {key or certificate}: {error.strerror}"
        ) from None
    check_secret(Path(key or certificate), "the private key")


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConfigError(f"{path} holds no certificates in PEM: {_why(error)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the clients' authorities {path}: {error.strerror}") from None


def _why(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
