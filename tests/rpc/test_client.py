import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.rpc.scripted_http import Exchange, scripted
from tests.server.running import free_port
from upriver.errors import (
    BadSample,
    ConfigError,
    NotAuthorized,
    ObjectChanged,
    Overloaded,
    ProgramNotFound,
    ProtocolError,
    ServerUnavailable,
    UpriverError,
)
from upriver.protocol import DEFAULT_CAPS, VERSION, End, Info, RunRequest, encode, error_body
from upriver.rpc import client as transport
from upriver.rpc import link_meter
from upriver.rpc.client import AnswerClosed, ServerClient
from upriver.rpc.http import Timeouts
from upriver.rpc.link_meter import LinkMeter
from upriver.rpc.link_probe import BEFORE, BESIDE, probed
from upriver.types import MicroBatch, Timings

INFO = Info(
    version="1",
    fingerprint={"torch": "2"},
    stores=("default",),
    micro_batch=16,
    caps=DEFAULT_CAPS,
    device="cpu",
    workers=1,
    threads=1,
)
TIMINGS = Timings(phases={"read": 0.25}, stages={0: 0.5})


def batch(ids: tuple[int, ...], position: int = 0, fill: float | None = None) -> MicroBatch:
    value = float(ids[0]) if fill is None else fill
    return MicroBatch(ids=ids, position=position, tensors=(torch.full((len(ids), 3), value),))


def request(*micro_batches: tuple[int, ...], **changes: object) -> RunRequest:
    fields = {"micro_batches": micro_batches, "start": -2, "stop": 0, "micro_batch": 4} | changes
    return RunRequest(**fields)


def serve_batches(exchange: Exchange, *, until: int | None = None) -> None:
    """Answer the request; send only the first ``until`` micro-batches, then hang up."""
    head = exchange.body[20:]
    asked = msgspec.json.decode(head, type=RunRequest)
    exchange.start_chunks()
    for ids in asked.micro_batches[:until]:
        for message in (batch(tuple(ids), asked.stop), TIMINGS):
            for part in encode(message):
                exchange.chunk(bytes(part))
    if until is not None:
        exchange.hang_up()
        return
    for part in encode(End()):
        exchange.chunk(bytes(part))
    exchange.end_chunks()


def ids_of(answer: object) -> list[tuple[int, ...]]:
    return [micro_batch.ids for micro_batch, _ in answer]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- answers


def test_run_yields_what_was_asked_in_order():
    with scripted(serve_batches) as url, ServerClient(url) as client:
        got = list(client.run(request((0, 1), (2, 3), (4,))))
    assert [b.ids for b, _ in got] == [(0, 1), (2, 3), (4,)]
    assert torch.equal(got[1][0].tensors[0], torch.full((2, 3), 2.0))
    assert got[0][1] == TIMINGS


def test_batches_are_there_before_the_answer_is_complete():
    release = threading.Event()

    def respond(exchange: Exchange) -> None:
        exchange.start_chunks()
        for part in [*encode(batch((0,))), *encode(TIMINGS)]:
            exchange.chunk(bytes(part))
        release.wait(60)
        exchange.hang_up()

    with scripted(respond) as url, ServerClient(url) as client:
        answer = client.run(request((0,), (1,)))
        assert next(answer)[0].ids == (0,)
        release.set()
        with pytest.raises(ServerUnavailable, match=url):
            next(answer)


def test_inputs_are_sent_along():
    seen = []

    def respond(exchange: Exchange) -> None:
        seen.append(exchange.body)
        exchange.frames(batch((7,), position=1), TIMINGS, End())

    sent = batch((7,), position=0)
    asked = request((7,), start=0, stop=1, program="0" * 64)
    with scripted(respond) as url, ServerClient(url) as client:
        assert ids_of(client.run(asked, [sent])) == [(7,)]
    assert seen == [b"".join(map(bytes, [*encode(asked), *encode(sent)]))]


