"""Check that the server survives killed, stalled and lost peers: answers stay right, nothing is left."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipeline.making import npy, write
from tests.server.conftest import make_program, make_world
from tests.server.enclosed import inner
from tests.server.http.test_limits import same, upload
from tests.server.running import alive, answering, ask, body_of, messages, run, running, wait_for
from upriver.pipeline import LoadTensor, index
from upriver.protocol import DatasetRef, End, RunRequest, decode_info, read_frame
from upriver.types import MicroBatch

pytestmark = pytest.mark.slow


@pytest.fixture
def own(tmp_path):
    return make_world(tmp_path)


def test_a_killed_worker_is_replaced_and_its_micro_batch_done_again(world):
    ids = tuple((number % 10, (number + 1) % 10) for number in range(40))
    with running(world.store.uri) as server:
        server.wait_ready()
        with answering(server, world.request(*ids)) as response:
            first = read_frame(response)
            (worker,) = server.workers()
            os.kill(worker, signal.SIGKILL)
            got = [first, *messages(response)]
        assert isinstance(got[-1], End)
        batches = [message for message in got if isinstance(message, MicroBatch)]
        assert [batch.ids for batch in batches] == list(ids)
        for batch in batches[:1] + batches[-3:]:
            same(batch, world.here(batch.ids, 0))
        wait_for(lambda: server.metric("upriver_worker_restarts_total") == 1)
        assert server.wait_workers() != [worker]


@pytest.mark.full
def test_workers_that_die_idle_are_replaced_before_anyone_asks(world):
    with running(world.store.uri) as server:
        for number in range(2):  # as often as a micro-batch is tried
            (worker,) = server.wait_workers()
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: server.metric("upriver_worker_restarts_total") > number)  # noqa: B023
        server.wait_workers()  # meanwhile jobs are refused: a replacement worker has died soon
        assert len(run(server, world.request((0, 1), (2, 3)))) == 2


@pytest.mark.full
def test_nothing_is_left_when_the_front_is_killed(world):
    shared_before = set(os.listdir("/dev/shm"))
    with running(world.store.uri, workers=2) as server:
        wait_for(lambda: len(server.workers()) == 2)
        server.wait_ready()
        run(server, world.request((0, 1), (2, 3)))
        workers = server.workers()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(alive(pid) for pid in workers))
    wait_for(lambda: set(os.listdir("/dev/shm")) <= shared_before)  # other tests have some for a moment


@pytest.mark.full
def test_a_front_that_is_told_to_stop_finishes_and_exits_with_success(world):
    with running(world.store.uri, grace_s=30) as server:
        server.wait_ready()
        workers = server.workers()
        ids = tuple((number % 10,) for number in range(30))
        with answering(server, world.request(*ids)) as response:
            read_frame(response)
            server.process.send_signal(signal.SIGTERM)
            assert isinstance(messages(response)[-1], End)
        assert server.process.wait(timeout=60) == 0
        assert not any(alive(pid) for pid in workers)


def test_a_worker_sees_no_network_and_no_secrets(server):
    info = decode_info(ask(server, "GET", "/v1/info")[2])
    assert "SOME_SECRET" in Path(f"/proc/{server.process.pid}/environ").read_text()
    for worker in map(inner, server.workers()):
        assert "SOME_SECRET" not in Path(f"/proc/{worker}/environ").read_text()
        outside = os.readlink(f"/proc/{worker}/ns/net") == os.readlink("/proc/self/ns/net")
        assert outside is info.worker_network
        # Every thread: some are started while libraries are imported.
        spaces = {os.readlink(task / "ns/net") for task in Path(f"/proc/{worker}/task").iterdir()}
        assert len(spaces) == 1


@pytest.mark.full
def test_a_restarted_server_finds_the_program_in_the_store(own):
    request = own.request((0, 1, 2, 3), (4, 5), stop=2)
    answers = []
    for number in range(2):
        with running(own.store.uri) as server:
            server.wait_ready()
            path = f"/v1/programs/{own.program.digest}"
            assert ask(server, "HEAD", path)[0] == (404 if number == 0 else 200)
            if number == 0:
                assert ask(server, "PUT", path, upload(own.program))[0] == 201
            answers.append(run(server, request))
            assert server.stop() == 0
    for first, second in zip(*answers, strict=True):
        same(first, second)


@pytest.mark.full
def test_programs_beyond_the_budget_go_and_come_back(own):
    programs = [own.program, make_program(5)]
    budget = max(len(upload(program)) for program in programs) * 3 // 2
    with running(own.store.uri, program_budget_bytes=budget) as server:
        server.wait_ready()
        for program in programs:
            assert ask(server, "PUT", f"/v1/programs/{program.digest}", upload(program))[0] == 201
        sent = own.here((0, 1, 2, 3), 0)
        for program in programs * 2:
            request = RunRequest(
                micro_batches=((0, 1, 2, 3),), start=0, stop=2, micro_batch=4, program=program.digest
            )
            (got,) = run(server, request, [sent])
            assert torch.equal(got.tensors[0], program.run(sent.tensors, 0, 2)[0])
        # Loaded, they need more memory than their files: unused ones are not kept.
        wait_for(lambda: server.metric("upriver_program_bytes") <= budget)
        assert server.metric("upriver_program_requests_total", 'found="read"') >= 3


@pytest.mark.full
def test_a_reader_that_stalls_holds_back_the_work_and_others_are_told_to_come_back(tmp_path):
    """Answers are 64 times 4 MB: the work computed ahead is bounded, and so are the admitted requests."""
    rng = np.random.default_rng(0)
    files = {f"a/{row}.npy": npy(rng.random((1 << 20,), dtype=np.float32)) for row in range(4)}
    dataset = index(write(tmp_path, files), stages=[LoadTensor("npy")])
    dataset.publish()
    request = RunRequest(
        micro_batches=tuple((number % 4,) for number in range(64)),
        start=-1,
        stop=-1,
        micro_batch=1,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    with running(dataset.store.uri, max_requests=1, stall_timeout_s=600) as server:
        server.wait_ready()
        with answering(server, request):
            wait_for(lambda: server.metric("upriver_micro_batches_total") >= 1)
            settled = settle(lambda: server.metric("upriver_bytes_out_total"))
            assert settled < 40e6  # the kernel's buffers, and at most a few answers
            assert server.metric("upriver_micro_batches_total") < 12
            status, headers, body = ask(server, "POST", "/v1/run", body_of(request))
            assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
            assert int(headers["retry-after"]) >= 1
            assert ask(server, "GET", "/livez")[0] == 200
        # The client has left: its place is free again, and the rest of its work is not done.
        wait_for(lambda: server.metric("upriver_running_requests") == 0)
        assert server.metric("upriver_micro_batches_total") < 16
        assert len(run(server, request)) == 64


def settle(value):
    """Return ``value()`` once it has been the same for a second."""
    while True:
        before = value()
        time.sleep(1)
        if value() == before:
            return before


@pytest.mark.full
def test_a_reader_that_stalls_too_long_is_dropped(tmp_path):
    files = {"a/0.npy": npy(np.zeros(1 << 20, dtype=np.float32))}
    dataset = index(write(tmp_path, files), stages=[LoadTensor("npy")])
    dataset.publish()
    request = RunRequest(
        micro_batches=((0,),) * 32,
        start=-1,
        stop=-1,
        micro_batch=1,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    with running(dataset.store.uri, stall_timeout_s=0.5) as server:
        server.wait_ready()
        with answering(server, request):
            wait_for(lambda: server.metric("upriver_micro_batches_total") >= 1)
            wait_for(lambda: server.metric("upriver_running_requests") == 0)
        assert server.metric("upriver_micro_batches_total") < 32
        host, _, port = server.address.partition(":")
        with socket.create_connection((host, int(port))) as raw:  # a client that sends no whole request
            raw.sendall(f"POST /v1/run HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99\r\n\r\nUPRV".encode())
            assert raw.recv(12) == b"HTTP/1.1 400"
        assert server.metric("upriver_running_requests") == 0


@pytest.mark.full
def test_a_server_that_says_it_listens_can_be_used(world):
    with running(world.store.uri) as server:
        assert ask(server, "GET", "/readyz")[0] == 200
        assert ask(server, "GET", "/v1/info")[0] == 200
        assert len(run(server, world.request((0, 1)))) == 1
