"""The workers: deal jobs to whichever is free, replace one that died, try its job once more elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

from upriver.engine.clock import Clock
from upriver.errors import ConfigError, Overloaded, UpriverError, WorkerCrashed
from upriver.server.execution.resident_memory import proportional_bytes
from upriver.server.execution.worker_process import BROKE_OFF, Job, Result, WorkerHandle
from upriver.server.ipc.messages import Hello, Run, Setup, StageMeasurements, Weighed
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.observability.load import LoadMeter
from upriver.server.observability.snapshot import WorkerRow, short
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.sandbox.bubblewrap import NOT_SHUT_IN, Enclosure
from upriver.server.scheduling.footprint import StageRange

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""A crash may be another tenant's fault, or chance; twice with the same job it is the job's."""

START_ATTEMPTS = 3
"""Workers that die in a row until none is believed to work here. One may be chance (memory was short), three
are not."""

FIRST_PAUSE_S = 0.1
"""Before a worker is started again that died twice; doubled each time."""

MAX_PAUSE_S = 30.0
"""Longest such pause: starting one takes 2 s of a core, which others may need."""

REST_S = 5.0
"""A worker without a job for so long keeps no memory for the next one. Micro-batches of a job follow one
another sooner."""

SETTLED_S = 60.0
"""A worker that was there for so long did not die of what ended those before it, though it may have done no
job. Longer than any pause between two deaths."""

_T = TypeVar("_T")


class JobResources(Protocol):
    """What is in use as long as a worker has the job."""

    def enter(self) -> None:
        """A worker begins."""

    def leave(self) -> None:
        """It has ended, whatever came of it."""


class WorkerWatch(NamedTuple):
    """How a worker that is there is watched.

    Attributes:
        pidfd: The descriptor that tells of its end.
        since: When it was ready, by the monotonic clock.
    """

    pidfd: int
    since: float