def test_every_byte_of_an_answer_is_counted():
    expected = sum(len(part) for message in (batch((0, 1)), TIMINGS, End()) for part in encode(message))
    meter = LinkMeter()
    with scripted(serve_batches) as url, ServerClient(url, meter=meter) as client:
        list(client.run(request((0, 1))))
    assert meter.bytes_by_kind == {"answers": expected, "direct": 0}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([batch((1,)), TIMINGS, batch((0,)), TIMINGS, End()], "asked for samples 0"),
        ([batch((0,)), TIMINGS, batch((0,)), TIMINGS, End()], "asked for samples 1"),
        ([batch((0,)), TIMINGS, End()], "expected a micro-batch, got an end frame"),
        ([batch((0,)), batch((1,)), End()], "expected the timings"),
        ([batch((0,)), TIMINGS, batch((1,)), TIMINGS, batch((2,)), TIMINGS, End()], "expected the end"),
        ([batch((0,), position=-1), TIMINGS, End()], "at position 0, got 0 at -1"),
        (
            [
                MicroBatch(ids=(0,), position=0, tensors=(torch.zeros(1),), skipped=(0,)),
                TIMINGS,
                batch((1,)),
                TIMINGS,
                End(),
            ],
            "skipped samples 0 unasked",
        ),
    ],
)
def test_anything_else_than_asked_is_refused(messages, said):
    with (
        scripted(lambda exchange: exchange.frames(*messages)) as url,
        ServerClient(url) as client,
        pytest.raises(ProtocolError, match=said) as caught,
    ):
        list(client.run(request((0,), (1,))))
    assert url in str(caught.value)


def test_skipped_samples_are_accepted_when_allowed():
    skipped = MicroBatch(ids=(0, 1), position=0, tensors=(torch.zeros(2, 3),), skipped=(1,))
    with scripted(lambda x: x.frames(skipped, TIMINGS, End())) as url, ServerClient(url) as client:
        [(got, _)] = client.run(request((0, 1), on_bad_sample="skip"))
    assert got.skipped == (1,)


def test_damaged_payload_is_refused():
    def respond(exchange: Exchange) -> None:
        head, *payload = map(bytes, encode(batch((0,))))
        exchange.start_chunks()
        exchange.chunk(head)
        exchange.chunk(bytes([payload[0][0] ^ 1]) + payload[0][1:])
        for part in [*payload[1:], *encode(TIMINGS), *encode(End())]:
            exchange.chunk(bytes(part))
        exchange.end_chunks()

    with (
        scripted(respond) as url,
        ServerClient(url) as client,
        pytest.raises(ProtocolError, match="checksum"),
    ):
        list(client.run(request((0,))))


def test_error_frame_in_mid_answer():
    broken = BadSample(sample=1, object_name="shard.tar", reason="truncated image")
    with (
        scripted(lambda x: x.frames(batch((0,)), TIMINGS, broken)) as url,
        ServerClient(url) as client,
    ):
        answer = client.run(request((0,), (1,)))
        assert next(answer)[0].ids == (0,)
        with pytest.raises(BadSample) as caught:
            next(answer)
    assert (caught.value.sample, caught.value.object_name) == (1, "shard.tar")


# ------------------------------------------------------------------------------------------- errors


def test_refused_connection():
    port = free_port()
    with (
        ServerClient(f"http://127.0.0.1:{port}") as client,
        pytest.raises(ServerUnavailable, match=f"{port}.*refused"),
    ):
        client.info()


@pytest.mark.parametrize("answers", [0, 1])
def test_a_server_that_never_said_a_word_may_speak_https(answers):
    """A server that has answered before speaks plain HTTP, and is gone."""
    asked = []

    def respond(exchange: Exchange) -> None:
        asked.append(exchange.path)
        if len(asked) <= answers:
            exchange.plain(200, Connection="close")
        else:
            exchange.hang_up()

    with scripted(respond) as url, ServerClient(url) as client:
        for _ in range(answers):
            assert client.alive()
        with pytest.raises(ServerUnavailable) as caught:
            client.alive()
        assert str(caught.value).startswith(f"{url}: ")
        assert ("begins with https://" in str(caught.value)) is not bool(answers)


@pytest.mark.parametrize("until", [0, 1, 2])
def test_truncated_answer(until):
    with scripted(lambda x: serve_batches(x, until=until)) as url, ServerClient(url) as client:
        answer = client.run(request((0,), (1,), (2,)))
        assert [next(answer)[0].ids for _ in range(until)] == [(i,) for i in range(until)]
        with pytest.raises(ServerUnavailable, match="broke off"):
            next(answer)


def test_answer_that_ends_between_frames_is_broken_off_too():
    """A proxy may end a body properly although the server behind it died."""
    with (
        scripted(lambda x: x.frames(batch((0,)), TIMINGS)) as url,
        ServerClient(url) as client,
        pytest.raises(ServerUnavailable, match="broke off"),
    ):
        list(client.run(request((0,), (1,))))


