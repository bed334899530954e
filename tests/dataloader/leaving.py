"""Find the threads, processes and shared memory that a loader has left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.running import wait_for


def shared() -> set[str]:
    """Return the shared memory that this process maps, or that has a name."""
    mapped = {line for line in Path("/proc/self/maps").read_text().splitlines() if "/torch_" in line}
    return mapped | {each for each in os.listdir("/dev/shm") if each.startswith(f"torch_{os.getpid()}_")}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no further thread, process or shared memory remains once everything is closed."""
    threads, processes, memory = set(threading.enumerate()), multiprocessing.active_children(), shared()
    yield
    closers = {each for each in threading.enumerate() if each.name == "closing for upriver"}
    wait_for(lambda: not set(threading.enumerate()) - threads - closers)
    wait_for(lambda: not set(multiprocessing.active_children()) - set(processes))
    wait_for(lambda: not shared() - memory)