class WorkerPool:
    """Keeps ``count`` workers alive. All methods belong to the event loop's thread.

    Args:
        count: Workers.
        setup: What each is told first.
        job_timeout_s: After that long with one job, a worker is ended.
        enclosure: What each is kept in.
        on_restart: Told of each worker that had to be replaced why: ``crash``, ``memory`` or ``timeout``.
        load: Where workers' time is written down; one of its own if None.

    Attributes:
        load: What the workers spend their time on.
    """

    def __init__(
        self,
        *,
        count: int,
        setup: Setup,
        job_timeout_s: float,
        enclosure: Enclosure = NOT_SHUT_IN,
        on_restart: Callable[[str], None] = lambda reason: None,
        load: LoadMeter | None = None,
    ) -> None:
        self._setup, self._enclosure = setup, enclosure
        self._job_timeout_s = job_timeout_s
        self._on_restart = on_restart
        self._count = count
        self.load = load if load is not None else LoadMeter(count)
        self._idle: asyncio.Queue[WorkerHandle] = asyncio.Queue()
        self._alive: dict[WorkerHandle, WorkerWatch] = {}
        self._resting: dict[WorkerHandle, asyncio.TimerHandle] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="upriver-worker")
        self._closed = False
        self._deaths = 0  # in a row: since a worker last did a job, or was there for long
        self._settled = asyncio.Event()
        self._start_s = 0.0  # of the last worker that started
        self._waiting: set[asyncio.Timeout] = set()
        self._wait_until: float | None = None
        self._failure: ConfigError | None = None
        self.why = "workers are starting"
        """Why there may be none to work; holds nothing of a client's."""
        self.hello: Hello | None = None
        """What the workers said of themselves; None until the first one is ready."""

    def start(self) -> None:
        """Start all workers, and do not wait for them."""
        for _ in range(self._count):
            self._start_one()

    async def first(self) -> None:
        """Wait for the first worker.

        Raises:
            ConfigError: If none can start here; none is tried any more then.
        """
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def ready(self) -> bool:
        """Whether work is done here: there is a worker, or another one soon in place of one that is gone."""
        if self.hello is None or self._alive:
            return self.hello is not None
        return self._wait_until is not None and time.monotonic() < self._wait_until

    async def run(self, job: Job, clock: Clock, use: JobResources | None = None) -> Result:
        """Do one job; what it waits for a worker counts as ``queue``.

        Args:
            use: Entered while a worker has the job, which may be longer than anyone waits for it.

        Raises:
            WorkerCrashed: If it took `ATTEMPTS` workers with it, or one and there is no other.
            Overloaded: If there is no worker, and none soon.
            UpriverError: If it cannot be done.
        """

        def run(worker: WorkerHandle) -> tuple[int, Result]:
            return worker.pid, worker.run(job)

        pid, result = await self._on_worker(run, clock, use)
        if job.program is not None and isinstance(job.run, Run):
            self.load.saw(pid, (job.program.digest, job.run.micro_batch), result.timings.stages)
        return result

    async def weigh(self, graph: SealedFile, stretch: StageRange, use: JobResources | None = None) -> Weighed:
        """What a stretch of a program takes, worked out from its graph.

        Args:
            use: As for `run`.

        Raises:
            WorkerCrashed: If it took `ATTEMPTS` workers with it.
            UpriverError: If the graph is not sound, or has no such stages.
        """
        return await self._on_worker(lambda worker: worker.weigh(graph, stretch), Clock(), use)

    async def measure(
        self, program: ProgramFiles, *, stop: int | None, use: JobResources | None = None
    ) -> StageMeasurements:
        """Run a program's stages [0, stop) once on made-up inputs.

        Args:
            use: As for `run`.

        Raises:
            WorkerCrashed: If it took `ATTEMPTS` workers with it.
            UpriverError: If it cannot be done.
        """

        def measure(worker: WorkerHandle) -> tuple[int, StageMeasurements]:
            return worker.pid, worker.measure(program, stop=stop)

        pid, measured = await self._on_worker(measure, Clock(), use)
        self.load.saw(pid, (program.digest, measured.micro_batch), dict(enumerate(measured.seconds, start=1)))
        return measured

    async def check(self, program: ProgramFiles, use: JobResources | None = None) -> bytes:
        """Have a worker load a program, which checks everything about it; what is to lie beside its weights.

        Args:
            use: As for `run`.

        Raises:
            UpriverError: If it is not sound.
        """
        return await self._on_worker(lambda worker: worker.check(program), Clock(), use)

    def rows(self) -> tuple[WorkerRow, ...]:
        """Each worker at this moment, those that are being started last."""
        now = time.monotonic()
        there = [
            WorkerRow(
                pid=worker.pid,
                state="busy" if worker.busy_since is not None else "idle",
                program=short(worker.program),
                seconds=now - worker.busy_since if worker.busy_since is not None else 0.0,
                restarts=worker.restarts,
            )
            for worker in self._alive
        ]
        return (*there, *(WorkerRow(pid=0, state="starting") for _ in self._starting))

    def used_bytes(self) -> int:
        """What the workers' processes take now, each page once; takes some ms a worker, in any thread."""
        return sum(proportional_bytes(worker.pid) for worker in tuple(self._alive))

    def forget(self, key: str) -> None:
        """A program is not kept any more: workers that are busy let go of it when they are through."""
        for worker in self._alive:
            worker.forget(key)
            if worker.busy_since is None:
                _tidy(worker)

    async def close(self) -> None:
        """End all workers now."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        for worker in list(self._alive):
            self._lose(worker)
            worker.kill()
        while not self._idle.empty():  # one that died while it was idle is still here
            self._idle.get_nowait().kill()
        await asyncio.gather(*self._starting, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._enclosure.groups is not None:
            self._enclosure.groups.close()

    async def _on_worker(
        self, work: Callable[[WorkerHandle], _T], clock: Clock, use: JobResources | None = None
    ) -> _T:
        reason: _Died | None = None
        for _ in range(ATTEMPTS):
            try:
                with clock.phase("queue"), self.load.waiting():
                    worker = await self._take()
            except Overloaded:
                if reason is None:
                    raise
                raise WorkerCrashed(f"a worker died of this micro-batch, the last one: {reason}") from None
            # Shielded: a thread cannot be stopped, and the worker is free only when it is done.
            task = asyncio.ensure_future(self._call(worker, work))
            if use is not None:
                use.enter()
                task.add_done_callback(lambda _: use.leave())
            task.add_done_callback(_ignore_outcome)
            try:
                return await asyncio.shield(task)
            except _Died as error:
                reason = error
        raise WorkerCrashed(f"{ATTEMPTS} workers died of this micro-batch, one after the other: {reason}")

    async def _call(self, worker: WorkerHandle, work: Callable[[WorkerHandle], _T]) -> _T:
        self.load.began(worker.pid)
        self._wake(worker)
        worker.busy_since = time.monotonic()
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, work, worker)
        except UpriverError:
            self._put_back(worker)
            raise
        except OSError as error:
            how = str(error) if isinstance(error, TimeoutError) else worker.ending()
            self._bury(worker, error)
            raise _Died(how or type(error).__name__) from None
        except BaseException as error:  # nobody knows what state it is in
            self._bury(worker, error)
            raise
        self._put_back(worker)
        return result

    def _put_back(self, worker: WorkerHandle) -> None:
        """It has done a job, so workers can work here."""
        self._deaths = 0
        self.load.ended(worker.pid)
        worker.busy_since, worker.program = None, ""
        _tidy(worker)
        self._resting[worker] = asyncio.get_running_loop().call_later(REST_S, self._rest, worker)
        self._idle.put_nowait(worker)

    def _rest(self, worker: WorkerHandle) -> None:
        del self._resting[worker]
        worker.rest()

    def _wake(self, worker: WorkerHandle) -> None:
        resting = self._resting.pop(worker, None)
        if resting is not None:
            resting.cancel()

    async def _take(self) -> WorkerHandle:
        """Wait for a worker, first come first served; whoever gives up waiting goes by being cancelled.

        Raises:
            Overloaded: If there is none, and none soon: others can do the job, or the client itself.
        """
        while True:
            worker = await self._next_idle() if self._idle.empty() else self._idle.get_nowait()
            if worker in self._alive:
                return worker
            worker.kill()  # it died while it was idle, and was replaced then

    async def _next_idle(self) -> WorkerHandle:
        try:
            async with asyncio.timeout_at(self._wait_until) as limit:
                self._waiting.add(limit)
                try:
                    return await self._idle.get()
                finally:
                    self._waiting.discard(limit)
        except TimeoutError:
            raise Overloaded(
                f"no worker is here to do this ({self.why})", retry_after_s=self._start_s
            ) from None

    def _wait(self, until: float | None) -> None:
        """Let jobs wait for a worker until then, by the monotonic clock; for ever if None."""
        self._wait_until = until
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(until)

    def _bury(self, worker: WorkerHandle, error: BaseException) -> None:
        late = isinstance(error, TimeoutError)
        self._lose(worker, f"failed ({str(error) or type(error).__name__})", late=late)
        worker.kill()

    def _lose(self, worker: WorkerHandle, reason: str = "", *, late: bool = False) -> None:
        """Count on it no more, and start another in its place; once, whoever notices first.

        Its channel stays open: a thread may still be reading the end of it.
        """
        watch = self._alive.pop(worker, None)
        if watch is None:
            return
        self.load.gone(worker.pid)
        self._wake(worker)
        asyncio.get_running_loop().remove_reader(watch.pidfd)
        os.close(watch.pidfd)
        ending = worker.ending()
        if not self._closed:
            how = reason if reason and ending == BROKE_OFF else ending  # what it died of, where that is known
            log.warning("worker %d is gone: it %s; starting another", worker.pid, how)
            self.why = f"the last worker {ending}; another is being started"
            settled = time.monotonic() - watch.since >= SETTLED_S
            self._deaths = 1 if settled else self._deaths + 1
            if not self._alive:
                # Twice what the last start took, or a second, for a busy machine. The next one after one that
                # died soon may die soon, too: jobs are better off elsewhere meanwhile.
                patience_s = max(2 * self._start_s, 1.0) if settled or not worker.restarts else 0.0
                self._wait(time.monotonic() + patience_s)
            self._on_restart("timeout" if late else "memory" if worker.out_of_memory else "crash")
            self._start_one(restarts=worker.restarts + 1)

    def _start_one(self, *, restarts: int = 0) -> None:
        task = asyncio.get_running_loop().create_task(self._bring_up(restarts))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _bring_up(self, restarts: int) -> None:
        while not self._closed and self._failure is None:
            await asyncio.sleep(pause_s(self._deaths))
            if await self._tried(restarts):
                return

    async def _tried(self, restarts: int) -> bool:
        """Start one worker; whether that worked."""
        began = time.monotonic()
        try:
            worker = WorkerHandle.start(threads=self._setup.threads, enclosure=self._enclosure)
        except (OSError, RuntimeError) as error:  # no process, or no thread to read what it prints
            self._not_started(str(error))
            return False
        worker.restarts = restarts
        try:
            hello = await asyncio.to_thread(
                worker.shake_hands, self._setup, job_timeout_s=self._job_timeout_s
            )
            self._start_s = time.monotonic() - began
            self._welcome(worker, hello)
        except (OSError, RuntimeError, UpriverError) as error:  # RuntimeError: no thread to wait in
            worker.kill()
            self._not_started(str(error) or type(error).__name__)
            return False
        except BaseException:
            worker.kill()
            raise
        return True

    def _not_started(self, reason: str) -> None:
        self._deaths += 1
        self.why = f"the last worker did not start: {reason}"
        if self.hello is not None:
            log.warning("a worker did not start: %s", reason)
            if not self._alive:
                self._wait(time.monotonic())
        elif self._deaths >= START_ATTEMPTS and self._failure is None:
            self._failure = ConfigError(f"no worker can start here, {self._deaths} were tried: {reason}")
            self._settled.set()

    def _welcome(self, worker: WorkerHandle, hello: Hello) -> None:
        """Count on it from here on.

        Raises:
            OSError: If its end could not be noticed; nothing has changed then.
        """
        if self._closed:
            worker.kill()
            return
        self._alive[worker] = WorkerWatch(pidfd=self._watch(worker), since=time.monotonic())
        if self.hello is None and hello.network and not self._enclosure.own_code:
            log.warning("workers cannot be cut off from the network here: neither root nor user namespaces")
        if self.hello is None and self._enclosure.sandbox.warning:
            log.warning("%s", self._enclosure.sandbox.warning)
        self.hello = hello
        self._settled.set()
        self._wait(None)
        self.load.came(worker.pid)
        self._idle.put_nowait(worker)

    def _watch(self, worker: WorkerHandle) -> int:
        """Have the loop lose the worker when its process ends; the descriptor that tells of it.

        Raises:
            OSError: If there can be none: too many are open, or it is not permitted here.
        """
        try:
            pidfd = os.pidfd_open(worker.pid)
        except OSError as error:
            raise OSError(f"its end could not be noticed: pidfd_open: {error.strerror}") from None
        try:
            asyncio.get_running_loop().add_reader(pidfd, self._lose, worker)
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd


def pause_s(deaths: int) -> float:
    """How long to wait before a worker is started, after so many deaths in a row; half of it by chance."""
    if deaths < 2:
        return 0.0
    longest = min(FIRST_PAUSE_S * 2.0 ** min(deaths - 2, 20), MAX_PAUSE_S)
    return longest * random.uniform(0.5, 1.0)


class _Died(Exception):
    """A worker is gone; its job may be tried again."""


def _tidy(worker: WorkerHandle) -> None:
    """No thread is at it now, and what it lets go of was given back already."""
    with suppress(OSError):  # it is gone, which is noticed elsewhere
        worker.tidy()


def _ignore_outcome(task: asyncio.Task[_T]) -> None:
    """Whoever waited may have gone: then nobody asks for the outcome, and asyncio would complain."""
    with suppress(asyncio.CancelledError):
        task.exception()
