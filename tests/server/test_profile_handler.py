"""Test profiles: a server measures model stages on request, one at a time, and reports its load."""

import contextlib
import json
import socket
import threading

import msgspec
import pytest
import torch

from tests.program.nets import Small
from tests.rpc.scripted_http import scripted
from tests.server.conftest import CAPS, MICRO_BATCH, make_program
from tests.server.running import (
    answering,
    ask,
    body_of,
    go_on,
    messages,
    refused,
    run,
    running,
    stopped,
    wait_for,
)
from upriver.engine.fingerprint import fingerprint
from upriver.errors import Busy, NotAuthorized, Overloaded, ProgramNotFound, ProtocolError
from upriver.program.capture.prefix import capture
from upriver.program.example_inputs import TensorSource
from upriver.protocol import Load, StageCosts
from upriver.rpc.client import ServerClient
from upriver.server.ipc.messages import StageMeasurements
from upriver.server.profile_handler import costs

LOADED_KEYS = {field.name for field in msgspec.structs.fields(Load)}


def program_of(size, path="block3"):
    torch.manual_seed(0)
    return capture(Small().eval(), (torch.zeros(size, 3, 16, 16),), outputs=[TensorSource(path=path)])


@pytest.fixture(scope="module")
def sizes():
    return program_of(2), make_program(0)


@pytest.fixture(scope="module")
def client(server, sizes):
    with ServerClient(server.url) as client:
        for program in sizes:
            client.put_program(program)
        yield client


def asked(server, **fields):
    return refused(server, json.dumps(fields).encode(), path="/v1/profile")


def test_every_stage_has_its_costs(client, sizes):
    found = client.profile([program.digest for program in sizes], repeats=3)
    assert found.micro_batches == (2, MICRO_BATCH)
    assert found.repeats == 3
    assert [stage.position for stage in found.stages] == list(range(1, sizes[1].num_stages + 1))
    assert all(sum(stage.seconds) > 0 for stage in found.stages)
    assert [stage.peak_bytes for stage in found.stages] == [
        max(*each) for each in zip(*([s.peak_bytes for s in p.stages] for p in sizes), strict=True)
    ]
    assert found.fingerprint == fingerprint("cpu")
    assert (found.device, found.threads) == ("cpu", 1)


def test_one_size_tells_no_fixed_costs(client, sizes):
    found = client.profile([sizes[1].digest], stop=2, repeats=1)
    assert [stage.position for stage in found.stages] == [1, 2]
    assert all(fixed == 0 and each > 0 for fixed, each in (stage.seconds for stage in found.stages))


def test_medians_and_the_line_through_them():
    def of(size, *seconds):
        return [
            StageMeasurements(micro_batch=size, names=("a",), seconds=(s,), peak_bytes=(size,))
            for s in seconds
        ]

    [stage] = costs([of(2, 1.4, 9.0, 1.3), of(4, 2.4, 2.4, 0.0)])
    assert stage.seconds == pytest.approx((0.4, 0.5))
    assert stage.peak_bytes == 4
    [stage] = costs([of(16, 16.0), of(4, 2.0)])  # no line without a negative part goes through both
    assert stage.seconds == pytest.approx((0.0, 1.0))
    [stage] = costs([of(4, 1.0, 2.0, 9.0)])
    assert stage.seconds == (0.0, 0.5)


