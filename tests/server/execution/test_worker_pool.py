"""Test the pool alone; idle processes take the place of its workers."""

import asyncio
import os
import signal
import subprocess
import threading
from contextlib import asynccontextmanager

import pytest

from tests.server.conftest import make_program
from tests.server.http.test_limits import upload
from upriver.errors import ConfigError, Overloaded, UpriverError, WorkerCrashed
from upriver.protocol import DEFAULT_CAPS
from upriver.server.app import Front
from upriver.server.config import ServerConfig
from upriver.server.execution import worker_pool as pools
from upriver.server.execution.worker_pool import START_ATTEMPTS, WHAT_HELPS, WorkerPool
from upriver.server.execution.worker_process import BROKE_OFF
from upriver.server.ipc.messages import Hello, Setup, Weighed
from upriver.server.tenants import ANYONE

SETUP = Setup(threads=1, device="cpu", caps=DEFAULT_CAPS, memory_bytes=1 << 30)


class Scene:
    """State of the started workers.

    Attributes:
        gate: While it is closed, no worker is ready.
        broken: No worker is ever ready.
        loading: Set when a worker begins to load a program.
        may_load: The worker waits for this event before it loads.
    """

    def __init__(self):
        self.gate, self.loading, self.may_load = (threading.Event() for _ in range(3))
        self.gate.set()
        self.broken = False

    def start(self, *, threads, enclosure):
        return Idle(self)


class Idle:
    """Worker that does nothing."""

    restarts, busy_since, program, out_of_memory = 0, None, "", False

    def __init__(self, scene):
        self._scene = scene
        self._process = subprocess.Popen(["sleep", "600"])
        self.pid = self._process.pid

    def shake_hands(self, setup, *, job_timeout_s):
        assert self._scene.gate.wait(60)
        if self._scene.broken:
            raise UpriverError("it is broken")
        return Hello(fingerprint={}, network=False)

    def weigh(self, graph, stretch):
        return Weighed(peak_bytes=0, out_bytes=0, constant_bytes=0, rows=True)

    def check(self, program):
        self._scene.loading.set()
        assert self._scene.may_load.wait(60)
        return b""

    def forget(self, key):
        pass

    def ending(self):
        return BROKE_OFF if self._process.poll() is None else "was ended"

    def tidy(self):
        pass

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture
def scene(monkeypatch):
    scene = Scene()
    monkeypatch.setattr(pools, "WorkerHandle", scene)
    return scene


@asynccontextmanager
async def open_pool(count=1):
    pool = WorkerPool(count=count, setup=SETUP, job_timeout_s=60, on_restart=lambda reason: None)
    pool.start()
    try:
        await pool.first()
        yield pool
    finally:
        await pool.close()


async def until(condition):
    """Wait until ``condition()`` is true; return its value."""
    async with asyncio.timeout(60):
        while not (found := condition()):
            await asyncio.sleep(0.01)
    return found


def idle(pool):
    """Return the process numbers of the current workers."""
    return [row.pid for row in pool.rows() if row.pid]


async def lose_one(pool):
    """Kill a worker, and wait until the pool has noticed its end."""
    (pid,) = await until(lambda: idle(pool))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid not in idle(pool))


def test_a_pool_is_ready_while_its_only_worker_is_replaced(scene):
    async def replace():
        async with open_pool() as pool:
            scene.gate.clear()
            await lose_one(pool)
            try:
                assert (idle(pool), pool.ready) == ([], True)
            finally:
                scene.gate.set()
            await until(lambda: idle(pool))
            assert pool.ready

    asyncio.run(replace())


