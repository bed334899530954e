"""Trace with OpenTelemetry if it is installed and configured; do nothing otherwise.

Until `configure` or `use` is called, OpenTelemetry is not imported and a span costs one comparison. Spans go
to a provider of our own, never to the process's global one, which belongs to the user.

Threads send requests some steps ahead of the training that waits for them. So `each` sets the current step
for the whole process. A span that a thread begins outside any span of its own belongs to that step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from upriver.errors import ConfigError
from upriver.extras import install

EXPORT_S = 2.0
"""Timeout of one export to the collector. The end of the process waits for the last one."""

DELAY_MS = 1000.0
"""Time between two exports: five times as often as the SDK's default, so that traces appear promptly."""

TRACES_PATH = "/v1/traces"
"""Path for traces over HTTP, by the OTLP specification."""

Attribute = str | bool | int | float

_T = TypeVar("_T")

_END = object()
_EMPTY: Mapping[str, str] = MappingProxyType({})
_NOTHING: AbstractContextManager[None] = nullcontext()
_NO_HEADERS: AbstractContextManager[Mapping[str, str]] = nullcontext(_EMPTY)

_tracer: Any = None  # makes the spans; None if there is no tracing
_own_provider: Any = None  # made and ended by `configure`
_step: Any = None  # context of the current training step


# ------------------------------------------------------------------------------------------ set-up


def configured() -> bool:
    """Return True if spans are recorded."""
    return _tracer is not None


def configure(service: str, endpoint: str | None) -> None:
    """Send spans to a collector from now on.

    ``OTEL_TRACES_SAMPLER`` decides which of them are kept, as for any program with OpenTelemetry.

    Args:
        service: Name of this process in traces.
        endpoint: Collector that speaks OTLP over HTTP, usually ``http://HOST:4318``. None sends the remaining
            spans and then stops.

    Raises:
        ConfigError: If the address is invalid, or OpenTelemetry is not installed.
    """
    global _own_provider
    provider = None if endpoint is None else _provider(service, traces_url(endpoint))
    before, _own_provider = _own_provider, provider
    use(provider)
    if before is not None:
        before.shutdown()


def use(provider: Any | None) -> None:
    """Make spans with an existing OpenTelemetry ``TracerProvider``; None stops tracing."""
    global _tracer, _step
    _tracer = None if provider is None else provider.get_tracer("upriver")
    _step = None


def traces_url(endpoint: str) -> str:
    """Return the address to which spans are sent.

    Raises:
        ConfigError: If the endpoint is invalid.
    """
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(
            f"traces are sent to http://HOST:PORT or https://HOST:PORT, a collector's, got {endpoint!r}"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def _provider(service: str, url: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(install("a trace endpoint", f"OpenTelemetry ({error})", "trace")) from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_MS))
    return provider


# ------------------------------------------------------------------------------------------- spans


def span(name: str, *, parent: Any = None, **attributes: Attribute) -> AbstractContextManager[None]:
    """Record a span around a block. Spans begun inside, in its thread or its tasks, are its children.

    Do not use it around a ``yield``, because the block may be left in another thread or task: see `apart`.

    Args:
        parent: Result of `extract`, to continue another process's span.
    """
    return _NOTHING if _tracer is None else _current(_tracer, name, parent, attributes)


def apart(name: str, **attributes: Attribute) -> AbstractContextManager[Mapping[str, str]]:
    """Record a span around a block that may be left anywhere.

    Yields:
        Headers with which a server continues the span.
    """
    return _NO_HEADERS if _tracer is None else _apart(_tracer, name, attributes)


def each(name: str, items: Iterable[_T], *, first: int = 0, **attributes: Attribute) -> Iterator[_T]:
    """Yield ``items``, each within a span: from the wait for it until the next one is requested.

    Args:
        first: Number of the first span; they are numbered in order.
    """
    return iter(items) if _tracer is None else _each(_tracer, name, items, first, attributes)


def record(name: str, began_ns: int, ended_ns: int, **attributes: Attribute) -> None:
    """Record a span that has ended, by the clock of `time.time_ns`."""
    if _tracer is not None:
        over = _tracer.start_span(name, context=_around(), start_time=began_ns, attributes=attributes)
        over.end(end_time=max(began_ns, ended_ns))


def inject(headers: MutableMapping[str, str], context: Any = None) -> None:
    """Add the current span (or that of ``context``) to headers, as the W3C's ``traceparent``."""
    if _tracer is not None:
        _propagator().inject(headers, context)


def extract(headers: Mapping[str, str]) -> Any:
    """Return the caller's span as a parent for ours; None if there is none.

    Args:
        headers: Headers by lower-case name. Only ``traceparent`` is read.
    """
    sent = headers.get("traceparent")
    if _tracer is None or not sent:
        return None
    return _propagator().extract({"traceparent": sent})


@contextmanager
def _current(tracer: Any, name: str, parent: Any, attributes: Mapping[str, Attribute]) -> Iterator[None]:
    context = _around() if parent is None else parent
    with tracer.start_as_current_span(name, context=context, attributes=attributes):
        yield


@contextmanager
def _apart(tracer: Any, name: str, attributes: Mapping[str, Attribute]) -> Iterator[Mapping[str, str]]:
    from opentelemetry.trace import set_span_in_context

    begun = tracer.start_span(name, context=_around(), attributes=attributes)
    headers: dict[str, str] = {}
    inject(headers, set_span_in_context(begun))
    try:
        yield headers
    except Exception as error:
        _fail(begun, error)
        raise
    finally:
        begun.end()


def _each(
    tracer: Any, name: str, items: Iterable[_T], first: int, attributes: Mapping[str, Attribute]
) -> Iterator[_T]:
    global _step
    from opentelemetry.trace import set_span_in_context

    iterator = iter(items)
    for number in itertools.count(first):
        begun = tracer.start_span(name, attributes={**attributes, "number": number})
        mine = _step = set_span_in_context(begun)
        item: Any = None
        try:
            item = next(iterator, _END)
            if item is _END:
                return
            yield item
        except Exception as error:
            _fail(begun, error)
            raise
        finally:
            _step = None if _step is mine else _step
            if item is not _END:  # there was no such step, and a span that is not ended is never sent
                begun.end()


def _fail(begun: Any, error: Exception) -> None:
    from opentelemetry.trace import Status, StatusCode

    begun.record_exception(error)
    begun.set_status(Status(StatusCode.ERROR, type(error).__name__))


def _around() -> Any:
    """Return the default parent of a span. None is OpenTelemetry's value for the current span."""
    if _step is None:
        return None
    from opentelemetry.trace import get_current_span

    return None if get_current_span().get_span_context().is_valid else _step


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
