"""Run tasks in background threads that are started as needed."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from upriver._threads.background import BackgroundThread

log = logging.getLogger("upriver")

EXIT_S = 2.0
"""Seconds that the end of the process waits for tasks under way."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Task = tuple[Future[Any], Callable[[], Any]]


class _Worker(BackgroundThread):
    """Thread of an executor. It refers to no executor, which may be collected."""

    def __init__(self, tasks: SimpleQueue[_Task | None], free: threading.Semaphore, name: str) -> None:
        super().__init__(self._work, name=name)
        self.tasks, self._free = tasks, free

    def cancel_waiting(self) -> None:
        """Cancel all tasks that have not begun."""
        with suppress(Empty):
            while True:
                if (task := self.tasks.get_nowait()) is not None and task[0].cancel():
                    task[0].set_running_or_notify_cancel()

    def _work(self) -> None:
        while (task := self.tasks.get()) is not None:
            future, do = task
            if future.set_running_or_notify_cancel():
                try:
                    result = do()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del task, future, do  # keep no reference to a finished task
            self._free.release()


class DaemonExecutor(Executor):
    """Executor like ``ThreadPoolExecutor``, but the end of the process waits at most `EXIT_S` for it.

    A ``with`` block waits for all tasks at its end. After an error it starts no more tasks and does not wait.

    Args:
        at_once: Most threads. One starts when there is work and none is free.
        name: Name of the threads, after ``upriver-``.
    """

    def __init__(self, at_once: int, *, name: str) -> None:
        self._at_once, self._name = at_once, name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._threads: list[_Worker] = []
        self._lock, self._closed = threading.Lock(), False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function in one of the threads. After a shutdown it is cancelled.

        Raises:
            UpriverError: If no thread can be started for it.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                future.set_running_or_notify_cancel()  # who waits for several futures is told
                return future
            if not self._free.acquire(blocking=False) and len(self._threads) < self._at_once:
                thread = _Worker(self._tasks, self._free, self._name)
                thread.start()
                self._threads.append(thread)
            self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def begin(self, work: Callable[[], object]) -> None:
        """Run a function whose result nobody takes; an error is logged."""
        self.submit(work).add_done_callback(partial(_log_failure, self._name))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further tasks; with `cancel_futures` also cancel the waiting ones."""
        with self._lock:
            self._closed = True
            _end(self._threads, cancel=cancel_futures)
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(wait=error is None, cancel_futures=error is not None)


def _log_failure(name: str, future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("a task of %s failed", name, exc_info=error)


def _end(threads: Iterable[_Worker], *, cancel: bool) -> None:
    for thread in threads if cancel else ():
        thread.cancel_waiting()
    for thread in threads:
        thread.tasks.put(None)


def _end_executors() -> None:
    """End the threads of all executors, including those of earlier shutdowns that are still busy."""
    running = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    _end(running, cancel=True)
    until = time.monotonic() + EXIT_S
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


weakref.finalize(DaemonExecutor, _end_executors)
# The newest finalizers run first: one that aborts what a thread waits for runs before this one waits.