def test_a_pool_without_a_thread_for_a_worker_gives_up(monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    async def begin():
        pool = WorkerPool(count=1, setup=SETUP, job_timeout_s=60)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            pool.start()
            with pytest.raises(ConfigError, match=r"no worker can start here, .* can't start new thread"):
                await asyncio.wait_for(pool.first(), 60)
        await pool.close()

    asyncio.run(begin())


def test_a_pool_is_not_ready_before_its_first_worker_nor_when_none_can_be_had_any_more(scene):
    async def break_down():
        scene.gate.clear()
        pool = WorkerPool(count=1, setup=SETUP, job_timeout_s=60)
        pool.start()
        assert not pool.ready
        scene.gate.set()
        await pool.first()
        scene.broken = True
        await lose_one(pool)
        await until(lambda: not pool.ready)
        assert (idle(pool), pool.why) == ([], "the last worker did not start: it is broken")
        scene.broken = False
        await until(lambda: pool.ready)
        assert len(idle(pool)) == 1
        await pool.close()

    asyncio.run(break_down())


@pytest.mark.parametrize(("settled_s", "ready"), [(0.0, True), (3600.0, False)])
def test_only_workers_that_die_soon_make_a_pool_unready(scene, monkeypatch, settled_s, ready):
    """Each worker lived for more than 0 s and less than an hour, and had no job."""
    monkeypatch.setattr(pools, "SETTLED_S", settled_s)

    async def die_again_and_again():
        async with open_pool() as pool:
            for _ in range(START_ATTEMPTS - 1):
                await lose_one(pool)
            await until(lambda: idle(pool))
            scene.gate.clear()
            await lose_one(pool)
            try:
                assert pool.ready is ready
            finally:
                scene.gate.set()

    asyncio.run(die_again_and_again())


def asked(pool):
    """Start a job that waits for a worker."""
    return asyncio.create_task(pool.weigh(None, None))


async def refusal(job):
    with pytest.raises(UpriverError) as found:
        async with asyncio.timeout(60):
            await job
    return found.value


@pytest.mark.parametrize("settled_s", [0.0, 3600.0])
def test_a_job_waits_for_the_worker_that_replaces_the_first_or_a_settled_one(scene, monkeypatch, settled_s):
    monkeypatch.setattr(pools, "SETTLED_S", settled_s)

    async def replace():
        async with open_pool() as pool:
            for _ in range(1 if settled_s else 3):
                pool._start_s = 60.0  # as where a start takes long
                scene.gate.clear()
                await lose_one(pool)
                job = asked(pool)
                await asyncio.sleep(0.1)
                assert not job.done()
                scene.gate.set()
                assert isinstance(await job, Weighed)

    asyncio.run(replace())


def test_jobs_are_refused_as_soon_as_a_worker_that_replaced_another_dies(scene):
    async def die_again():
        async with open_pool() as pool:
            await lose_one(pool)
            await until(lambda: idle(pool))
            scene.gate.clear()
            pool._start_s = 60.0
            await lose_one(pool)
            try:
                found = await refusal(asked(pool))
                assert isinstance(found, Overloaded) and found.retry_after_s == 60.0
                assert str(found) == f"no worker is here to do this ({pool.why})"
                assert "another is being started" in pool.why
            finally:
                scene.gate.set()
            await until(lambda: idle(pool))
            assert isinstance(await asked(pool), Weighed)

    asyncio.run(die_again())


def test_a_job_that_waits_is_refused_when_the_worker_to_come_does_not_start(scene):
    async def break_down():
        async with open_pool() as pool:
            scene.gate.clear()
            scene.broken = True
            pool._start_s = 3600.0
            await lose_one(pool)
            job = asked(pool)
            await asyncio.sleep(0.1)
            assert not job.done()
            scene.gate.set()
            found = await refusal(job)
            assert isinstance(found, Overloaded) and "did not start: it is broken" in str(found)
            scene.broken = False
            await until(lambda: idle(pool))
            assert isinstance(await asked(pool), Weighed)

    asyncio.run(break_down())


def test_a_job_waits_for_a_worker_for_twice_what_the_last_one_took_to_start(scene):
    async def hang():
        async with open_pool() as pool:
            scene.gate.clear()
            pool._start_s = 0.05
            await lose_one(pool)
            try:
                assert isinstance(await refusal(asked(pool)), Overloaded)
            finally:
                scene.gate.set()
            await until(lambda: idle(pool))
            assert pool._start_s > 0.1, "it was counted again"

    asyncio.run(hang())


def test_a_job_that_took_the_last_worker_with_it_is_to_blame(scene, monkeypatch):
    def die(worker, graph, stretch):
        worker.kill()
        raise ConnectionResetError("gone")

    monkeypatch.setattr(Idle, "weigh", die)

    async def kill():
        async with open_pool() as pool:
            await lose_one(pool)
            await until(lambda: idle(pool))
            scene.gate.clear()
            try:
                found = await refusal(asked(pool))
            finally:
                scene.gate.set()
            assert isinstance(found, WorkerCrashed)
            assert str(found).startswith("a worker died of this micro-batch, the last one: ")
            assert str(found).endswith(f"; {WHAT_HELPS}")

    asyncio.run(kill())


def test_an_upload_that_is_given_up_holds_its_memory_until_the_worker_is_done_with_it(scene):
    program = make_program(6)
    body = upload(program)

    async def chunks():
        yield body

    async def give_up():
        front = Front(ServerConfig(stores={"default": "memory://given-up"}, threads=1, sandbox="none"))
        (unit,) = front.units
        front.units.start()
        try:
            await until(lambda: front.units.ready)
            before = unit.budget.reserved_bytes
            sending = asyncio.create_task(front._receive(chunks(), ANYONE, program.digest, len(body)))
            await until(scene.loading.is_set)
            sending.cancel()
            await asyncio.wait([sending])
            assert unit.budget.reserved_bytes >= before + len(body)
            scene.may_load.set()
            await until(lambda: unit.budget.reserved_bytes == before)
            assert program.digest not in "".join(unit.program_cache.keys)
        finally:
            scene.may_load.set()
            await front.units.close()
            front.audit.close()

    asyncio.run(give_up())
