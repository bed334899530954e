"""Threads that do what they are given, and for which a process that ends does not wait long.

It waits for those of `concurrent.futures` as long as it takes, and before anything else is done at its end.
Who interrupts a training job would so wait for whatever a machine that hangs was asked.
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
"""So long it does: a thread that lets go of tensors while Python is taken down may abort the process."""

Work = Callable[[], object]


class _Thread(threading.Thread):
    """Does one piece of work after the other, until there is None.

    Attributes:
        work: What is to be done.
    """

    def __init__(self, work: SimpleQueue[Work | None], free: threading.Semaphore, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.work, self._free = work, free

    def run(self) -> None:
        """Until it is over."""
        while (do := self.work.get()) is not None:
            try:
                do()
            except Exception:
                log.exception("a thread of the loader failed")
            del do  # or whatever it knows would live until there is more to do
            self._free.release()


class Threads:
    """Some threads, each started when there is something to do for which none is free.

    Args:
        most: Of them.
        name: What theirs begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._free = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._started: list[_Thread] = []
        self._over = False

    def submit(self, work: Work) -> None:
        """Have it done; nothing more is where they have been shut down."""
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
        """Leave what nobody has begun; each ends when it has done what it is at."""
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
    """The process ends; threads that were shut down before may still be at something."""
    running = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    _end(running)
    until = time.monotonic() + LAST_S
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


weakref.finalize(Threads, _end_all)
# The newest go first, so what breaks something off that a thread waits for does so before this one waits.
