"""Trace the server's side of a request: each read of a store and each phase of work.

A worker reports its phases when they are done. They follow one another, so their spans are laid end to end,
up to the moment when the worker's answer arrived.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from upriver import tracing
from upriver.engine.clock import Clock
from upriver.server.observability.logging import request_context
from upriver.server.observability.metrics import ANYONE, ServerMetrics
from upriver.store import Store
from upriver.types import Timings

SPANS = {
    ("POST", "/v1/run"): "POST /v1/run",
    ("POST", "/v1/profile"): "POST /v1/profile",
    ("HEAD", "/v1/programs"): "HEAD /v1/programs",
    ("PUT", "/v1/programs"): "PUT /v1/programs",
}
"""Requests that are traced, with their span's name: those that work for a job, not those that only read."""

WORKER_PHASES = ("input", "weights", "forward", "encode")
"""Phases of a micro-batch in a worker, in order; stages wait for weights between input and forward."""


class TracingMiddleware:
    """Give each request an id for the log and the response, and each request that works a span.

    Place it behind `upriver.server.http.auth.Authenticator`, which determines the tenant and refuses unknown
    clients.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on within its log context and span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        tenant = getattr(state.get("tenant"), "name", ANYONE)
        secrets = _secrets(headers.get("authorization", ""))
        with request_context(tenant=tenant, hidden=secrets) as request_id:
            state["request_id"] = request_id

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                await send(message)

            with _span(scope, headers, tenant=tenant, request_id=request_id):
                await self._app(scope, receive, send_with_id)


def _secrets(authorization: str) -> list[str]:
    """Return a request's secrets, as sent and as decoded."""
    kind, _, value = authorization.partition(" ")
    found = [value.strip()]
    if kind.lower() == "basic":
        with contextlib.suppress(ValueError):
            found.append(base64.b64decode(value, validate=True).decode().partition(":")[2])
    return found


def _span(
    scope: Scope, headers: Headers, *, tenant: str, request_id: str
) -> contextlib.AbstractContextManager[None]:
    path = "/v1/programs" if scope["path"].startswith("/v1/programs/") else scope["path"]
    name = SPANS.get((scope["method"], path))
    if name is None or not tracing.configured():
        return contextlib.nullcontext()
    return tracing.span(name, parent=tracing.extract(headers), tenant=tenant, request_id=request_id)


# ------------------------------------------------------------------------------------- micro-batches


def clock(group: int) -> Clock:
    """Return the clock of one forward pass. Its phases are spans if tracing is configured.

    Args:
        group: Index of its micro-batches in the request.
    """
    return _TracedClock(group) if tracing.configured() else Clock()


class _TracedClock(Clock):
    def __init__(self, group: int) -> None:
        super().__init__()
        self._group = group

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with tracing.span(name, group=self._group), super().phase(name):
            yield


def admitted(seconds: float) -> None:
    """Record that a request was just admitted after waiting for ``seconds``."""
    _just_over("admit", seconds)


def over(phase: str, seconds: float, group: int) -> None:
    """Record a phase that has just ended and around which no block could be put."""
    _just_over(phase, seconds, group=group)


def _just_over(name: str, seconds: float, **attributes: int) -> None:
    if tracing.configured():
        now = time.time_ns()
        tracing.record(name, now - round(1e9 * seconds), now, **attributes)


def computed(timings: Timings, group: int) -> None:
    """Record the phases of a worker's answer that has just arrived."""
    if not tracing.configured():
        return
    took = {name: round(1e9 * timings.phases[name]) for name in WORKER_PHASES if name in timings.phases}
    at = time.time_ns() - sum(took.values())
    for name, nanoseconds in took.items():
        tracing.record(name, at, at + nanoseconds, group=group)
        at += nanoseconds


@contextlib.contextmanager
def sending(metrics: ServerMetrics, group: int) -> Iterator[None]:
    """Record the time in which a micro-batch is sent; the block may contain a ``yield``."""
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        metrics.sent(seconds)
        over("send", seconds, group)


# -------------------------------------------------------------------------------------------- stores


def traced(stores: Mapping[str, Store]) -> dict[str, Store]:
    """Return the stores with a span for each read if tracing is configured, else unchanged."""
    if not tracing.configured():
        return dict(stores)
    return {name: store.observed_by(ReadSpans()) for name, store in stores.items()}


class ReadSpans:
    """Record a span for each read of a store."""

    piece_bytes = sys.maxsize

    def reading(
        self, store: Store, path: str, start: int | None, stop: int | None
    ) -> contextlib.AbstractContextManager[None]:
        """Surround one read with a span."""
        part = {} if start is None or stop is None else {"start": start, "stop": stop}
        return tracing.span("GET", store=store.name, object=path, **part)
