"""Errors as HTTP."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from upriver import errors
from upriver.errors import (
    NotAuthorized,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    TooLarge,
    UpriverError,
    bare,
)
from upriver.protocol import error_body, error_from
from upriver.server.observability.metrics import ServerMetrics
from upriver.store import Store
from upriver.text import printable

log = logging.getLogger(__name__)

STATUS: tuple[tuple[type[UpriverError], int], ...] = (
    (NotAuthorized, 401),
    (errors.Forbidden, 403),
    (errors.ObjectNotFound, 404),
    (errors.ProgramNotFound, 404),
    (errors.ObjectChanged, 409),
    (TooLarge, 413),
    (errors.BadSample, 422),
    (errors.CodeFailed, 422),
    (errors.Busy, 429),
    (QuotaExceeded, 429),
    (Overloaded, 503),
    (errors.DoesNotFit, 413),
    (errors.DeadlineExceeded, 504),
    (errors.WorkerCrashed, 500),
    (errors.StorageFull, 507),
    (errors.StoreError, 502),
    (errors.ConfigError, 400),
    (errors.DatasetError, 400),
    (errors.ModelError, 400),
    (errors.ProgramError, 400),
    (ProtocolError, 400),
)
"""The first that fits; anything else is 500."""

PATH_CHARS = 256
"""Of an address that leads nowhere, as it is repeated: ours have at most 80."""


def error_response(error: UpriverError) -> Response:
    """An error as HTTP."""
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def code_of(error: BaseException) -> str:
    """What the audit log calls the way in which a request ended."""
    return error.code if isinstance(error, UpriverError) else "disconnect" if gone(error) else "error"


def gone(error: BaseException) -> bool:
    """Whether the client has gone, so that nobody reads an answer."""
    return isinstance(error, ClientDisconnect)


class Wording:
    """What clients are told: stores by name, never where they lie.

    Args:
        stores: By the names that clients use.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        places = [(store.uri, name) for name, store in stores.items()]
        paths = [(uri.removeprefix("file://"), name) for uri, name in places if uri.startswith("file://")]
        places += [*paths, *((unquote(path), name) for path, name in paths)]
        self._places = sorted(places, key=lambda place: -len(place[0]))

    def of(self, error: UpriverError) -> UpriverError:
        """The same error in words for a client."""
        before = error_body(error)["error"]
        said = {key: before[key] for key in ("message", "traceback") if key in before}
        for place, name in self._places:
            if place.strip("/"):
                said = {key: text.replace(place, f"store {name}") for key, text in said.items()}
        after = before | said
        return error if after == before else error_from({"error": after})


def counted(route: Route, metrics: ServerMetrics, wording: Wording) -> Route:
    """The route, answering errors in our form and counting every answer."""
    endpoint: Callable[[Request], Awaitable[Response]] = route.endpoint

    async def call(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except UpriverError as error:
            metrics.errors.labels(error.code).inc()
            response = error_response(wording.of(bare(error)))
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; in the metrics it is told from the rest
        except Exception:
            log.exception("%s %s failed", request.method, request.scope["path"])
            metrics.errors.labels(UpriverError.code).inc()
            response = error_response(UpriverError("internal error; the server's log says more"))
        metrics.requests.labels(route.path, response.status_code).inc()
        return response

    return Route(route.path, call, methods=sorted(route.methods or ()))


def http_errors(metrics: ServerMetrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    """What answers where Starlette refuses by itself: in our form, and counted."""

    async def answer(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "internal error"
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "error")
        metrics.errors.labels(code).inc()
        # Not `request.url`, which is made of the Host and the query, too: they may be no text at all.
        message = f"{detail}: {printable(request.scope['path'], PATH_CHARS)}"
        body = {"error": {"code": code, "message": message}}
        headers = error.headers if isinstance(error, HTTPException) else None  # where it says what is allowed
        return JSONResponse(body, status_code=status, headers=headers)

    return answer
