"""Test traces: none unless configured, else one from the trainer's step to the read of a store."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, train
from tests.program.nets import frozen_small
from tests.server.conftest import make_world
from tests.server.http.test_limits import same
from tests.server.running import ask, in_thread, run, running, wait_for
from tests.store.faulty_server import FaultyServer
from upriver import tracing
from upriver.errors import ConfigError
from upriver.rpc.client import ServerClient
from upriver.server import ServerConfig, serve
from upriver.server.observability.tracing import traced
from upriver.store import Store
from upriver.store.store import PATIENT_BYTES

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@pytest.fixture(autouse=True)
def off_again():
    yield
    tracing.configure("tests", None)


@pytest.fixture
def spans():
    """Return the finished spans of this process."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed here")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield Spans(exporter)
    tracing.use(None)
    provider.shutdown()


class Spans:
    """Finished spans by name, of one trace where one is given."""

    def __init__(self, exporter, trace=None):
        self._exporter, self._trace = exporter, trace

    def of(self, span):
        """Return the spans of the same trace."""
        return Spans(self._exporter, span.context.trace_id)

    def all(self, name=None):
        return [
            span
            for span in self._exporter.get_finished_spans()
            if name in (None, span.name) and self._trace in (None, span.context.trace_id)
        ]

    def one(self, name):
        [found] = self.all(name)
        return found

    def names(self):
        return sorted(span.name for span in self.all())


def parent(span):
    return None if span.parent is None else span.parent.span_id


def child_of(span, other):
    return (parent(span), span.context.trace_id) == (other.context.span_id, other.context.trace_id)


# ----------------------------------------------------------------------------------------------- off


