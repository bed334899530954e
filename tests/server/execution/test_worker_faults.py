"""Test workers that die, hang or run out of memory: one job is retried once, and the server survives."""

import os
import resource
import signal
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from tests.pipeline.making import encoded, pixels, write
from tests.server.enclosed import inner, status
from tests.server.running import answering, ask, changed, messages, run, running, wait_for
from tests.server.sandbox.test_cgroup import held, limit
from upriver.errors import Overloaded, WorkerCrashed
from upriver.pipeline import Decode, Resize, index
from upriver.protocol import DatasetRef, End, RunRequest
from upriver.resources import GROUPS
from upriver.server.execution.worker_pool import WHAT_HELPS
from upriver.server.sandbox.cgroup import PREFIX, ControlGroups
from upriver.types import MicroBatch

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def no_groups_are_left():
    """Remove the groups of killed servers, as the next server would."""
    yield
    ControlGroups.find()


def asking(folder, files, *micro_batches, micro_batch):
    """Return a store with a dataset of images, and a request for some of them, scaled down."""
    dataset = index(write(folder, files), stages=[Decode(), Resize(8)])
    dataset.publish()
    request = RunRequest(
        micro_batches=micro_batches,
        start=-2,
        stop=0,
        micro_batch=micro_batch,
        dataset=DatasetRef(store="default", digest=dataset.digest),
    )
    return dataset.store.uri, request


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """Decode 64 times 13 megapixels, long enough to be interrupted in the middle on a busy machine, too."""
    photo = encoded(pixels(3600, 3600))
    return asking(tmp_path_factory.mktemp("busy"), {"a/0.jpg": photo}, (0,) * 64, micro_batch=64)


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """Use one image whose pixels need 250 MB, and whose file is tiny."""
    image = encoded(Image.new("RGB", (6000, 6000), (200, 10, 90)), "PNG")
    return asking(tmp_path_factory.mktemp("heavy"), {"a/0.png": image}, (0,), micro_batch=1)


def worker_of(server):
    """Return the process that computes, of a server with one worker."""
    (found,) = server.wait_workers()
    return inner(found)


def in_the_middle_of_a_job(pid):
    """Wait until a worker that was ready has begun to compute."""

    def seconds():
        return psutil.Process(pid).cpu_times().user

    before = seconds()
    wait_for(lambda: seconds() > before + 0.1)


def restarts(server, reason):
    return server.metric("upriver_worker_restarts_total", f'reason="{reason}"')


def equal(found, wanted):
    assert [batch.ids for batch in found] == [batch.ids for batch in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert all(map(torch.equal, one.tensors, other.tensors))
        assert one.skipped == other.skipped


def batches(found):
    return [message for message in found if isinstance(message, MicroBatch)]


@pytest.mark.full
def test_a_job_whose_worker_is_killed_is_done_again_to_the_bit(busy):
    uri, request = busy
    with running(uri) as server:
        pid = worker_of(server)
        undisturbed = run(server, request)
        with answering(server, request) as response:
            in_the_middle_of_a_job(pid)
            os.kill(pid, signal.SIGKILL)
            found = messages(response)
        assert isinstance(found[-1], End)
        equal(batches(found), undisturbed)
        assert restarts(server, "crash") == server.metric("upriver_worker_restarts_total") == 1


@pytest.mark.full
def test_a_job_that_takes_two_workers_with_it_is_refused_with_its_reason(busy):
    uri, request = busy
    with running(uri) as server:
        server.wait_ready()
        with answering(server, request) as response:
            for number in range(1, 3):
                pid = worker_of(server)
                in_the_middle_of_a_job(pid)
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: server.metric("upriver_worker_restarts_total") == number)  # noqa: B023
                assert ask(server, "GET", "/livez")[0] == 200
            (refusal,) = messages(response)
        assert isinstance(refusal, WorkerCrashed)
        assert "was ended by SIGKILL" in str(refusal) and str(refusal).endswith(WHAT_HELPS)
        assert server.metric("upriver_errors_total", 'code="worker_crashed"') == 1
        server.wait_ready()
        assert len(run(server, changed(request, micro_batches=((0,) * 2,)))) == 1
        assert server.metric("upriver_worker_restarts_total") == 2


