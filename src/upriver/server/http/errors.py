"""Translate errors into HTTP responses."""

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
"""HTTP status of each error class. The first match counts; other errors are 500."""

PATH_CHARS = 256
"""Most characters of an unknown path that a 404 message repeats. upriver's own paths have at most 80."""


def error_response(error: UpriverError) -> Response:
    """Return the HTTP response for an error."""
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def code_of(error: BaseException) -> str:
    """Return the audit log's code for the error that ended a request."""
    return error.code if isinstance(error, UpriverError) else "disconnect" if gone(error) else "error"


def gone(error: BaseException) -> bool:
    """Return whether the error means that the client has disconnected, so that nobody reads a response."""
    return isinstance(error, ClientDisconnect)


class ErrorWording:
    """Word errors for clients: stores appear by name, never by location.

    Args:
        stores: Stores by the names that clients use.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        places = [(store.uri, name) for name, store in stores.items()]
        paths = [(uri.removeprefix("file://"), name) for uri, name in places if uri.startswith("file://")]
        places += [*paths, *((unquote(path), name) for path, name in paths)]
        self._places = sorted(places, key=lambda place: -len(place[0]))

    def of(self, error: UpriverError) -> UpriverError:
        """Return the same error in words for a client."""
        before = error_body(error)["error"]
        said = {key: before[key] for key in ("message", "traceback") if key in before}
        for place, name in self._places:
            if place.strip("/"):
                said = {key: text.replace(place, f"store {name}") for key, text in said.items()}
        after = before | said
        return error if after == before else error_from({"error": after})


def counted(route: Route, metrics: ServerMetrics, wording: ErrorWording) -> Route:
    """Wrap a route so that errors have upriver's form and every response is counted."""
    endpoint: Callable[[Request], Awaitable[Response]] = route.endpoint

    async def call(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except UpriverError as error:
            metrics.errors.labels(error.code).inc()
            response = error_response(wording.of(bare(error)))
        except ClientDisconnect:
            response = Response(status_code=499)  # nobody reads it; the metrics count it apart
        except Exception:
            log.exception("%s %s failed", request.method, request.scope["path"])
            metrics.errors.labels(UpriverError.code).inc()
            response = error_response(UpriverError("internal error; the server's log says more"))
        metrics.requests.labels(route.path, response.status_code).inc()
        return response

    return Route(route.path, call, methods=sorted(route.methods or ()))


def http_errors(metrics: ServerMetrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler for errors that Starlette raises by itself: in upriver's form, and counted."""

    async def answer(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "internal error"
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "error")
        metrics.errors.labels(code).inc()
        # Not `request.url`: Host and query are part of it, and may not be valid text.
        message = f"{detail}: {printable(request.scope['path'], PATH_CHARS)}"
        body = {"error": {"code": code, "message": message}}
        headers = error.headers if isinstance(error, HTTPException) else None  # for 405, the methods allowed
        return JSONResponse(body, status_code=status, headers=headers)

    return answer
