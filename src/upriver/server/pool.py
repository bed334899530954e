"""The workers: deal jobs to whichever is free, replace one that died, try its job once more elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from upriver.engine.clock import Clock
from upriver.errors import Overloaded, UpriverError, WorkerCrashed
from upriver.server.handle import Job, ProgramFiles, Result, WorkerHandle
from upriver.server.jobs import Hello, Setup

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""A crash may be another tenant's fault, or chance; twice with the same job it is the job's."""

MAX_PAUSE_S = 5.0
"""Longest wait before a worker that does not start is started again."""

_T = TypeVar("_T")


class WorkerPool:
    """Keeps ``count`` workers alive. All methods belong to the event loop's thread.

    Args:
        count: Workers.
        setup: What each is told first.
        job_timeout_s: After that long with one job, a worker is ended.
        on_restart: Called for each worker that had to be replaced.
    """

    def __init__(
        self, *, count: int, setup: Setup, job_timeout_s: float, on_restart: Callable[[], None] = lambda: None
    ) -> None:
        self._setup = setup
        self._job_timeout_s = job_timeout_s
        self._on_restart = on_restart
        self._count = count
        self._idle: asyncio.Queue[WorkerHandle] = asyncio.Queue()
        self._alive: dict[WorkerHandle, int] = {}  # and the descriptor that tells of their end
        self._starting: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="upriver-worker")
        self._closed = False
        self.hello: Hello | None = None
        """What the workers said of themselves; None until the first one is ready."""

    def start(self) -> None:
        """Start all workers, and do not wait for them."""
        for _ in range(self._count):
            self._start_one()

    @property
    def ready(self) -> bool:
        """Whether any worker is there to work."""
        return bool(self._alive) and self.hello is not None

    @property
    def pids(self) -> list[int]:
        """Of the workers that are ready."""
        return [worker.pid for worker in self._alive]

    async def run(self, job: Job, clock: Clock) -> Result:
        """Do one micro-batch; what it waits for a worker counts as ``queue``.

        Raises:
            WorkerCrashed: If it took `ATTEMPTS` workers with it.
            UpriverError: If it cannot be done.
        """
        return await self._on_worker(lambda worker: worker.run(job), clock)

    async def check(self, program: ProgramFiles) -> None:
        """Have a worker load a program, which checks everything about it.

        Raises:
            UpriverError: If it is not sound.
        """
        await self._on_worker(lambda worker: worker.load(program), Clock())

    def forget(self, digest: str) -> None:
        """A program is not kept any more."""
        for worker in self._alive:
            worker.forget(digest)

    async def close(self) -> None:
        """End all workers now."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        for worker in list(self._alive):
            self._lose(worker)
            worker.kill()
        await asyncio.gather(*self._starting, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _on_worker(self, work: Callable[[WorkerHandle], _T], clock: Clock) -> _T:
        for _ in range(ATTEMPTS):
            with clock.phase("queue"):
                worker = await self._take()
            # Shielded: a thread cannot be stopped, and the worker is free only when it is done.
            task = asyncio.ensure_future(self._call(worker, work))
            task.add_done_callback(_ignore_outcome)
            try:
                return await asyncio.shield(task)
            except _Died as error:
                reason = error
        raise WorkerCrashed(f"{ATTEMPTS} workers died of this micro-batch, one after the other: {reason}")

    async def _call(self, worker: WorkerHandle, work: Callable[[WorkerHandle], _T]) -> _T:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, work, worker)
        except UpriverError:
            self._idle.put_nowait(worker)
            raise
        except OSError as error:
            self._bury(worker, error)
            raise _Died(str(error) or type(error).__name__) from None
        except BaseException as error:  # nobody knows what state it is in
            self._bury(worker, error)
            raise
        self._idle.put_nowait(worker)
        return result

    async def _take(self) -> WorkerHandle:
        """Wait for a worker, first come first served; whoever gives up waiting goes by being cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._job_timeout_s):
                    worker = await self._idle.get()
            except TimeoutError:
                if not self._alive:
                    raise Overloaded("no worker can be started here", retry_after_s=MAX_PAUSE_S) from None
                continue
            if worker in self._alive:
                return worker
            worker.kill()  # it died while it was idle, and was replaced then

    def _bury(self, worker: WorkerHandle, error: BaseException) -> None:
        self._lose(worker, str(error) or type(error).__name__)
        worker.kill()

    def _lose(self, worker: WorkerHandle, reason: str = "its process ended") -> None:
        """Count on it no more, and start another in its place; once, whoever notices first.

        Its channel stays open: a thread may still be reading the end of it.
        """
        pidfd = self._alive.pop(worker, None)
        if pidfd is None:
            return
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        worker.reap()
        if not self._closed:
            log.warning("worker %d is gone (%s); starting another", worker.pid, reason)
            self._on_restart()
            self._start_one()

    def _start_one(self) -> None:
        task = asyncio.get_running_loop().create_task(self._bring_up())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _bring_up(self) -> None:
        pause_s = 0.1
        while not self._closed:
            worker = WorkerHandle.start(threads=self._setup.threads)
            try:
                hello = await asyncio.to_thread(
                    worker.shake_hands, self._setup, job_timeout_s=self._job_timeout_s
                )
            except OSError as error:
                log.error("a worker did not start: %s", str(error) or type(error).__name__)
                worker.kill()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except BaseException:
                worker.kill()
                raise
            else:
                self._welcome(worker, hello)
                return

    def _welcome(self, worker: WorkerHandle, hello: Hello) -> None:
        if self._closed:
            worker.kill()
            return
        if self.hello is None and hello.network:
            log.warning("workers cannot be cut off from the network here: neither root nor user namespaces")
        self.hello = hello
        self._alive[worker] = pidfd = os.pidfd_open(worker.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._lose, worker)
        self._idle.put_nowait(worker)


class _Died(Exception):
    """A worker is gone; its job may be tried again."""


def _ignore_outcome(task: asyncio.Task[_T]) -> None:
    """Whoever waited may have gone: then nobody asks for the outcome, and asyncio would complain."""
    with suppress(asyncio.CancelledError):
        task.exception()
