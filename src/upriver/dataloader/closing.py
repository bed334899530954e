"""Closing what nobody needs any more, out of the garbage collector's way.

The collector runs in whichever thread allocates, at any line: also in one that holds a lock, or in a new
thread that another one waits for with a lock in its hands. Whatever takes a lock must not run there.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger("upriver")

Close = Callable[[], object]

_waiting: SimpleQueue[Close] = SimpleQueue()  # whose ``put`` may run inside itself
_begin = threading.Lock()
_closer_of = 0


def closed_with(owner: object, close: Close, *, at_exit: bool = False) -> None:
    """Have something closed by a thread of its own when ``owner`` is gone.

    Args:
        owner: Whose end it is.
        close: Knows nothing of the owner.
        at_exit: Whether that is done, too, where the process ends before.
    """
    _start()
    weakref.finalize(owner, _later, close).atexit = at_exit


def _later(close: Close) -> None:
    if threading.main_thread().is_alive():
        _waiting.put(close)
    else:  # the process is at its end, and waits for no other thread
        close()


def _start() -> None:
    """The thread, once in each process: a fork has none."""
    global _closer_of, _waiting
    with _begin:
        if _closer_of != os.getpid():
            _closer_of, _waiting = os.getpid(), SimpleQueue()
            threading.Thread(target=_run, args=(_waiting,), name="closing for upriver", daemon=True).start()


def _run(waiting: SimpleQueue[Close]) -> None:
    while True:
        try:
            waiting.get()()
        except Exception:
            log.exception("something could not be closed")
