"""Count the CPU seconds of making samples on the training node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

_ALL_THREADS = 2
"""Bit in the number of a process's clock for CPU time of all threads (clock_getcpuclockid in libc)."""


class CpuSeconds:
    """Counter of the CPU seconds of this process and its loader processes; workers never count.

    The seconds of an ended process still count, so they never fall.

    Args:
        pids: Return the process ids of the loader processes; other child processes are not part of the
            pipeline.
    """

    def __init__(self, pids: Callable[[], Iterable[int]] = tuple) -> None:
        self._pids, self._seen, self._theirs = pids, dict[int, float](), 0.0

    def __call__(self) -> float:
        """Return the CPU seconds until now."""
        for pid in self._pids():
            seconds = _cpu_seconds_of(pid)
            if seconds is not None:
                self._theirs += max(0.0, seconds - self._seen.get(pid, 0.0))
                self._seen[pid] = seconds
        return time.process_time() + self._theirs


def _cpu_seconds_of(pid: int) -> float | None:
    """Return another process's CPU seconds by its clock if it has one, as /proc has only hundredths.

    None if the process has ended.
    """
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | _ALL_THREADS)
    with suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    return None
