"""Run work in threads that do not delay the end of the process for long.

At its end a process waits for threads of `concurrent.futures` without a limit, before anything else. An
interrupted training job would thus wait for a machine that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

log = logging.getLogger("upriver")

LAST_S = 2.0
"""Seconds to wait at the end: a thread that frees tensors during Python's shutdown may abort the process."""

Work = Callable[[], object]


class _Thread(threading.Thread):
    """Thread that does one piece of work after another, until it gets None.

    Attributes:
        work: Queue of work.
    """

    def __init__(self, work: SimpleQueue[Work | None], free: threading.Semaphore, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work, self._free = work, free

    def run(self) -> None:
        """Do work until the queue gives None."""
        while (do := self.work.get()) is not None:
            try:
                do()
            except Exception:
                log.exception("a thread of the loader failed")
            del do  # else everything that the work refers to would live until the next one
            self._free.release()


class ThreadPool:
    """Thread pool that starts a thread when there is work and none is free.

    Args:
        most: Maximum number of threads.
        name: Prefix of the threads' names.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._started: list[_Thread] = []
        self._over = False

    def submit(self, work: Work) -> None:
        """Queue work; ignore it after a shutdown."""
        with self._lock:
            if self._over:
                return
            self._work.put(work)
            if self._free.acquire(blocking=False) or len(self._started) == self._most:
                return
            thread = _Thread(self._work, self._free, f"{self._name}_{len(self._started)}")
            thread.start()
            self._started.append(thread)

    def shutdown(self) -> None:
        """Drop queued work; each thread ends after its current work."""
        with self._lock:
            self._over = True
            _end(self._started)


def _end(threads: Sequence[_Thread]) -> None:
    for thread in threads:
        with suppress(Empty):
            while True:
                thread.work.get_nowait()
    for thread in threads:
        thread.work.put(None)


def _end_all() -> None:
    """End all threads with the process, including those of earlier shutdowns that are still busy."""
    running = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    _end(running)
    until = time.monotonic() + LAST_S
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


weakref.finalize(ThreadPool, _end_all)
# The newest finalizers run first: one that aborts what a thread waits for runs before this one waits.
