"""Closing what nobody needs any more, out of the garbage collector's way.

The collector runs in whichever thread allocates, at any line: also in one that holds a lock, or in a new
thread that another one waits for with a lock in its hands. Whatever takes a lock must not run there.

A process that ends waits for it: a thread that lets go of tensors while Python is taken down may abort it.
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
"""What is being closed when the process ends may take so long."""

Close = Callable[[], object]
Waiting = SimpleQueue[Close | None]
"""Ends with None. Its ``put`` may run inside itself."""

_waiting: Waiting = SimpleQueue()
_begin = threading.Lock()
_closer_of = 0
_ends = False


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
    if _ends or not threading.main_thread().is_alive():  # no other thread is waited for any more
        close()
    else:
        _waiting.put(close)


def _start() -> None:
    """The thread, once in each process: a fork has none."""
    global _closer_of, _waiting
    with _begin:
        if _closer_of != os.getpid():
            _closer_of, _waiting = os.getpid(), SimpleQueue()
            closer = threading.Thread(target=_run, args=(_waiting,), name="closing for upriver", daemon=True)
            closer.start()
            atexit.register(_end, closer, _waiting, os.getpid())


def _end(closer: threading.Thread, waiting: Waiting, process: int) -> None:
    """The process ends; after whatever `weakref.finalize` does then, as that was registered later."""
    global _ends
    if process == os.getpid():  # and no fork of it
        _ends = True
        waiting.put(None)
        closer.join(LAST_S)


def _run(waiting: Waiting) -> None:
    while (close := waiting.get()) is not None:
        try:
            close()
        except Exception:
            log.exception("something could not be closed")
        del close  # or whatever it knows would live until the next one comes
