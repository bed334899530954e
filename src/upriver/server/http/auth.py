"""Authenticate requests before they are routed."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from upriver.control.concurrency_limit import ConcurrencyLimit
from upriver.errors import NotAuthorized, Overloaded
from upriver.protocol import error_body
from upriver.server.config import ServerConfig, is_loopback
from upriver.server.http.errors import error_response
from upriver.server.http.light_requests import (
    HEALTH,
    MAX_STRANGERS,
    STRANGERS,
    LightRequests,
    SpentSeconds,
    metered,
)
from upriver.server.http.limits import ABORT, KNOWN, PEER_CERTIFICATE
from upriver.server.http.tls import names_in
from upriver.server.observability.audit_log import AuditLog
from upriver.server.tenants import ANYONE, Tenant
from upriver.text import said

OPEN_PATHS = frozenset({"/livez", "/readyz"})
"""Paths that need no token. Health reveals nobody's data, and a load balancer has no token."""

READING = frozenset({"GET", "HEAD"})
"""Methods that may carry the token as a password. A browser adds a password by itself, even if a page from
elsewhere makes it send the request. Such a request must change nothing."""

MAX_LOGGED = 1000
"""Most addresses whose refusals are logged in one minute, each once: strangers must not fill the log."""

SEND_TOKEN = "send a bearer token: Authorization: Bearer TOKEN"

TENANT = "tenant"
"""Key in a request's state: its `Tenant`."""

log = logging.getLogger(__name__)

_BASIC = 'Basic realm="upriver", charset="UTF-8"'