def test_stalled_answer():
    release = threading.Event()

    def respond(exchange: Exchange) -> None:
        exchange.start_chunks()
        exchange.chunk(bytes(encode(batch((0,)))[0])[:30])
        release.wait(60)

    timeouts = Timeouts(read_s=0.2)
    with scripted(respond) as url, ServerClient(url, timeouts=timeouts) as client:
        with pytest.raises(ServerUnavailable, match="no answer in time"):
            list(client.run(request((0,))))
        release.set()


def test_silent_server_does_not_hold_up_a_probe():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ServerClient(f"http://127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        with pytest.raises(ServerUnavailable, match="no answer in time"):
            client.alive(timeout_s=0.1)
        with pytest.raises(ServerUnavailable, match="no answer in time"):
            client.ready(timeout_s=0.1)


def test_typed_errors_of_error_answers():
    body = json.dumps(error_body(ObjectChanged("object 'a' changed"))).encode()
    with (
        scripted(lambda x: x.plain(409, body)) as url,
        ServerClient(url) as client,
        pytest.raises(ObjectChanged, match="'a'"),
    ):
        list(client.run(request((0,))))


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("body", [b"", json.dumps(error_body(Overloaded("full"))).encode()])
def test_overload_says_when_to_ask_again(status, body):
    with (
        scripted(lambda x: x.plain(status, body, Retry_After="7")) as url,
        ServerClient(url) as client,
        pytest.raises(Overloaded) as caught,
    ):
        list(client.run(request((0,))))
    assert caught.value.retry_after_s == 7


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, NotAuthorized), (403, NotAuthorized), (404, ProtocolError), (502, ServerUnavailable)],
)
def test_errors_of_something_else_that_answers(status, kind):
    with (
        scripted(lambda x: x.plain(status, b"<html>")) as url,
        ServerClient(url) as client,
        pytest.raises(kind, match=str(status)),
    ):
        list(client.run(request((0,))))


def test_other_protocol_version():
    body = json.dumps({"protocol": 99, "new": 1}).encode()
    with (
        scripted(lambda x: x.plain(200, body)) as url,
        ServerClient(url) as client,
        pytest.raises(ProtocolError) as caught,
    ):
        client.info()
    assert "99" in str(caught.value) and str(VERSION) in str(caught.value) and url in str(caught.value)


def test_not_an_upriver_server():
    with (
        scripted(lambda x: x.plain(200, b"<!doctype html><html>hello</html>")) as url,
        ServerClient(url) as client,
    ):
        with pytest.raises(ProtocolError, match=url):
            client.info()
        with pytest.raises(ProtocolError, match=url):
            list(client.run(request((0,))))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "host:7000",
        "http://",
        "http://host:99999",
        "http://user:secret@host:1",
        "http://host:1?x=1",
    ],
)
def test_bad_addresses(url):
    with pytest.raises(ConfigError) as caught:
        ServerClient(url)
    assert "secret" not in str(caught.value)


# ------------------------------------------------------------------------------------ other questions


def test_short_questions_and_headers():
    seen = []

    def respond(exchange: Exchange) -> None:
        seen.append((exchange.method, exchange.path, exchange.headers["Authorization"]))
        match exchange.path:
            case "/base/livez" | "/base/readyz":
                exchange.plain(200 if exchange.path == "/base/livez" else 503)
            case "/base/v1/info":
                exchange.plain(200, msgspec.json.encode(INFO))
            case path:
                exchange.plain(404 if path.endswith("b") else 200)

    with scripted(respond) as url, ServerClient(url + "/base/", token="hush") as client:
        assert client.alive()
        assert not client.ready()
        assert client.info() == INFO
        assert client.has_program("a")
        assert not client.has_program("b")
    assert {authorization for *_, authorization in seen} == {"Bearer hush"}
    assert seen[3][:2] == ("HEAD", "/base/v1/programs/a")


