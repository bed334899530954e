"""Measure the memory of processes, with shared pages counted once."""

from __future__ import annotations

import contextlib

import psutil


def proportional_bytes(pid: int) -> int:
    """Return the bytes of a process and its descendants; a shared page is divided among its processes.

    A process that is gone has none.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(map(_own_bytes, [process, *process.children(recursive=True)]))
    return 0


def _own_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        found = process.memory_full_info()
        return int(getattr(found, "pss", found.rss))  # not every kernel reports shared memory
    return 0
