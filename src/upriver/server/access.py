"""Who may come in: checked before a route is even looked for."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from upriver.errors import NotAuthorized
from upriver.protocol import error_body
from upriver.server.config import ServerConfig, is_loopback, same_token

OPEN_PATHS = frozenset({"/livez", "/readyz"})
"""Health says nothing about anyone's data, and whoever asks (a load balancer) has no token."""


class Access:
    """Lets requests through that carry the token; without a token, those that are addressed to this machine.

    A server without a token trusts everyone on its machine, which includes a browser there: a page from
    elsewhere can have its own name resolve to 127.0.0.1, but cannot choose what the browser then writes into
    ``Host``.

    Args:
        app: What is protected.
        config: Says how.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = JSONResponse(
            error_body(NotAuthorized(refusal)), status_code=401, headers={"WWW-Authenticate": "Bearer"}
        )
        await response(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        if self._config.token is None:
            host = _host_of(headers.get("host", ""))
            return (
                None if is_loopback(host) else f"without a token only loopback names are served, not {host!r}"
            )
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return "send a bearer token: Authorization: Bearer TOKEN"
        return None if same_token(token.strip(), self._config.token) else "the token is not valid here"


def _host_of(header: str) -> str:
    """The name in a ``Host`` header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
