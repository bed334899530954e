"""Test the end of a server: a stopped server fails no request, and a killed server leaves nothing behind."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from tests.pipeline.making import npy, write
from tests.server.enclosed import inner
from tests.server.running import (
    SERVE,
    Running,
    alive,
    answering,
    ask,
    body_of,
    changed,
    connect,
    free_port,
    messages,
    run,
    running,
    wait_for,
)
from upriver.errors import ProtocolError
from upriver.pipeline import LoadTensor, index
from upriver.protocol import DatasetRef, End, RunRequest, read_frame
from upriver.server.sandbox.cgroup import PREFIX, ControlGroups
from upriver.types import MicroBatch

pytestmark = pytest.mark.slow

ANSWERS = 64
"""Answers of 4 MB each: more than the buffers between a server and a client that does not read can hold."""


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Return a store, a request whose answer takes a while to read, and that answer."""
    rng = np.random.default_rng(0)
    arrays = [rng.random((1 << 20,), dtype=np.float32) for _ in range(4)]
    files = {f"a/{row}.npy": npy(array) for row, array in enumerate(arrays)}
    dataset = index(write(tmp_path_factory.mktemp("long"), files), stages=[LoadTensor("npy")])
    dataset.publish()
    request = RunRequest(
        micro_batches=tuple((number % 4,) for number in range(ANSWERS)),
        start=-1,
        stop=-1,
        micro_batch=1,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    return dataset.store.uri, request, [files[f"a/{row}.npy"] for row in range(4)]


def family(server):
    """Return all processes that a server has started, and their descendants."""
    return [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]


def is_free(server):
    """Return whether another server could bind the address."""
    host, _, port = server.address.partition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
    return True


def unready(server):
    """Wait until a server reports that it is not ready for new work; return its reason."""

    def refusal():
        status, headers, body = ask(server, "GET", "/readyz")
        return None if status == 200 else (status, headers, json.loads(body)["error"])

    return wait_for(refusal)


def breaks_off(response):
    """Return whether an answer ends early."""
    try:
        while not isinstance(read_frame(response), End):
            pass
    except (OSError, http.client.HTTPException, ProtocolError):
        return True
    return False


def test_what_runs_is_finished_and_what_comes_is_sent_elsewhere(long):
    uri, request, stored = long
    with running(uri, grace_s=120) as server:
        server.wait_ready()
        processes = family(server)
        new = connect(server)
        new.connect()
        with answering(server, request) as response:  # accepted after the new connection
            found = [read_frame(response)]
            server.process.send_signal(signal.SIGTERM)
            status, headers, error = unready(server)
            new.request("GET", "/readyz")
            assert new.getresponse().status == 503
            new.close()
            assert (status, error["code"]) == (503, "overloaded")
            assert int(headers["retry-after"]) >= 1
            status, headers, body = ask(server, "POST", "/v1/run", body_of(request))
            assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
            assert int(headers["retry-after"]) >= 1
            assert ask(server, "GET", "/livez")[0] == 200
            assert json.loads(ask(server, "GET", "/v1/load")[2])["draining"] is True
            assert server.metric("upriver_draining") == 1
            assert server.process.poll() is None
            found += messages(response)
        assert isinstance(found[-1], End)
        batches = [message for message in found if isinstance(message, MicroBatch)]
        assert [batch.ids for batch in batches] == list(request.micro_batches)
        for batch in batches:
            wanted = torch.frombuffer(bytearray(stored[batch.ids[0]]), dtype=torch.uint8)
            assert torch.equal(batch.tensors[0], wanted)
        assert server.process.wait(timeout=60) == 0
        assert not any(map(alive, processes))
        assert is_free(server)


@pytest.mark.full
def test_a_server_without_work_ends_without_waiting(world):
    with running(world.store.uri, grace_s=600) as server:
        processes = family(server.wait_ready())
        run(server, world.request((0, 1)))
        assert server.stop() == 0
        assert not any(map(alive, processes))
        assert is_free(server)


@pytest.mark.full
def test_signals_to_everybody_end_no_worker(world):
    """A terminal signals a whole group, and a service manager signals all processes of the service."""
    with running(world.store.uri) as server:
        (worker,) = server.wait_ready().workers()
        group = os.getpgid(server.process.pid)
        assert group not in map(os.getpgid, family(server))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(inner(worker), number)
        assert len(run(server, world.request((0, 1)))) == 1
        assert server.metric("upriver_worker_restarts_total") == 0


@pytest.mark.full
def test_a_server_whose_workers_are_starting_can_be_ended(world):
    with running(world.store.uri, workers=3, grace_s=600) as server:
        assert server.stop() == 0


@pytest.mark.full
def test_connections_between_two_requests_are_closed(long):
    uri, request, _ = long
    with running(uri, grace_s=600) as server:
        server.wait_ready()
        idle = connect(server)
        idle.request("GET", "/livez")
        assert idle.getresponse().read() == b"live\n"
        with answering(server, request) as response:
            read_frame(response)
            server.process.send_signal(signal.SIGTERM)
            assert idle.sock.recv(1) == b""
            assert isinstance(messages(response)[-1], End)
            idle.close()
        assert server.process.wait(timeout=60) == 0


@pytest.mark.full
def test_a_connection_with_a_request_is_closed_when_that_is_answered(long):
    """A client could reuse an open connection, and so keep the server from ending."""
    uri, request, _ = long
    with running(uri, grace_s=600) as server:
        server.wait_ready()
        with answering(server, request) as response:
            read_frame(response)
            server.process.send_signal(signal.SIGTERM)
            unready(server)
            messages(response)
        assert server.process.wait(timeout=60) == 0


@pytest.mark.full
def test_who_does_not_come_to_an_end_is_cut_off(long):
    uri, request, _ = long
    with running(uri, grace_s=1) as server:
        processes = family(server.wait_ready())
        with answering(server, request) as response:
            read_frame(response)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
            assert not any(map(alive, processes))
            assert breaks_off(response)
        assert is_free(server)


@pytest.mark.parametrize(
    ("second", "codes"),
    [
        (signal.SIGTERM, (0,)),
        pytest.param(signal.SIGINT, (130, -signal.SIGINT), marks=pytest.mark.full),
    ],
    ids=["TERM", "INT"],
)
@pytest.mark.full
def test_a_second_signal_ends_it_at_once(long, second, codes):
    uri, request, _ = long
    with running(uri, grace_s=3600) as server:
        processes = family(server.wait_ready())
        with answering(server, request) as response:
            read_frame(response)
            server.process.send_signal(signal.SIGTERM)
            unready(server)
            server.process.send_signal(second)
            assert server.process.wait(timeout=60) in codes
        wait_for(lambda: not any(map(alive, processes)))
        assert is_free(server)


@pytest.mark.full
def test_a_worker_that_hangs_does_not_keep_a_server(long):
    uri, request, _ = long
    with running(uri, grace_s=1) as server:
        processes = family(server.wait_ready())
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        with answering(server, changed(request, micro_batches=((0,),))):
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
        wait_for(lambda: not any(map(alive, processes)))


HANGS = """
import time
from upriver.server.execution.worker_pool import WorkerPool

async def close(self):
    time.sleep(3600)

WorkerPool.close = close
"""


@pytest.mark.full
def test_what_is_in_the_way_of_the_end_is_left_behind(world):
    """Here the event loop itself is blocked."""
    config = {"stores": {"default": world.store.uri}, "port": 0, "threads": 1, "grace_s": 0}
    command = [sys.executable, "-c", HANGS + SERVE, json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            server = Running(process, json.loads(process.stdout.readline())["listening"])
            processes = family(server)
            assert server.stop() == 0
            wait_for(lambda: not any(map(alive, processes)))
        finally:
            process.kill()


@pytest.mark.full
def test_nothing_is_left_whatever_killed_a_server(long, tmp_path, monkeypatch):
    uri, request, _ = long
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared = set(os.listdir("/dev/shm"))
    with running(uri, workers=2, port=free_port()) as server:
        wait_for(lambda: len(server.workers()) == 2)
        server.wait_ready()
        with answering(server, request) as response:
            read_frame(response)
            processes = family(server)
            assert len(processes) >= 2
            server.process.kill()
            server.process.wait()
            wait_for(lambda: not any(map(alive, processes)))
        assert is_free(server)
        wait_for(lambda: set(os.listdir("/dev/shm")) <= shared)  # other tests have some there for a moment
        assert [path.name for path in tmp_path.iterdir() if "torch" not in path.name] == []
        wait_for(lambda: groups_of(server.process.pid) == [])
        with running(uri, port=int(server.address.rpartition(":")[2])) as again:
            assert len(run(again.wait_ready(), changed(request, micro_batches=((0,),)))) == 1


def groups_of(pid):
    """Return the control groups of a front, once the next front has looked for leftovers."""
    groups = ControlGroups.find()
    if groups is None:
        return []
    return [path.name for path in groups._parent.iterdir() if path.name.startswith(f"{PREFIX}-{pid}-")]