@pytest.mark.parametrize("there", [False, True])
def test_put_program_sends_length_graph_and_weights_that_are_not_there(there):
    class Files:
        digest = "d" * 64
        graph_bytes = b'{"graph": 1}'
        weights_bytes = memoryview(bytes(range(256)) * 8192)  # more than the client sends at once

    seen = []

    def respond(exchange: Exchange) -> None:
        seen.append((exchange.method, exchange.path, exchange.body))
        if there or len(seen) == 2:
            exchange.plain(201)
        else:
            exchange.plain(404, json.dumps(error_body(ProgramNotFound("no weights"))).encode())

    meter = LinkMeter()
    with scripted(respond) as url, ServerClient(url, meter=meter) as client:
        client.put_program(Files())
    graph = Files.graph_bytes
    alone = len(graph).to_bytes(8, "big") + graph
    bodies = [alone] if there else [alone, alone + bytes(Files.weights_bytes)]
    assert seen == [("PUT", f"/v1/programs/{'d' * 64}", body) for body in bodies]
    assert meter.total_bytes == 0  # the other direction: from compute to storage


def test_probe():
    def respond(exchange: Exchange) -> None:
        assert exchange.path == "/v1/probe?bytes=300000"
        exchange.plain(200, bytes(300_000))

    meter = LinkMeter(3_000_000, burst_bytes=0)
    with scripted(respond) as url, ServerClient(url, meter=meter) as client:
        probe = client.probe(300_000)
    assert probe.num_bytes == meter.total_bytes == 300_000
    assert probe.seconds > 0 and probe.first_byte_s > 0
    assert probe.num_bytes / probe.seconds < 2 * 3_000_000


def answered(answer: bytes, status: int = 200) -> Callable[[Exchange], None]:
    """Run a server that accepts a probe and acknowledges it with these words."""

    def respond(exchange: Exchange) -> None:
        assert (exchange.method, exchange.path) == ("POST", "/v1/probe")
        assert not exchange.body.strip(b"\0")
        exchange.plain(status, answer.replace(b"SENT", b"%d" % len(exchange.body)))

    return respond


@pytest.mark.parametrize("num_bytes", [1, 100_000, (1 << 20) + 1, 3 << 20])
def test_an_upload_is_measured_by_the_server(num_bytes: int) -> None:
    with scripted(answered(b'{"bytes": SENT, "seconds": 1e-5}')) as url, ServerClient(url) as client:
        probe = client.probe_upload(num_bytes)
    assert (probe.num_bytes, probe.seconds) == (num_bytes, 1e-5)
    assert probe.bytes_per_s == pytest.approx(num_bytes / 1e-5)
    assert probe.first_byte_s > 0


@pytest.mark.parametrize("seconds", ["0", "3600"])
def test_an_upload_takes_no_longer_than_was_waited_for_it_and_no_link_is_infinite(seconds: str) -> None:
    answer = b'{"bytes": SENT, "seconds": %s}' % seconds.encode()
    with scripted(answered(answer)) as url, ServerClient(url) as client:
        probe = client.probe_upload(1000)
    assert 0 <= probe.seconds < 3600
    assert probe.first_byte_s >= 0
    assert 0 < probe.bytes_per_s <= 1000 / 1e-6


@pytest.mark.parametrize(
    "answer",
    [
        b'{"bytes": 1, "seconds": 1}',
        b'{"bytes": SENT, "seconds": -1}',
        b'{"bytes": SENT, "seconds": 1e999}',
        b'{"bytes": SENT}',
        b"[]",
        b"nonsense",
    ],
)
def test_an_upload_of_which_a_server_says_nonsense_is_an_error(answer: bytes) -> None:
    with scripted(answered(answer)) as url, ServerClient(url) as client, pytest.raises(ProtocolError):
        client.probe_upload(1000)


def test_an_older_server_takes_no_upload() -> None:
    with scripted(answered(b"{}", 405)) as url, ServerClient(url) as client, pytest.raises(ProtocolError):
        client.probe_upload(1000)


@pytest.mark.parametrize("num_bytes", [0, -1, 1.5, True, float("nan")])
def test_an_upload_has_bytes(num_bytes: float) -> None:
    with ServerClient("http://127.0.0.1:1") as client, pytest.raises(ConfigError, match="num_bytes"):
        client.probe_upload(num_bytes)  # type: ignore[arg-type]