def test_nothing_is_made_where_nobody_wants_it():
    assert not tracing.configured()
    assert tracing.span("a") is tracing.span("b", parent=None, number=1)
    assert tracing.apart("a") is tracing.apart("b", number=1)
    headers = {}
    with tracing.span("a"), tracing.apart("b") as sent:
        tracing.inject(headers)
        tracing.record("c", 1, 2)
    assert (headers, dict(sent)) == ({}, {})
    assert tracing.extract({"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}) is None
    assert list(tracing.each("step", iter("abc"), epoch=1)) == ["a", "b", "c"]


def test_a_block_that_fails_fails_as_ever():
    with pytest.raises(KeyError), tracing.span("a"), tracing.apart("b"):
        raise KeyError("x")


@pytest.mark.full
def test_nothing_of_opentelemetry_is_imported():
    """Importing it costs a second, and an absent import cannot interfere."""
    code = (
        "import sys, upriver.server, upriver.rpc.client; from upriver import tracing\n"
        "with tracing.span('a'), tracing.apart('b'): tracing.record('c', 1, 2)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_where_it_is_not_installed_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigError, match=r"pip install 'upriver\[trace\]'"):
        tracing.configure("tests", "http://127.0.0.1:4318")
    assert not tracing.configured()


@pytest.mark.parametrize(
    "endpoint",
    ["", "collector:4318", "ftp://collector", "http://", "http://host:port", "http://host:0", "http://a?b=c"],
)
def test_addresses_that_are_none(endpoint):
    with pytest.raises(ConfigError, match="collector"):
        tracing.configure("tests", endpoint)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("http://collector:4318/otlp/v1/traces", "http://collector:4318/otlp/v1/traces"),
    ],
)
def test_the_usual_path_is_added_where_none_is_given(endpoint, url):
    assert tracing.traces_url(endpoint) == url


# ---------------------------------------------------------------------------------------------- spans


def test_a_span_inside_another_is_its_child(spans):
    with tracing.span("outer", rows=3), tracing.span("inner"):
        pass
    assert child_of(spans.one("inner"), spans.one("outer"))
    assert spans.one("outer").attributes == {"rows": 3}
    assert parent(spans.one("outer")) is None


def test_what_threads_do_meanwhile_belongs_to_the_step(spans):
    def fetch():
        with tracing.apart("request"):
            pass

    for _ in tracing.each("step", range(3), epoch=7):
        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join()
    steps, requests = spans.all("step"), spans.all("request")
    assert [span.attributes for span in steps] == [{"epoch": 7, "number": number} for number in range(3)]
    assert len(requests) == 3
    assert all(child_of(request, step) for request, step in zip(requests, steps, strict=True))


def test_waiting_for_an_item_is_part_of_its_step(spans):
    def items():
        for number in range(2):
            tracing.record("asked", 1, 2, number=number)
            yield number

    assert list(tracing.each("step", items())) == [0, 1]
    for asked, step in zip(spans.all("asked"), spans.all("step"), strict=True):
        assert child_of(asked, step)
        assert asked.attributes == {"number": step.attributes["number"]}


def test_steps_are_numbered_from_where_they_go_on(spans):
    assert list(tracing.each("step", "ab", first=7, epoch=1)) == ["a", "b"]
    assert [span.attributes["number"] for span in spans.all("step")] == [7, 8]


def test_steps_that_are_broken_off_leave_nothing_behind(spans):
    steps = tracing.each("step", range(9))
    next(steps)
    steps.close()
    with tracing.apart("request"):
        pass
    assert spans.names() == ["request", "step"]
    assert parent(spans.one("request")) is None


def test_what_a_step_fails_with_is_in_its_span(spans):
    def items():
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(tracing.each("step", items()))
    good, bad = spans.all("step")
    assert (good.status.is_ok, bad.status.is_ok) == (True, False)
    assert [event.name for event in bad.events] == ["exception"]


def test_a_span_apart_may_be_left_in_another_thread(spans, caplog):
    def frames():
        with tracing.apart("request") as headers:
            yield headers
            yield headers

    held = frames()
    headers = next(held)
    with tracing.span("something else"):
        pass
    thread = threading.Thread(target=held.close)
    thread.start()
    thread.join()
    request = spans.one("request")
    version, trace, span, flags = headers.pop("traceparent").split("-")
    assert (version, int(trace, 16), int(span, 16)) == (
        "00",
        request.context.trace_id,
        request.context.span_id,
    )
    assert int(flags, 16) & 1  # sampled; the other flags are the SDK's own affair
    assert not headers
    assert parent(spans.one("something else")) is None
    assert not caplog.records


def test_an_error_ends_a_span_apart(spans):
    with pytest.raises(KeyError), tracing.apart("request"):
        raise KeyError("x")
    assert not spans.one("request").status.is_ok


def test_a_span_goes_on_from_what_was_sent(spans):
    with tracing.apart("request") as headers:
        pass
    with tracing.span("serve", parent=tracing.extract({**headers, "tracestate": "vendor=1"})):
        pass
    assert child_of(spans.one("serve"), spans.one("request"))
    assert not spans.one("serve").context.trace_state


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "x",
        "00-" + "0" * 32 + "-" + "2" * 16 + "-01",
        "00-" + "g" * 32 + "-" + "2" * 16 + "-01",
        "0" * 9999,
    ],
)
def test_nonsense_begins_a_trace_of_its_own(spans, sent):
    with tracing.span("serve", parent=tracing.extract({"traceparent": sent})):
        pass
    assert parent(spans.one("serve")) is None


def test_what_is_over_has_the_times_it_is_told(spans):
    with tracing.span("outer"):
        tracing.record("inner", 1_000, 3_000, group=2)
    inner = spans.one("inner")
    assert (inner.start_time, inner.end_time, inner.attributes) == (1_000, 3_000, {"group": 2})
    assert child_of(inner, spans.one("outer"))


# --------------------------------------------------------------------------------------- a real server


def push(server, world):
    with ServerClient(server.url) as client:
        client.put_program(world.program)


def asked(url, request):
    with ServerClient(url) as client:
        return [batch for batch, _ in client.run(request)]


