"""Test admission by memory through a real server: many requests, little memory, every answer right."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from tests.pipeline.making import encoded, npy, write
from tests.server.conftest import MICRO_BATCH, make_program, make_world
from tests.server.running import (
    answering,
    ask,
    body_of,
    changed,
    connect,
    messages,
    refused,
    run,
    running,
    stopped,
    wait_for,
)
from upriver.errors import DoesNotFit, Overloaded
from upriver.pipeline import Decode, LoadTensor, Resize, ToFloat, index
from upriver.protocol import DatasetRef, Larger, RunRequest, program_head
from upriver.server.scheduling.footprint import DECODING_BYTES
from upriver.types import MicroBatch

BATCHES = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))

SETTINGS = {"workers": 1, "caps": {"pixels": 1_000_000}}


def put(server, program):
    graph = program.graph_bytes
    body = program_head(len(graph)) + graph + bytes(program.weights_bytes)
    status, _, answer = ask(server, "PUT", f"/v1/programs/{program.digest}", body)
    assert status == 201, answer


def load_of(server):
    return json.loads(ask(server, "GET", "/v1/load")[2])


def idle(server):
    """Return what a server holds while no request runs."""
    wait_for(lambda: load_of(server)["running"] == 0)
    return load_of(server)["reserved_bytes"]


def same(found, expected):
    assert [batch.ids for batch in found] == [batch.ids for batch in expected]
    for batch, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, batch.tensors, other.tensors))


def batches_of(found):
    return [message for message in found if isinstance(message, MicroBatch)]


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """Use samples of 2 MiB: a request then needs more than the difference between two servers."""
    return make_world(tmp_path_factory.mktemp("heavy"), padding=bytes(2 << 20))


@dataclass(frozen=True)
class Needs:
    """Memory that a server of one worker holds.

    Attributes:
        kept: With one program and no request.
        request: For one more request.
    """

    kept: int
    request: int

    @property
    def budget(self):
        """Return the memory for two requests at once."""
        return self.kept + 2 * self.request + self.request // 2


@pytest.fixture(scope="module")
def needs(heavy):
    request = heavy.request(*BATCHES, stop=3)
    with running(heavy.store.uri, **SETTINGS) as server:
        server.wait_ready()
        base = idle(server)
        put(server, heavy.program)
        run(server, request)
        kept = idle(server)
        with stopped(server), answering(server, request):
            held = load_of(server)["reserved_bytes"]
        wait_for(lambda: idle(server) == kept)
    assert 0 < base < kept < held
    return Needs(kept, held - kept)


@pytest.fixture(scope="module")
def small(heavy, needs):
    """Start a server with memory for two requests; each test leaves it unchanged."""
    with running(heavy.store.uri, memory_budget_bytes=needs.budget, **SETTINGS) as server:
        server.wait_ready()
        put(server, heavy.program)
        yield server


@pytest.mark.full
@pytest.mark.slow
def test_many_requests_in_little_memory_are_all_answered_right(heavy, small, needs):
    expected = [heavy.here(ids, 3) for ids in BATCHES]

    def one(_):
        for _ in range(60):
            try:
                return run(small, heavy.request(*BATCHES, stop=3))
            except (Overloaded, AssertionError) as error:
                assert "overloaded" in str(error) or isinstance(error, Overloaded), error
        raise AssertionError("never answered")

    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(one, range(48)):
            same(found, expected)
    assert small.metric("upriver_worker_restarts_total") == 0
    assert idle(small) < needs.budget


def test_as_many_as_fit_are_admitted_and_the_rest_wait(heavy, small, needs):
    request = heavy.request(*BATCHES, stop=3)
    run(small, request)
    kept = idle(small)
    with ExitStack() as stack:
        with stopped(small):
            asked = []
            for _ in range(4):
                connection = connect(small)
                stack.callback(connection.close)
                connection.request("POST", "/v1/run", body=body_of(request))
                asked.append(connection)
            wait_for(lambda: load_of(small)["waiting"] == 2)
            load = load_of(small)
            assert (load["running"], load["budget_bytes"]) == (4, needs.budget)
            assert load["reserved_bytes"] == kept + 2 * needs.request
            assert load["waiting_bytes"] == 2 * needs.request
        for connection in asked:
            found = messages(connection.getresponse())
            same(batches_of(found), [heavy.here(ids, 3) for ids in BATCHES])
    assert idle(small) == kept


def test_a_request_that_never_fits_is_refused_with_the_numbers(heavy, needs):
    little = needs.kept + needs.request // 2
    with running(heavy.store.uri, memory_budget_bytes=little, **SETTINGS) as server:
        server.wait_ready()
        status, error = refused(server, body_of(heavy.request(*BATCHES)))
        assert (status, error["code"]) == (413, "does_not_fit")
        assert "bytes of memory" in error["message"]
        assert ask(server, "GET", "/readyz")[0] == 200


def test_whoever_goes_while_waiting_in_line_is_forgotten(heavy, small):
    request = heavy.request(*BATCHES, stop=3)
    run(small, request)
    kept = idle(small)
    with stopped(small):
        connections = []
        for _ in range(6):
            connection = connect(small)
            connection.request("POST", "/v1/run", body=body_of(request))
            connections.append(connection)
        wait_for(lambda: load_of(small)["waiting"] == 4)
        for connection in connections:
            connection.close()
        wait_for(lambda: load_of(small)["running"] == 0)
        load = load_of(small)
        assert (load["waiting"], load["waiting_bytes"]) == (0, 0)
    wait_for(lambda: idle(small) == kept)
    same(run(small, request), [heavy.here(ids, 3) for ids in BATCHES])


def test_memory_is_held_as_long_as_a_worker_is_at_it(heavy, small, needs):
    request = heavy.request(*BATCHES, stop=3)
    run(small, request)
    kept = idle(small)
    with stopped(small):
        with answering(small, request):
            wait_for(lambda: load_of(small)["queue"] == 1)  # for the worker, which runs the request before it
        wait_for(lambda: load_of(small)["running"] == 0)
        assert load_of(small)["reserved_bytes"] == kept + needs.request
    wait_for(lambda: idle(small) == kept)


def test_a_deadline_ends_a_request(heavy, small):
    request = heavy.request(*BATCHES, stop=3)
    status, error = refused(small, body_of(changed(request, deadline_s=1e-6)))
    assert (status, error["code"]) == (504, "deadline")
    run(small, request)
    kept = idle(small)
    with stopped(small), answering(small, changed(request, deadline_s=5)) as response:
        (late,) = messages(response)
        assert late.code == "deadline"
    wait_for(lambda: idle(small) == kept)
    assert small.metric("upriver_shed_requests_total", 'reason="deadline"') == 2


@pytest.mark.full
def test_a_reader_that_takes_nothing_is_cut_off_at_its_deadline(tmp_path):
    """Otherwise a stalled client would hold unsent bytes in its connection for two minutes."""
    dataset = index(
        write(tmp_path, {"a/0.npy": npy(np.zeros(1 << 20, dtype=np.float32))}), stages=[LoadTensor("npy")]
    )
    dataset.publish()
    request = RunRequest(
        micro_batches=((0,),) * 16,
        start=-1,
        stop=-1,
        micro_batch=1,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    with running(dataset.store.uri, **SETTINGS) as server:
        server.wait_ready()
        assert len(run(server, request)) == 16
        kept = idle(server)
        connection = connect(server)
        connection.request("POST", "/v1/run", body=body_of(changed(request, deadline_s=5)))
        port = connection.sock.getsockname()[1]
        wait_for(lambda: server.metric("upriver_micro_batches_total") > 16)
        wait_for(lambda: port not in ports_of(server))
        connection.close()
        assert server.metric("upriver_shed_requests_total", 'reason="deadline"') == 1
        wait_for(lambda: idle(server) == kept)


def ports_of(server):
    """Return the ports of the clients connected to a server."""
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return {connection.raddr.port for connection in connections if connection.raddr}


@pytest.mark.full
def test_numeric_jobs_may_be_joined_into_larger_batches(world):
    larger = make_program(0, 2 * MICRO_BATCH)
    settings = {"admission": "adaptive", "min_batch": 2 * MICRO_BATCH, "workers": 1}
    with running(world.store.uri, **settings) as server:
        server.wait_ready()
        put(server, world.program)
        put(server, larger)
        request = changed(
            world.request(*BATCHES, stop=3),
            larger=(Larger(program=larger.digest, micro_batch=2 * MICRO_BATCH),),
        )
        found = run(server, request)
        assert [batch.ids for batch in found] == list(BATCHES)
        for batch, ids in zip(found, BATCHES, strict=True):
            for got, wanted in zip(batch.tensors, world.here(ids, 3).tensors, strict=True):
                torch.testing.assert_close(got[: len(ids)], wanted[: len(ids)])
        assert server.metric("upriver_forward_rows_sum") == 10  # eight rows at once, and the remaining two
        assert server.metric("upriver_forward_rows_count") == 2
        alone = run(server, world.request(*BATCHES, stop=3))
        same(alone, [world.here(ids, 3) for ids in BATCHES])


def test_larger_programs_that_do_not_fit_the_request_are_refused(heavy, small):
    for sizes in ((6,), (8, 8), (16, 8), (4,)):
        larger = tuple(Larger(program=heavy.program.digest, micro_batch=size) for size in sizes)
        status, error = refused(small, body_of(changed(heavy.request(*BATCHES, stop=3), larger=larger)))
        assert (status, error["code"]) == (400, "protocol"), sizes


def test_an_answer_among_the_input_stages_asks_for_what_it_takes(heavy, small):
    """Some kilobytes are decoded to megabytes: more than was held for the request."""
    root = Path(heavy.store.uri.removeprefix("file://"))
    write(root, {"plain/a/0.png": encoded(Image.new("RGB", (1000, 900), (9, 99, 199)), "PNG")})
    dataset = index(heavy.store, "plain", stages=[Decode(), Resize(8)])
    dataset.publish()
    request = RunRequest(
        micro_batches=((0,) * 4, (0,) * 3),
        start=-2,
        stop=-1,
        micro_batch=24,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    found = run(small, request)
    kept = idle(small)  # with the index, which stays open
    assert [[tuple(tensor.shape) for tensor in batch.tensors] for batch in found] == [
        [(900, 1000, 3)] * 4,
        [(900, 1000, 3)] * 3,
    ]
    with pytest.raises(DoesNotFit, match="of memory, and the server has"):
        run(small, changed(request, micro_batches=((0,) * 24,)))
    wait_for(lambda: idle(small) == kept)


LITTLE = 12 * 30_000_000 - DECODING_BYTES
"""Memory that, next to the request's own, is too little to decode 30 megapixels."""


