"""Threads that do what they are given, and for which a process that ends does not wait long.

It waits for those of `concurrent.futures` as long as it takes, and before anything else is done at its end.
Who interrupts a training job would so wait for whatever a machine that hangs was asked.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

log = logging.getLogger("upriver")

LAST_S = 2.0
"""So long it does: a thread that lets go of tensors while Python is taken down may abort the process."""

Work = Callable[[], object]


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
        self._started: list[threading.Thread] = []
        self._over = False

    def submit(self, work: Work) -> None:
        """Have it done; nothing more is where they have been shut down."""
        with self._lock:
            if self._over:
                return
            self._work.put(work)
            if self._free.acquire(blocking=False) or len(self._started) == self._most:
                return
            name = f"{self._name}_{len(self._started)}"
            thread = threading.Thread(target=_run, args=(self._work, self._free), name=name, daemon=True)
            thread.start()
            self._started.append(thread)

    def shutdown(self) -> None:
        """Leave what nobody has begun; each ends when it has done what it is at."""
        with self._lock:
            self._over = True
            with suppress(Empty):
                while True:
                    self._work.get_nowait()
            for _ in self._started:
                self._work.put(None)
        if not threading.main_thread().is_alive():
            until = time.monotonic() + LAST_S
            for thread in self._started:
                thread.join(max(0.0, until - time.monotonic()))


def _run(work: SimpleQueue[Work | None], free: threading.Semaphore) -> None:
    while (do := work.get()) is not None:
        try:
            do()
        except Exception:
            log.exception("a thread of the loader failed")
        del do  # or whatever it knows would live until there is more to do
        free.release()