def test_one_trace_from_the_step_to_the_store(spans, world):
    with in_thread(world.store.uri, threads=1) as server:
        server.wait_ready()
        push(server, world)
        for _ in tracing.each("step", [0], epoch=0):
            batches = asked(server.url, world.request((0, 1, 2, 3), (4, 5), stop=2))
        wait_for(lambda: spans.all("POST /v1/run"))
    for batch, ids in zip(batches, ((0, 1, 2, 3), (4, 5)), strict=True):
        same(batch, world.here(ids, 2))
    step = spans.one("step")
    mine = spans.of(step)
    request, served = mine.one("request"), mine.one("POST /v1/run")
    assert parent(step) is None
    assert child_of(request, step)
    assert child_of(served, request) and served.parent.is_remote
    assert served.attributes["tenant"] == "anyone" and len(served.attributes["request_id"]) == 16
    assert request.attributes["micro_batches"] == 2
    for name in ("read", "queue", "input", "forward", "encode", "send"):
        found = mine.all(name)
        assert {span.attributes["group"] for span in found} == {0, 1}, name
        assert all(child_of(span, served) for span in found), name
    reads = {span.context.span_id for span in mine.all("read")}
    gets = [span for span in mine.all("GET") if parent(span) in reads]
    objects = {ref.object for ref in world.dataset.locate(range(6))}
    assert {span.attributes["object"] for span in gets} == objects
    assert {span.attributes["store"] for span in gets} == {"default"}
    assert child_of(mine.one("admit"), served)


def test_reads_into_memory_are_spans_too(spans, tmp_path):
    store = traced({"here": Store.open(tmp_path.as_uri(), name="here")})["here"]
    store.put("a", b"0123456789")
    room = bytearray(4)
    store.read_into("a", 1, memoryview(room))
    assert room == b"1234"
    asyncio.run(store.read_into_async("a", 2, [memoryview(room)]))
    assert room == b"2345"
    assert [dict(span.attributes) for span in spans.all("GET")] == [
        {"store": "here", "object": "a", "start": start, "stop": start + 4} for start in (1, 2)
    ]


def test_a_traced_store_is_written_to_as_the_store_itself(spans):
    content = bytes(2 * PATIENT_BYTES)
    with FaultyServer() as server:
        server.put_s = 1.0
        options = {"endpoint": server.url, "access_key_id": "alice:reader", "secret_access_key": "secret"}
        store = Store.open("s3://data", name="here", options={**options, "read_timeout_s": "0.25"})
        written = traced({"here": store})["here"]
        written.put("a", content)
        assert Store.open("s3://data", options=options).get("a") == content
        assert [method for method, _, _ in server.requests].count("PUT") == 1


@pytest.mark.full
def test_what_a_job_asks_while_it_is_planned_is_traced_on_both_sides(spans, tmp_path):
    own = make_world(tmp_path)
    with in_thread(own.store.uri, threads=1) as server, ServerClient(server.url) as client:
        server.wait_ready()
        assert not client.has_program(own.program.digest)
        client.put_program(own.program)  # first without its weights, which are not there
        client.profile([own.program.digest], repeats=1)
        wait_for(lambda: spans.all("POST /v1/profile"))
    for asked, served, count in (
        ("find program", "HEAD /v1/programs", 1),
        ("upload", "PUT /v1/programs", 2),
        ("profile", "POST /v1/profile", 1),
    ):
        assert len(spans.all(asked)) == len(spans.all(served)) == count
        for span in spans.all(asked):
            assert child_of(spans.of(span).one(served), span)