@pytest.mark.full
def test_a_large_image_asks_for_what_decoding_it_takes(tmp_path, needs):
    """The request asks beyond what each worker holds for decoding; a smaller server refuses and runs on."""
    megapixels = {"0": 4, "1": 20, "2": 30, "3": 1}
    for name, million in megapixels.items():
        image = Image.new("RGB", (1000 * million, 1000), (9, 99, 199))
        write(tmp_path, {f"a/{name}.png": encoded(image, "PNG")})
    dataset = index(tmp_path.as_uri(), stages=[Decode(), Resize((8, 8)), ToFloat()])
    dataset.publish()
    ids = tuple(range(4))
    request = RunRequest(
        micro_batches=(ids, ids[::-1]),
        start=-3,
        stop=0,
        micro_batch=4,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    with running(tmp_path.as_uri(), workers=1) as server:
        server.wait_ready()
        found = run(server, request)
        kept = idle(server)
        assert [batch.ids for batch in found] == [ids, ids[::-1]]
        assert all(torch.equal(each, found[0].tensors[0][0]) for each in found[0].tensors[0])
        assert torch.equal(found[0].tensors[0], found[1].tensors[0])
    with running(tmp_path.as_uri(), workers=1, memory_budget_bytes=kept + LITTLE) as server:
        server.wait_ready()
        some = changed(request, micro_batches=((0, 3), (1, 3)))
        assert [batch.ids for batch in run(server, some)] == [(0, 3), (1, 3)]
        kept = idle(server)  # which differs from server to server
        with pytest.raises(DoesNotFit, match="of memory, and the server has"):
            run(server, request)
        assert [batch.ids for batch in run(server, some)] == [(0, 3), (1, 3)]
        wait_for(lambda: idle(server) == kept)
        assert server.metric("upriver_worker_restarts_total") == 0