class StoppedClock:
    """A clock that advances only while a caller sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("rate", [30_000.0, 2_500_000.0])
def test_a_probe_tells_a_link_s_rate_whatever_its_burst(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    clock = StoppedClock()
    monkeypatch.setattr(link_meter, "time", clock)
    monkeypatch.setattr(transport, "time", clock)

    def respond(exchange: Exchange) -> None:
        exchange.plain(200, bytes(int(exchange.path.partition("=")[2])))

    for burst in (0, 16_000):
        with scripted(respond) as url, ServerClient(url, meter=LinkMeter(rate, burst_bytes=burst)) as client:
            assert client.probe(120_000).bytes_per_s == pytest.approx(rate, rel=1e-6)
            clock.now += 100
            for effort in (BEFORE, BESIDE):
                assert probed(client, effort) == pytest.approx(rate, rel=0.1)
            observed = client.meter.observed_bandwidth()
            assert observed == pytest.approx(rate, rel=0.15)


# ---------------------------------------------------------------------------------------- connections


def test_a_finished_answer_leaves_its_connection_for_the_next():
    ports = []

    def respond(exchange: Exchange) -> None:
        ports.append(exchange.client_port)
        serve_batches(exchange)

    with scripted(respond) as url, ServerClient(url) as client:
        for _ in range(3):
            list(client.run(request((0,), (1,))))
    assert len(set(ports)) == 1


def test_closing_early_closes_the_connection():
    gone = threading.Event()

    def respond(exchange: Exchange) -> None:
        exchange.start_chunks()
        try:
            while True:
                for part in [*encode(batch((0,))), *encode(TIMINGS)]:
                    exchange.chunk(bytes(part))
        except OSError:
            gone.set()
            exchange.handler.close_connection = True

    with scripted(respond) as url, ServerClient(url) as client:
        with client.run(request((0,), (0,), (0,))) as answer:
            next(answer)
        assert gone.wait(60)
        assert not client._connections.busy and not client._connections.idle


def test_close_wakes_a_reader_in_another_thread():
    release, started = threading.Event(), threading.Event()

    def respond(exchange: Exchange) -> None:
        exchange.start_chunks()
        started.set()
        release.wait(60)

    errors = []
    with scripted(respond) as url, ServerClient(url) as client:
        answer = client.run(request((0,)))

        def read() -> None:
            try:
                next(answer)
            except Exception as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        started.wait(60)
        time.sleep(0.02)
        answer.close()
        reader.join(60)
        assert not reader.is_alive()
        release.set()
    assert [type(error) for error in errors] == [AnswerClosed]


class Frames:
    """Replace a response's generator: a thread stays in it until a test lets the thread leave."""

    def __init__(self) -> None:
        self.entered, self.may_leave, self.calls = threading.Event(), threading.Event(), []

    def __next__(self):
        self.calls.append("next")
        self.entered.set()
        assert self.may_leave.wait(60)
        self.calls.append("left")
        raise ServerUnavailable("broken off")

    def close(self) -> None:
        self.calls.append("close")


def test_an_answer_is_not_closed_under_the_thread_that_reads_it():
    """Closing a generator that another thread runs crashes CPython 3.11 now and then."""
    errors = []
    with ServerClient("http://127.0.0.1:1") as client, client.run(request((0,))) as answer:
        frames = answer._frames = Frames()

        def read() -> None:
            try:
                next(answer)
            except Exception as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert frames.entered.wait(60)
        answer.close()
        frames.may_leave.set()
        reader.join(60)
    assert frames.calls == ["next", "left", "close"]
    assert [type(error) for error in errors] == [AnswerClosed]


def test_closed_before_it_began():
    with scripted(serve_batches) as url, ServerClient(url) as client:
        answer = client.run(request((0,)))
        answer.close()
        with pytest.raises(AnswerClosed):
            next(answer)


def test_abort_breaks_answers_off_and_leaves_the_client_usable():
    release, started = threading.Event(), threading.Event()

    def respond(exchange: Exchange) -> None:
        if started.is_set():
            exchange.plain(200)
            return
        exchange.start_chunks()
        started.set()
        release.wait(60)

    with scripted(respond) as url, ServerClient(url) as client:
        errors = []

        def read() -> None:
            try:
                list(client.run(request((0,))))
            except ServerUnavailable as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        started.wait(60)
        client.abort()
        reader.join(60)
        assert len(errors) == 1
        assert client.alive()
        release.set()
        client.close()
        with pytest.raises(ServerUnavailable, match="closed"):
            client.alive()


def test_kept_connection_that_was_closed_meanwhile_is_replaced():
    """Servers close idle connections after some seconds, which is no failure."""
    ports = []

    def respond(exchange: Exchange) -> None:
        ports.append(exchange.client_port)
        exchange.plain(200)
        exchange.handler.close_connection = True  # without notice

    with scripted(respond) as url, ServerClient(url) as client:
        assert client.alive() and client.alive() and client.alive()
    assert len(set(ports)) == 3


