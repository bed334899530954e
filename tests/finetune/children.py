"""Forked children that report by their exit code whether their check passed."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable


def fork(right: Callable[[], bool]) -> int:
    """Fork a child that exits with 0 if ``right`` returns true; return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons: threads are running
        child = os.fork()
    if child:
        return child
    code = 3
    try:
        code = 0 if right() else 1
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def ended(child: int, *, within_s: float = 120.0) -> int | None:
    """Return a child's exit code; None if the child has to be killed."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