class Authenticator:
    """Find the tenant of each request and pass the request on, or answer 401.

    A request that is passed on occupies its connection until its client is done. Some connections are
    reserved for tenants that have none: further requests of other tenants get 503.

    A client certificate identifies the tenant, or else a token does. A server with neither trusts everyone on
    its machine, which includes a browser there. A page from elsewhere can make its own name resolve to
    127.0.0.1, but the browser then writes that name into ``Host``. What such a page posts names its origin in
    ``Origin``.

    Light requests and responses with errors share the front's time in turns.

    Args:
        config: Tenants, certificates and the number of connections.
        on_refused: Called with the code of each error that is sent here.
        now: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        audit: AuditLog | None = None,
        on_refused: Callable[[str], None] = lambda code: None,
        looks: LightRequests | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._on_refused = app, on_refused
        self._looks = looks or LightRequests()
        self._tenants = config.everyone()
        self._places = ConcurrencyLimit(config.max_connections, (tenant.name for tenant in self._tenants))
        self._wants_certificates = config.tls_client_ca is not None
        self._audit = audit or AuditLog(None)
        self._now, self._minute, self._logged = now, -1, set[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401 or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS:
            await self._looks.turn(HEALTH)
            await self._looks.look(HEALTH, self._app(scope, receive, send))
            return
        headers = Headers(scope=scope)
        try:
            tenant = self._tenant(scope, headers)
        except NotAuthorized as error:
            await self._refuse(error, scope, receive, send)
            return
        scope.setdefault("state", {}).get(KNOWN, _nothing)()
        if not self._places.take(tenant.name):
            await self._turn_away(tenant, scope, receive, send)
            return
        scope["state"][TENANT] = tenant
        try:
            if _works(scope):
                await self._work(tenant, scope, receive, send)
            else:
                await self._looks.turn(tenant.name, tenant.weight)
                await self._looks.look(tenant.name, self._app(scope, receive, send))
        finally:
            self._places.give_back(tenant.name)

    async def _refuse(self, error: NotAuthorized, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 in a turn of unknown clients, or disconnect if too many of them wait."""
        self._on_refused(error.code)
        self._log_refusal(error, scope)
        self._audit.refused(None, path=scope["path"], status=401, code=error.code, client=_address_of(scope))
        if self._looks.strangers_waiting >= MAX_STRANGERS:
            await _cut_off(scope)
            return
        await self._looks.turn(STRANGERS)
        response = _refusal(error, scope["method"], Headers(scope=scope))
        await self._looks.look(STRANGERS, response(scope, receive, send))

    def _log_refusal(self, error: NotAuthorized, scope: Scope) -> None:
        """Log a refusal with the client's address, and never with its token."""
        address, minute = _address_of(scope) or "an unknown address", int(self._now() // 60)
        if minute != self._minute:
            self._minute, self._logged = minute, set()
        if address in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(address)
        # The log's redaction takes the words behind "bearer" for a token.
        reason = "it sent no token" if str(error) == SEND_TOKEN else said(str(error))
        log.warning("refused a request from %s: %s", address, reason)

    async def _work(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that works. If it fails, charge its time as a light request."""
        spent = SpentSeconds()
        with ExitStack() as working:

            async def send_in_turn(message: Message) -> None:
                if message["type"] == "http.response.start":
                    if message["status"] < 400:
                        working.enter_context(self._looks.works())
                    else:
                        self._looks.charge(tenant.name, spent.seconds)
                        await self._looks.turn(tenant.name, tenant.weight)
                await send(message)

            await metered(self._app(scope, receive, send_in_turn), spent.add)

    async def _turn_away(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 at once, or disconnect: other tenants need the connection, so it must not wait."""
        response = self._too_many(tenant)
        if self._looks.behind:
            await _cut_off(scope)
        else:
            await self._looks.look(tenant.name, response(scope, receive, send))

    def _too_many(self, tenant: Tenant) -> Response:
        count = self._places.taken_by(tenant.name)
        error = Overloaded(
            f"{count} requests of {tenant.name} are here, and the other connections are for others"
        )
        self._on_refused(error.code)
        return error_response(error)

    def _tenant(self, scope: Scope, headers: Headers) -> Tenant:
        """Return the tenant of a request; raise `NotAuthorized` if no certificate or token identifies one."""
        if self._wants_certificates:
            tenant = self._by_certificate(scope)
            if tenant is not None:
                return tenant
        if len(self._tenants):
            return self._by_token(scope["method"], headers)
        if not self._wants_certificates:
            _check_host(headers)
            _check_origin(scope["method"], headers)
        return ANYONE

    def _by_certificate(self, scope: Scope) -> Tenant | None:
        certificate: Any = scope.get("state", {}).get(PEER_CERTIFICATE)
        found = [self._tenants.by_certificate(name) for name in names_in(certificate)]
        tenants = {tenant.name: tenant for tenant in found if tenant is not None}
        if len(tenants) > 1:
            raise NotAuthorized(f"the certificate stands for more than one tenant: {', '.join(tenants)}")
        return next(iter(tenants.values()), None)

    def _by_token(self, method: str, headers: Headers) -> Tenant:
        tenant = self._tenants.by_token(given_token(method, headers.get("authorization", "")))
        if tenant is None:
            raise NotAuthorized("the token is not valid here")
        return tenant


def _works(scope: Scope) -> bool:
    """Return whether a request stores, runs or measures something."""
    return scope["method"] not in READING and scope["path"] != "/v1/probe"


async def _cut_off(scope: Scope) -> None:
    """End a connection without a response."""
    scope.get("state", {}).get(ABORT, _nothing)()
    await asyncio.sleep(0)  # the connection is lost by then, and no response is expected


def _nothing() -> None:
    """Do nothing, for a request whose connection offers no such function."""


def tenant_of(request: HTTPConnection) -> Tenant:
    """Return the tenant of a request.

    Raises:
        LookupError: On a route that is open to everyone, where no tenant is determined.
    """
    tenant = request.scope.get("state", {}).get(TENANT)
    if not isinstance(tenant, Tenant):
        raise LookupError(f"{request.scope['path']} is open to everyone: there is no tenant")
    return tenant


def given_token(method: str, authorization: str) -> str:
    """Return the token from an ``Authorization`` header. Reading methods may send it as a password.

    Raises:
        NotAuthorized: If the header has none.
    """
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic" and method in READING:
        return _password(value.strip())
    raise NotAuthorized(SEND_TOKEN)


def _password(credentials: str) -> str:
    """Return the password of ``user:password`` in base64. The token alone identifies the tenant."""
    try:
        _, separator, password = base64.b64decode(credentials, validate=True).decode().partition(":")
    except ValueError:
        separator, password = "", ""
    if not separator:
        raise NotAuthorized("send the token as the password, with any user name")
    return password


def _refusal(error: NotAuthorized, method: str, headers: Headers) -> JSONResponse:
    """Return a 401 response. For a page in a browser it makes the browser ask for a password."""
    response = JSONResponse(error_body(error), status_code=401)
    if method in READING and "text/html" in headers.get("accept", ""):
        response.headers.append("WWW-Authenticate", _BASIC)
    response.headers.append("WWW-Authenticate", "Bearer")
    return response


def _check_host(headers: Headers) -> None:
    host = _host_of(headers.get("host", ""))
    if not is_loopback(host):
        raise NotAuthorized(f"without a token only loopback names are served, not {host!r}")


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse a page's request to change something.

    The page could not read the response, but the request would run.
    """
    if method not in READING and "origin" in headers:
        raise NotAuthorized("without a token nothing is done for a page in a browser")


def _host_of(header: str) -> str:
    """Return the name in a ``Host`` header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _address_of(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None