def test_refusal_of_a_large_body_is_heard():
    """The server answers and closes before it has read everything: its answer counts, not the broken pipe."""
    body = json.dumps(error_body(NotAuthorized("no token"))).encode()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                connection.shutdown(socket.SHUT_WR)
                time.sleep(0.3)

        server = threading.Thread(target=refuse)
        server.start()

        class Files:
            digest = "d" * 64
            graph_bytes = bytes(30 << 20)
            weights_bytes = memoryview(b"")

        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with ServerClient(url) as client, pytest.raises(NotAuthorized, match="no token"):
            client.put_program(Files())
        server.join()


# ----------------------------------------------------------------------------------- malicious servers


def trickle(exchange: Exchange) -> None:
    """Begin a long response, and send one byte now and then, for ever."""
    exchange.handler.send_response(200)
    exchange.handler.send_header("Content-Length", "1000000")
    exchange.handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            exchange.handler.wfile.write(b" ")
            time.sleep(0.02)
    exchange.handler.close_connection = True


def trickle_head(exchange: Exchange) -> None:
    """Trickle in the same way, before the response's head is complete."""
    with contextlib.suppress(OSError):
        exchange.handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            exchange.handler.wfile.write(b"X: y\r")
            time.sleep(0.02)
    exchange.handler.close_connection = True


def info_of(client: ServerClient) -> object:
    return client.info()


def program_of(client: ServerClient) -> object:
    return client.has_program("a")


def probe_of(client: ServerClient) -> object:
    return client.probe(1_000_000)


def livez_of(client: ServerClient) -> object:
    return client.alive(timeout_s=0.2)


@pytest.mark.parametrize(
    ("respond", "ask"),
    [
        (trickle, info_of),
        (trickle, probe_of),
        *((trickle_head, ask) for ask in (info_of, program_of, probe_of, livez_of)),
    ],
)
def test_a_trickling_server_gets_no_more_than_the_time_of_a_question(respond, ask):
    timeouts = Timeouts(question_s=0.2)
    with scripted(respond) as url, ServerClient(url, timeouts=timeouts) as client:
        with pytest.raises(ServerUnavailable, match="no answer in time"):
            ask(client)
        assert not client._connections.busy and not client._connections.idle


NASTY = "\x1b]0;owned\x07 \x1b[2J\nline two\u202e\x9b" + "x" * 10_000


@pytest.mark.parametrize("code", ["store", "unavailable", "no\x1b[31msuch\ncode" + "y" * 1000])
def test_what_a_server_says_is_printable_and_short(code):
    body = json.dumps({"error": {"code": code, "message": NASTY}}).encode()
    with (
        scripted(lambda exchange: exchange.plain(500, body)) as url,
        ServerClient(url) as client,
        pytest.raises(UpriverError) as caught,
    ):
        client.info()
    assert str(caught.value).isprintable()
    assert "line two" in str(caught.value)
    assert len(str(caught.value)) <= 2000
    assert caught.value.code.isprintable()
    assert len(caught.value.code) <= 64


def raw(reply: bytes) -> Callable[[Exchange], None]:
    def respond(exchange: Exchange) -> None:
        exchange.handler.wfile.write(reply)
        exchange.hang_up()

    return respond


@pytest.mark.parametrize(
    ("reply", "kind", "named"),
    [
        (b"\x1b[2JSSH-2.0 hello\r\n\r\n" * 40, ServerUnavailable, "does not speak HTTP"),
        (b"HTTP/1.1 418 \x1b[2Jteapot\r\nContent-Length: 0\r\n\r\n", ProtocolError, "answered 418"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"protocol": "\x1b[2J\x9b"}  ',
            ProtocolError,
            "info",
        ),
    ],
)
def test_answers_of_something_else_are_named_and_not_repeated_raw(reply, kind, named):
    with scripted(raw(reply)) as url, ServerClient(url) as client, pytest.raises(kind, match=named) as caught:
        client.info()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("field", ["version", "device", "fingerprint", "stores"])
def test_an_info_with_control_characters_is_refused(field):
    info = msgspec.to_builtins(INFO)
    info[field] = {"fingerprint": {"a\x1b[2J": "b"}, "stores": ["\x07"]}.get(field, "1\n2")
    with (
        scripted(lambda exchange: exchange.plain(200, msgspec.json.encode(info))) as url,
        ServerClient(url) as client,
        pytest.raises(ProtocolError, match="info") as caught,
    ):
        client.info()
    assert str(caught.value).isprintable()