@pytest.mark.full
def test_a_server_without_a_worker_refuses_what_would_wait_for_one_that_may_die_soon(busy):
    """Its clients use another server, or compute locally."""
    uri, request = busy
    request = changed(request, micro_batches=((0,) * 2,))
    with running(uri) as server:
        undisturbed = run(server, request)
        for number in range(1, 3):
            os.kill(worker_of(server), signal.SIGKILL)
            wait_for(lambda: server.metric("upriver_worker_restarts_total") == number)  # noqa: B023
        with pytest.raises(
            Overloaded, match=r"no worker is here to do this .*was ended by SIGKILL"
        ) as refusal:
            run(server, request)
        assert refusal.value.retry_after_s > 0
        equal(run(server.wait_ready(), request), undisturbed)


@pytest.mark.full
def test_a_worker_that_hangs_is_ended_and_its_job_done_again(busy):
    """A new worker has to be ready within the time of a job: hence a long one."""
    uri, request = busy
    request = changed(request, micro_batches=((0,),))
    with running(uri, job_timeout_s=60) as server:
        undisturbed = run(server, request)
        pid = worker_of(server)
        os.kill(pid, signal.SIGSTOP)
        equal(run(server, request), undisturbed)
        assert restarts(server, "timeout") == server.metric("upriver_worker_restarts_total") == 1
        wait_for(lambda: not psutil.pid_exists(pid))


@pytest.mark.full
def test_a_job_that_reaches_its_workers_limit_is_an_error_and_no_crash(heavy):
    uri, request = heavy
    with running(uri, memory_budget_bytes=2 << 30) as server:
        pid = worker_of(server)
        undisturbed = run(server, request)
        soft, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        assert soft == hard > 2 << 30
        taken = int(status(pid, "VmData").split()[0]) << 10
        resource.prlimit(pid, resource.RLIMIT_DATA, (taken + 8 * MIB, hard))
        with pytest.raises(Overloaded, match="ran out of memory"):
            run(server, request)
        resource.prlimit(pid, resource.RLIMIT_DATA, (hard, hard))
        equal(run(server, request), undisturbed)
        assert server.metric("upriver_worker_restarts_total") == 0
        assert worker_of(server) == pid


def group_of(pid):
    """Return the folder of a worker's own control group."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if path.rpartition("/")[2].startswith(f"{PREFIX}-"):
            return GROUPS / ("memory" if controllers else "") / path.lstrip("/")
    pytest.skip("a server may make no control groups with a memory limit here")


@pytest.mark.full
def test_a_worker_that_runs_out_of_memory_is_replaced_and_its_job_done_again(heavy):
    uri, request = heavy
    with running(uri) as server:
        undisturbed = run(server, request)
        folder = group_of(worker_of(server))
        limit(folder, held(folder) + 32 * MIB)
        equal(run(server, request), undisturbed)
        assert restarts(server, "memory") == server.metric("upriver_worker_restarts_total") == 1
        assert group_of(worker_of(server)) != folder
        wait_for(lambda: not folder.exists())
        assert server.stop() == 0


@pytest.mark.full
def test_a_job_that_runs_out_of_memory_twice_is_refused_with_its_reason(heavy):
    """The second worker has its group, and so its limit, a second and more before it is ready."""
    uri, request = heavy
    with running(uri) as server:
        first = group_of(worker_of(server))
        most = held(first) + 96 * MIB
        limit(first, most)
        with answering(server, request) as response:
            limit(wait_for(lambda: next(groups_beside(first), None)), most)
            (refusal,) = messages(response)
        assert isinstance(refusal, WorkerCrashed)
        assert "it ran out of memory" in str(refusal)
        assert restarts(server, "memory") == server.metric("upriver_worker_restarts_total") == 2
        server.wait_ready()
        assert len(run(server, request)) == 1


def groups_beside(folder):
    """Return other groups of the same front."""
    same_front = folder.name.rpartition("-")[0] + "-"
    return (path for path in folder.parent.iterdir() if path.name.startswith(same_front) and path != folder)
