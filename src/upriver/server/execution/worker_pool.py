"""Deal jobs to idle workers, replace a dead worker, and retry its job once on another worker."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

from upriver.engine.clock import Clock
from upriver.errors import ConfigError, Overloaded, UpriverError, WorkerCrashed
from upriver.retry import Backoff
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
"""Workers that may die of one job. One crash may be another tenant's fault or chance; two are the job's."""

WHAT_HELPS = (
    "a smaller micro-batch takes less memory and less time; the server's log has what the workers printed"
)
"""End of an error text about a job that workers died of."""

START_ATTEMPTS = 3
"""Workers that may die in a row before the server reports that none can start here. One death may be chance
(memory was short), three are not."""

RESTARTS = Backoff(base_s=0.1, cap_s=30.0)
"""Pauses before restarts. A start takes 2 s of a core, which others may need."""

REST_S = 5.0
"""Idle time after which a worker frees the memory that it keeps for the next job. The micro-batches of a job
follow one another sooner."""

SETTLED_S = 60.0
"""Lifetime after which a death counts as the first one, even if the worker did no job. It is longer than any
pause between two deaths."""

_T = TypeVar("_T")


class JobResources(Protocol):
    """Track resources that are in use while a worker has the job."""

    def enter(self) -> None:
        """Record that a worker begins."""

    def leave(self) -> None:
        """Record that the worker ended, with success or without."""


class WorkerWatch(NamedTuple):
    """Watch a live worker.

    Attributes:
        pidfd: Descriptor that becomes readable when the process ends.
        since: Monotonic time at which the worker became ready.
    """

    pidfd: int
    since: float


class WorkerPool:
    """Keep ``count`` workers alive. All methods belong to the event loop's thread.

    Args:
        setup: First message to each worker.
        job_timeout_s: Seconds after which a worker that is still at one job is ended.
        on_restart: Called for each replaced worker with the reason: ``crash``, ``memory`` or ``timeout``.
        load: Meter of the workers' time; a new one if None.
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
        self._deaths = 0  # in a row: since a worker last did a job, or lived for `SETTLED_S`
        self._settled = asyncio.Event()
        self._start_s = 0.0  # of the last worker that started
        self._waiting: set[asyncio.Timeout] = set()
        self._wait_until: float | None = None
        self._failure: ConfigError | None = None
        self.why = "workers are starting"
        """Reason why no worker may be available; contains no data of a client."""
        self.hello: Hello | None = None
        """First message of a worker; None until the first worker is ready."""

    def start(self) -> None:
        """Start all workers without waiting for them."""
        for _ in range(self._count):
            self._start_one()

    async def first(self) -> None:
        """Wait for the first worker.

        Raises:
            ConfigError: If no worker can start here. The pool then stops trying.
        """
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def ready(self) -> bool:
        """Return whether jobs are accepted: a worker is alive, or a replacement is due soon."""
        if self.hello is None or self._alive:
            return self.hello is not None
        return self._wait_until is not None and time.monotonic() < self._wait_until

    async def run(self, job: Job, clock: Clock, use: JobResources | None = None) -> Result:
        """Run one job. The wait for a worker counts as ``queue``.

        Args:
            use: Entered while a worker has the job, which may be longer than the caller waits.

        Raises:
            WorkerCrashed: If the job killed `ATTEMPTS` workers, or one and there is no other.
            Overloaded: If no worker is available now or soon.
        """

        def run(worker: WorkerHandle) -> tuple[WorkerHandle, Result]:
            return worker, worker.run(job)

        worker, result = await self._on_worker(run, clock, use)
        if job.program is not None and isinstance(job.run, Run):
            self._saw(worker, job.program, job.run.micro_batch, result.timings.stages)
        return result

    async def weigh(self, graph: SealedFile, stretch: StageRange, use: JobResources | None = None) -> Weighed:
        """Return the footprint of a stage range, computed from its program's graph; see `run`.

        Raises:
            UpriverError: If the graph is invalid, or has no such stages.
        """
        return await self._on_worker(lambda worker: worker.weigh(graph, stretch), Clock(), use)

    async def measure(
        self, program: ProgramFiles, *, stop: int | None, use: JobResources | None = None
    ) -> StageMeasurements:
        """Run a program's stages [0, stop) once on made-up inputs; see `run`."""

        def measure(worker: WorkerHandle) -> tuple[WorkerHandle, StageMeasurements]:
            return worker, worker.measure(program, stop=stop)

        worker, measured = await self._on_worker(measure, Clock(), use)
        stages = dict(enumerate(measured.seconds, start=1))
        self._saw(worker, program, measured.micro_batch, stages)
        return measured

    def _saw(
        self, worker: WorkerHandle, program: ProgramFiles, micro_batch: int, stages: Mapping[int, float]
    ) -> None:
        predicted_s = worker.predicted_s(program.key, micro_batch)
        self.load.saw(worker.pid, (program.digest, micro_batch), stages, predicted_s)

    async def check(self, program: ProgramFiles, use: JobResources | None = None) -> bytes:
        """Load a program into a worker, which checks it; return the manifest to store with its weights.

        See `run` for ``use`` and further errors.

        Raises:
            UpriverError: If the program is invalid.
        """
        return await self._on_worker(lambda worker: worker.check(program), Clock(), use)

    def rows(self) -> tuple[WorkerRow, ...]:
        """Return a row for each worker now; workers that are being started come last."""
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
        """Return the bytes of the workers' processes, each page counted once.

        Callable from any thread; takes some milliseconds a worker.
        """
        return sum(proportional_bytes(worker.pid) for worker in tuple(self._alive))

    def forget(self, key: str) -> None:
        """Unload an evicted program from all workers; busy workers do so after their job."""
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
        while not self._idle.empty():  # a worker that died while it was idle is still in the queue
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
                raise WorkerCrashed(
                    f"a worker died of this micro-batch, the last one: {reason}; {WHAT_HELPS}"
                ) from None
            # Shielded: a thread cannot be stopped, and the worker is free only when the thread is done.
            task = asyncio.ensure_future(self._call(worker, work))
            if use is not None:
                use.enter()
                task.add_done_callback(lambda _: use.leave())
            task.add_done_callback(_ignore_outcome)
            try:
                return await asyncio.shield(task)
            except _Died as error:
                reason = error
        raise WorkerCrashed(
            f"{ATTEMPTS} workers died of this micro-batch, one after the other: {reason}; {WHAT_HELPS}"
        )

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
        except BaseException as error:  # the worker's state is unknown
            self._bury(worker, error)
            raise
        self._put_back(worker)
        return result

    def _put_back(self, worker: WorkerHandle) -> None:
        """Return a worker to the idle queue; reset the deaths, since it completed a job."""
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
        """Return the next idle worker, first come, first served. A caller stops waiting by cancellation.

        Raises:
            Overloaded: If no worker is available now or soon: other servers, or the client, can do the job.
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
        """Let jobs wait for a worker until this monotonic time; forever if None."""
        self._wait_until = until
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(until)

    def _bury(self, worker: WorkerHandle, error: BaseException) -> None:
        late = isinstance(error, TimeoutError)
        self._lose(worker, f"failed ({str(error) or type(error).__name__})", late=late)
        worker.kill()

    def _lose(self, worker: WorkerHandle, reason: str = "", *, late: bool = False) -> None:
        """Remove a worker and start another in its place; only the first call has an effect.

        The channel stays open: a thread may still read the end of its stream.
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
            how = reason if reason and ending == BROKE_OFF else ending  # the cause of death, if known
            log.warning("worker %d is gone: it %s; starting another", worker.pid, how)
            self.why = f"the last worker {ending}; another is being started"
            settled = time.monotonic() - watch.since >= SETTLED_S
            self._deaths = 1 if settled else self._deaths + 1
            if not self._alive:
                # Twice what the last start took, or a second on a busy machine. If a worker died soon after
                # its start, the next one may do so too: jobs are better off elsewhere meanwhile.
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
            await asyncio.sleep(RESTARTS.pause_s(self._deaths))
            if await self._tried(restarts):
                return

    async def _tried(self, restarts: int) -> bool:
        """Start one worker; return whether it started."""
        began = time.monotonic()
        try:
            worker = WorkerHandle.start(threads=self._setup.threads, enclosure=self._enclosure)
        except (OSError, UpriverError) as error:  # no process, or no thread to read its output
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
        """Add a ready worker to the pool.

        Raises:
            OSError: If the worker's end cannot be watched; the pool is then unchanged.
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
        """Make the event loop call `_lose` when the worker's process ends; return the watching descriptor.

        Raises:
            OSError: If no descriptor can be had: too many are open, or the operation is not permitted here.
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


class _Died(Exception):
    """Signal that a worker is gone and its job may be retried."""


def _tidy(worker: WorkerHandle) -> None:
    """Tidy a worker that no thread uses; the slots and programs that it drops were given back already."""
    with suppress(OSError):  # the worker is gone, which is noticed elsewhere
        worker.tidy()


def _ignore_outcome(task: asyncio.Task[_T]) -> None:
    """Retrieve the outcome of a task whose caller may be gone; else asyncio would log a complaint."""
    with suppress(asyncio.CancelledError):
        task.exception()
