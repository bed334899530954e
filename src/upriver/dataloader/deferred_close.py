"""Close unused objects outside the garbage collector.

The collector runs in any thread that allocates, at any line. That thread may hold a lock, or be a new one for
which another thread waits with a lock held. Code that takes a lock must not run there.

A process waits for the closing thread when it ends: a thread that frees tensors during Python's shutdown may
abort it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger("upriver")

LAST_S = 10.0
"""Seconds that the end of the process waits for pending closes."""

Close = Callable[[], object]
Waiting = SimpleQueue[Close | None]
"""Queue that ends with None. Its ``put`` is reentrant."""

_waiting: Waiting = SimpleQueue()
_begin = threading.Lock()
_closer_of = 0
_ends = False


def closed_with(owner: object, close: Close, *, at_exit: bool = False) -> None:
    """Have a separate thread close something once ``owner`` is gone.

    Args:
        owner: Object whose end triggers the call.
        close: Function that closes; it must not refer to the owner.
        at_exit: Whether to call it also at the end of the process, if the owner is still alive.
    """
    _start()
    weakref.finalize(owner, _later, close).atexit = at_exit


def _later(close: Close) -> None:
    if _ends or not threading.main_thread().is_alive():  # no other thread is waited for any more
        close()
    else:
        _waiting.put(close)


def _start() -> None:
    """Start the thread once in each process, as a fork has none."""
    global _closer_of, _waiting
    with _begin:
        if _closer_of != os.getpid():
            _closer_of, _waiting = os.getpid(), SimpleQueue()
            closer = threading.Thread(target=_run, args=(_waiting,), name="closing for upriver", daemon=True)
            closer.start()
            atexit.register(_end, closer, _waiting, os.getpid())


def _end(closer: threading.Thread, waiting: Waiting, process: int) -> None:
    """End with the process, after `weakref.finalize`'s callbacks, which are registered later."""
    global _ends
    if process == os.getpid():  # not in a fork of it
        _ends = True
        waiting.put(None)
        closer.join(LAST_S)


def _run(waiting: Waiting) -> None:
    while (close := waiting.get()) is not None:
        try:
            close()
        except Exception:
            log.exception("something could not be closed")
        del close  # else everything that it refers to would live until the next one