def test_unknown_programs_are_refused_as_a_run_request_refuses_them(client, server, world):
    with pytest.raises(ProgramNotFound):
        client.profile(["0" * 64])
    by_profile = asked(server, programs=["0" * 64])
    by_run = refused(server, body_of(world.request((0,), stop=1, program="0" * 64)))
    assert by_profile[0] == by_run[0] == 404
    assert by_profile[1]["code"] == by_run[1]["code"] == "program_not_found"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeats": 0}, "repeats"),
        ({"repeats": 10}, "repeats"),
        ({"repeats": 1.5}, "repeats"),
        ({"programs": []}, "programs"),
        ({"programs": ["0" * 64] * 5}, "programs"),
        ({"programs": ["../etc/passwd"]}, "programs"),
        ({"stop": -1}, "stop"),
        ({"stop": 10**6}, "stages must lie in"),
        ({"batch": 3}, "batch"),
        ({"protocol": 99}, "version 1"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(client, server, sizes, changes, said):
    status, error = asked(server, **{"programs": [sizes[0].digest], **changes})
    assert (status, error["code"]) == (400, "protocol")
    assert said in error["message"]


def test_programs_that_are_not_one_network_at_several_sizes(client, server, sizes):
    other = program_of(8, path="block2")
    client.put_program(other)
    again = sizes[0].digest
    assert "named twice" in asked(server, programs=[again, again])[1]["message"]
    assert "same stages" in asked(server, programs=[again, other.digest])[1]["message"]


def test_bodies_that_are_no_request(client, server):
    for body in (b"", b"[]", b"\xff", b"{", b"[" * 5000):
        assert refused(server, body, path="/v1/profile")[0] == 400
    assert refused(server, b" " * 20_000, path="/v1/profile")[0] == 413
    assert ask(server, "GET", "/v1/profile")[0] == 405


def test_a_body_that_says_it_is_too_long_is_not_waited_for(server):
    host, _, port = server.address.partition(":")
    head = f"POST /v1/profile HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: {10**10}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as raw:  # less time than a body may pause
        raw.sendall(head.encode() + b"{")
        assert raw.recv(12) == b"HTTP/1.1 413"


@pytest.mark.full
def test_inputs_larger_than_a_frame_are_refused(client, server):
    wide = program_of(CAPS["body_bytes"] // 1024)
    assert sum(value.spec.nbytes for value in wide.graph.inputs) > CAPS["body_bytes"]
    with running(f"memory://{__name__}", caps={**CAPS, "payload_bytes": 1 << 20}) as small:
        small.wait_ready()
        with ServerClient(small.url) as client:
            client.put_program(wide)
        assert asked(small, programs=[wide.digest])[1]["code"] == "too_large"


@pytest.mark.full
def test_both_routes_want_the_token(world):
    with running(world.store.uri, token="open-sesame") as server:
        with ServerClient(server.url) as client:
            for ask_it in (client.load, lambda: client.profile(["0" * 64])):
                with pytest.raises(NotAuthorized):
                    ask_it()
        with ServerClient(server.url, token="open-sesame") as client:
            assert client.load().running == 0
            with pytest.raises(ProgramNotFound):
                client.profile(["0" * 64])


# ------------------------------------------------------------------------------- with other requests


@pytest.fixture(scope="module")
def one_worker(world, sizes):
    """Start a server with one worker and memory for two requests."""
    with running(world.store.uri, caps=CAPS, max_requests=2) as server:
        server.wait_ready()
        with ServerClient(server.url) as client:
            client.put_program(sizes[0])
            client.put_program(sizes[1])
        yield server


@contextlib.contextmanager
def meanwhile(*calls):
    """Run each call in its own thread; return their results once all have ended."""
    results = [None] * len(calls)

    def call(number):
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join()


@pytest.mark.full
def test_one_profile_at_a_time(one_worker, sizes):
    digests = [program.digest for program in sizes]
    with ServerClient(one_worker.url) as client, contextlib.ExitStack() as later:
        with stopped(one_worker):
            result = later.enter_context(meanwhile(lambda: client.profile(digests, repeats=1)))
            wait_for(lambda: client.load().running == 1)
            status, headers, body = ask(
                one_worker, "POST", "/v1/profile", json.dumps({"programs": digests}).encode()
            )
            assert (status, json.loads(body)["error"]["code"]) == (429, "busy")
            assert int(headers["retry-after"]) >= 1
            with pytest.raises(Busy) as caught:
                client.profile(digests)
            assert caught.value.retry_after_s == int(headers["retry-after"])
        later.close()
        assert isinstance(result[0], StageCosts)
        wait_for(lambda: client.load().running == 0)
        assert client.profile(digests, repeats=1).repeats == 1


@pytest.mark.full
def test_who_is_slow_to_ask_keeps_nobody_from_it(one_worker, sizes):
    host, _, port = one_worker.address.partition(":")
    before = one_worker.metric("upriver_bytes_in_total")
    head = f"POST /v1/profile HTTP/1.1\r\nHost: {one_worker.address}\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(head.encode() + b"{")
        wait_for(lambda: one_worker.metric("upriver_bytes_in_total") > before)
        with ServerClient(one_worker.url) as client:
            assert client.profile([sizes[0].digest], repeats=1).repeats == 1


@pytest.mark.full
def test_a_profile_is_admitted_as_a_run_request_is(one_worker, sizes, world):
    request = world.request((0, 1), stop=1, program=sizes[1].digest)
    run(one_worker, request)  # the worker has measured the footprint, which is known from here on
    with ServerClient(one_worker.url) as client:
        wait_for(lambda: client.load().running == 0)
        with stopped(one_worker), answering(one_worker, request), answering(one_worker, request):
            wait_for(lambda: client.load().running == 2)
            with pytest.raises(Overloaded) as caught:
                client.profile([sizes[0].digest])
            assert not isinstance(caught.value, Busy)
        wait_for(lambda: client.load().running == 0)
        assert client.profile([sizes[0].digest], repeats=1).repeats == 1


def test_other_requests_are_served_while_a_profile_is_measured(one_worker, sizes, world):
    with (
        ServerClient(one_worker.url) as client,
        meanwhile(lambda: client.profile([p.digest for p in sizes], repeats=9)) as found,
    ):
        for _ in range(3):
            [batch] = run(one_worker, world.request((0, 1), stop=2, program=sizes[1].digest))
            [wanted] = [world.here((0, 1), 2)]
            assert all(map(torch.equal, batch.tensors, wanted.tensors))
    assert found[0].repeats == 9


def test_load_shows_what_waits(one_worker, sizes, world):
    request = world.request((0, 1), (2, 3), (4, 5), stop=2, program=sizes[1].digest)
    run(one_worker, request)
    with ServerClient(one_worker.url) as client:
        wait_for(lambda: client.load().running == 0)
        before = client.load()
        assert set(json.loads(ask(one_worker, "GET", "/v1/load")[2])) == LOADED_KEYS
        assert (before.running, before.queue, before.expected_wait_s) == (0, 0, 0)
        assert before.k >= 1
        assert len(before.workers) == 1
        with (
            stopped(one_worker),
            answering(one_worker, request) as first,
            answering(one_worker, request) as second,
        ):
            wait_for(lambda: client.load().queue == 2)  # the second request, and the one ahead of the first
            busy = client.load()
            assert busy.running == 2
            assert busy.expected_wait_s > 0
            go_on(one_worker)
            assert [len(messages(response)) for response in (first, second)] == [7, 7]
        wait_for(lambda: client.load().running == 0)
        after = client.load()
        assert after.queue == 0
        assert 0 < after.utilisation <= 1


def test_answers_of_another_version_are_refused():
    body = json.dumps({"protocol": 99}).encode()
    with scripted(lambda exchange: exchange.plain(200, body)) as url, ServerClient(url) as client:
        for call in (client.load, lambda: client.profile(["0" * 64])):
            with pytest.raises(ProtocolError, match="99"):
                call()
