"""Memory that processes take, with what they share counted once."""

from __future__ import annotations

import contextlib

import psutil


def proportional_bytes(pid: int) -> int:
    """Pages of a process and all it started, those they share divided among all that have them.

    A process that is gone has none.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(map(_own_bytes, [process, *process.children(recursive=True)]))
    return 0


def _own_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        found = process.memory_full_info()
        return int(getattr(found, "pss", found.rss))  # not every kernel tells what is shared
    return 0
