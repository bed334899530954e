"""CPU seconds of those who make samples on the training node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

_ALL_THREADS = 2
"""In the number of a process's clock: CPU time of all its threads (clock_getcpuclockid in the C library)."""


class CpuSeconds:
    """CPU seconds of this process and its loader processes so far; of no worker, wherever it runs.

    What a process has used still counts when it has ended, so the seconds never fall.

    Args:
        pids: Of the loader processes; what else this process has started is none of the input pipeline.
    """

    def __init__(self, pids: Callable[[], Iterable[int]] = tuple) -> None:
        self._pids, self._seen, self._theirs = pids, dict[int, float](), 0.0

    def __call__(self) -> float:
        """Those of this moment."""
        for pid in self._pids():
            seconds = _cpu_seconds_of(pid)
            if seconds is not None:
                self._theirs += max(0.0, seconds - self._seen.get(pid, 0.0))
                self._seen[pid] = seconds
        return time.process_time() + self._theirs


def _cpu_seconds_of(pid: int) -> float | None:
    """Of another process, by its clock where there is one: /proc counts hundredths, which are too coarse.

    None where it has ended.
    """
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | _ALL_THREADS)
    with suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    return None
