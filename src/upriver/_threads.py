"""Run tasks in background threads that never delay the end of the process.

A store may not respond for minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from upriver.errors import UpriverError
from upriver.text import error_text

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonExecutor(Executor):
    """Executor like ``ThreadPoolExecutor``, but the end of the process does not wait for its threads.

    A ``with`` block waits for all tasks at its end. After an error it starts no more tasks and does not wait.

    Args:
        at_once: Most threads.
        name: Name of the threads.
    """

    def __init__(self, at_once: int, *, name: str) -> None:
        self._at_once, self._name = at_once, name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a function in one of the threads.

        Raises:
            UpriverError: If no thread can be started for it.
            RuntimeError: If the executor was shut down.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is shut down and takes no more tasks")
            if len(self._threads) < self._at_once:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise UpriverError(f"no thread can be started: {error_text(error)}") from None
                self._threads.append(thread)
            self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further tasks; with `cancel_futures` also cancel the waiting ones."""
        with self._lock:
            self._closed = True
            while cancel_futures:
                try:
                    task = self._queue.get_nowait()
                except Empty:
                    break
                if task is not None:
                    task[0].cancel()
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(wait=error is None, cancel_futures=error is not None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            future, do = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                done = do()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(done)
            del task, future, do  # keep no reference to a finished task
            done = None
