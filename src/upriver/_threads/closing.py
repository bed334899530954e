"""Close unused objects outside the garbage collector.

The collector runs in any thread that allocates, at any line. That thread may hold a lock, or be a new one for
which another thread waits with a lock held. Code that takes a lock must not run there.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from upriver._threads.background import BackgroundThread
from upriver._threads.forks import reset_in_child, unless_forked

log = logging.getLogger("upriver")

CLOSE_S = 10.0
"""Seconds that the end of the process waits for pending closes: a server may have to end first."""


class _Closer:
    """Thread that closes what is no longer used, started once in each process."""

    def __init__(self) -> None:
        self._ended = False
        self.forked()
        reset_in_child(self)
        atexit.register(self._end)

    def forked(self) -> None:
        """Leave to the parent all that waits for its thread."""
        self._lock = threading.Lock()
        self._thread: BackgroundThread | None = None
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None:
                thread = BackgroundThread(self._close_all, name="closing")
                thread.start()
                self._thread = thread

    def put(self, close: Callable[[], object]) -> None:
        """Have the thread close something; reentrant."""
        if self._ended or not threading.main_thread().is_alive():  # no other thread is waited for any more
            close()
        else:
            self._waiting.put(close)

    def _close_all(self) -> None:
        while (close := self._waiting.get()) is not None:
            try:
                close()
            except Exception:
                log.exception("something could not be closed")
            del close  # else everything that it refers to would live until the next one

    def _end(self) -> None:
        self._ended = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_S)


_closer = _Closer()


def close_later(owner: object, close: Callable[[], object], *, at_exit: bool = False) -> None:
    """Have a separate thread close something once ``owner`` is gone, unless this is a fork by then.

    Args:
        owner: Object whose end triggers the call.
        close: Function that closes; it must not refer to the owner.
        at_exit: Whether to call it also at the end of the process, if the owner is still alive.
    """
    _closer.start()
    weakref.finalize(owner, _closer.put, unless_forked(close)).atexit = at_exit
