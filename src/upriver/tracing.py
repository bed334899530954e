"""Traces for those who want them: OpenTelemetry where it is installed and set up, nothing at all elsewhere.

Until `configure` or `use` is called, nothing of OpenTelemetry is imported and a span costs one comparison.
Spans go to a provider of our own, never to the process's global one, which belongs to the user.

What is asked of servers is asked in threads, some steps ahead of the training that waits for it. So `each`
says for the whole process which step is under way, and what a thread begins outside of any span of its own
belongs to that step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from upriver.errors import ConfigError

EXPORT_S = 2.0
"""Longest attempt to reach the collector with one batch of spans: whoever ends waits for the last of them."""

DELAY_MS = 1000.0
"""Between two transmissions of finished spans: five times as often as the SDK does by itself, so that a trace
can be looked at right after what it shows."""

TRACES_PATH = "/v1/traces"
"""Where a collector takes traces over HTTP, says the OTLP specification."""

Attribute = str | bool | int | float

_T = TypeVar("_T")

_END = object()
_EMPTY: Mapping[str, str] = MappingProxyType({})
_NOTHING: AbstractContextManager[None] = nullcontext()
_NO_HEADERS: AbstractContextManager[Mapping[str, str]] = nullcontext(_EMPTY)

_tracer: Any = None  # where spans are made; None: nowhere
_own_provider: Any = None  # made by `configure`, and ended by it
_step: Any = None  # the context of the training step that is under way


# ------------------------------------------------------------------------------------------ set-up


def configured() -> bool:
    """Whether spans go anywhere."""
    return _tracer is not None


def configure(service: str, endpoint: str | None) -> None:
    """Send spans to a collector from here on.

    Which of them are kept is decided by ``OTEL_TRACES_SAMPLER``, as for any program with OpenTelemetry.

    Args:
        service: What this process is called in traces.
        endpoint: Of a collector that speaks OTLP over HTTP, as a rule ``http://HOST:4318``; None sends what
            is still here, and then nothing more.

    Raises:
        ConfigError: If it is no such address, or OpenTelemetry is not installed.
    """
    global _own_provider
    provider = None if endpoint is None else _provider(service, traces_url(endpoint))
    before, _own_provider = _own_provider, provider
    use(provider)
    if before is not None:
        before.shutdown()


def use(provider: Any | None) -> None:
    """Make spans with an OpenTelemetry ``TracerProvider`` that this process has already; None: make none."""
    global _tracer, _step
    _tracer = None if provider is None else provider.get_tracer("upriver")
    _step = None


def traces_url(endpoint: str) -> str:
    """The address that spans are sent to.

    Raises:
        ConfigError: If it is none.
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
        raise ConfigError(
            f"traces need OpenTelemetry, which is not installed ({error}): pip install 'upriver[trace]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=DELAY_MS))
    return provider


# ------------------------------------------------------------------------------------------- spans


def span(name: str, *, parent: Any = None, **attributes: Attribute) -> AbstractContextManager[None]:
    """A span around a block; spans begun inside, in its thread or its tasks, are its children.

    Not for a block with a ``yield`` in it, which may be left in another thread or task: see `apart`.

    Args:
        parent: What `extract` gave, where the span goes on from another process's.
    """
    return _NOTHING if _tracer is None else _current(_tracer, name, parent, attributes)


def apart(name: str, **attributes: Attribute) -> AbstractContextManager[Mapping[str, str]]:
    """A span around a block that may be left anywhere; gives the headers that let a server go on from it."""
    return _NO_HEADERS if _tracer is None else _apart(_tracer, name, attributes)


def each(name: str, items: Iterable[_T], *, first: int = 0, **attributes: Attribute) -> Iterator[_T]:
    """Hand ``items`` on, each within a span: from waiting for it until the next one is asked for.

    Args:
        name: Of the spans.
        first: Number of the first one; they are numbered in order.
    """
    return iter(items) if _tracer is None else _each(_tracer, name, items, first, attributes)


def record(name: str, began_ns: int, ended_ns: int, **attributes: Attribute) -> None:
    """A span that is over already, by the clock of `time.time_ns`."""
    if _tracer is not None:
        over = _tracer.start_span(name, context=_around(), start_time=began_ns, attributes=attributes)
        over.end(end_time=max(began_ns, ended_ns))


def inject(headers: MutableMapping[str, str], context: Any = None) -> None:
    """Put the current span (or that of ``context``) into headers, as the W3C's ``traceparent``."""
    if _tracer is not None:
        _propagator().inject(headers, context)


def extract(headers: Mapping[str, str]) -> Any:
    """The caller's span, as a parent for one of ours; None where there is none.

    Args:
        headers: By lower-case name. Nothing but ``traceparent`` is read.
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
            if item is not _END:  # there was no such step: a span that is not ended is never sent
                begun.end()


def _fail(begun: Any, error: Exception) -> None:
    from opentelemetry.trace import Status, StatusCode

    begun.record_exception(error)
    begun.set_status(Status(StatusCode.ERROR, type(error).__name__))


def _around() -> Any:
    """The parent of a span that nobody names one for: None is OpenTelemetry's word for the current one."""
    if _step is None:
        return None
    from opentelemetry.trace import get_current_span

    return None if get_current_span().get_span_context().is_valid else _step


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