@pytest.mark.full
def test_the_steps_of_a_job_are_spans_and_its_requests_belong_to_them(spans, tmp_path):
    data, model = photos(tmp_path), frozen_small()
    with (
        in_thread(data.store.uri, threads=1) as server,
        upriver.connect(server.wait_ready().url) as near,
        near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, cut=2) as job,
    ):
        losses = train(job, model, optimizer_of(model))
    steps = spans.all("step")
    assert [(span.attributes["epoch"], span.attributes["number"]) for span in steps] == [
        (0, number) for number in range(len(losses))
    ]
    by_id = {span.context.span_id for span in steps}
    requests = [span for span in spans.all("request") if parent(span) in by_id]
    assert requests
    for request in requests:
        served = spans.of(request).all("POST /v1/run")
        assert any(child_of(span, request) for span in served)


@pytest.mark.full
def test_the_phases_of_a_worker_follow_one_another(spans, world):
    with in_thread(world.store.uri, threads=1) as server:
        server.wait_ready()
        push(server, world)
        asked(server.url, world.request((0, 1, 2, 3), stop=2))
        wait_for(lambda: spans.all("POST /v1/run"))
    served = spans.one("POST /v1/run")
    decoded, forward, encoded = map(spans.of(served).one, ("input", "forward", "encode"))
    assert decoded.end_time == forward.start_time
    assert forward.end_time == encoded.start_time
    assert decoded.start_time < forward.start_time < encoded.start_time <= encoded.end_time
    assert encoded.end_time <= served.end_time


@pytest.mark.full
def test_who_only_looks_is_not_traced(spans, world):
    with in_thread(world.store.uri) as server:
        server.wait_ready()
        for path in ("/metrics", "/v1/info", "/v1/load", "/nothing"):
            ask(server, "GET", path, headers={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"})
    assert spans.names() == []


@contextmanager
def collector():
    """Run a stand-in for an OpenTelemetry collector; yield the decoded requests."""
    proto = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
        reason="OpenTelemetry is not installed here",
    )
    came = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                came.append(proto.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as double:
        thread = threading.Thread(target=double.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{double.server_port}", came
        finally:
            double.shutdown()
            thread.join()


def received(came):
    """Return service and span of everything that a collector received."""
    for request in list(came):
        for resource in request.resource_spans:
            [service] = [
                pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
            ]
            for scope in resource.scope_spans:
                yield from ((service, span) for span in scope.spans)


@pytest.mark.full
@pytest.mark.slow
def test_two_processes_make_one_trace_at_a_collector(world):
    with collector() as (endpoint, came), running(world.store.uri, trace_endpoint=endpoint) as server:
        tracing.configure("trainer", endpoint)
        for _ in tracing.each("step", [0]):
            asked(server.url, world.request((0, 1)))
        tracing.configure("trainer", None)  # which sends the rest
        wait_for(lambda: any(span.name == "POST /v1/run" for _, span in received(came)))
        found = {span.name: (service, span) for service, span in received(came)}
        (trainer, step), (_, request), (near, served) = (
            found[name] for name in ("step", "request", "POST /v1/run")
        )
        assert trainer == "trainer" and near != trainer
        assert step.trace_id == request.trace_id == served.trace_id
        assert request.parent_span_id == step.span_id and served.parent_span_id == request.span_id
        assert {"read", "GET", "queue", "input", "encode", "send"} <= set(found)
        assert server.stop() == 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "listens", [pytest.param(False, marks=pytest.mark.full), True], ids=["not there", "says nothing"]
)
def test_a_collector_that_fails_is_nobodys_trouble(world, listens):
    pytest.importorskip(EXPORTER, reason="OpenTelemetry is not installed here")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with running(world.store.uri, trace_endpoint=endpoint) as server:
            [batch] = run(server, world.request((0, 1)))
            same(batch, world.here((0, 1), 0))
            assert server.stop() == 0


def test_a_server_does_not_start_with_an_address_for_traces_that_is_none(world):
    config = ServerConfig(stores={"default": world.store.uri}, port=0, trace_endpoint="http://a?b=c")
    with pytest.raises(ConfigError, match="collector"):
        serve(config)
    assert not tracing.configured()
