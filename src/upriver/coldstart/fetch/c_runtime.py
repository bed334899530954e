"""Ask the C libraries of the process to leave cores and memory to a load.

libgomp's threads wait for the next operator by spinning, for milliseconds each time, if there are no more
threads than cores. While operators wait for weights, spinning keeps cores from the stream, and from a store
on the same machine. With one thread more than cores they sleep some hundred times sooner.

One thread allocates each arriving piece and another frees it. glibc keeps freed memory in the heap of the
allocating thread. By the end of a load that is up to a third of a small model.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

HEAP_BYTES = 64 << 20
"""Arrived bytes between two trims."""

FEWEST_BYTES = 8 << 20
"""Fewest bytes for a trim at the end. Less leaves little behind, and a small model should answer soon."""

SHARE = 0.01
"""Share of a load's time that trims may take. A process with large heaps of its own may need long for one."""


def sleep_sooner() -> None:
    """Make OpenMP's threads sleep soon, until the calling thread ends.

    The calling thread gets a second OpenMP thread, which sleeps. The number of threads of an operator and
    every bit of its result stay the same. Do nothing without OpenMP, or if OpenMP has one thread.
    """
    if sys.platform != "linux":
        return
    loaded = ctypes.CDLL(None)
    run_in_parallel = getattr(loaded, "GOMP_parallel", None)
    num_threads = getattr(loaded, "omp_get_max_threads", lambda: 1)
    if run_in_parallel is None or num_threads() == 1:
        return
    nothing = ctypes.cast(loaded.free, ctypes.c_void_p)  # frees the null pointer
    run_in_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run_in_parallel.restype = None
    run_in_parallel(nothing, None, 2, 0)


def _trimming() -> Callable[[int], object] | None:
    """Return ``malloc_trim`` of glibc, or None if the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


_trim = _trimming()


class HeapTrimmer:
    """Trim the heaps during one load, from one thread."""

    def __init__(
        self,
        trim: Callable[[int], object] | None = _trim,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim, self._clock = trim, clock
        self._nbytes, self._not_before_s = 0, 0.0

    def came(self, num_bytes: int) -> None:
        """Count bytes that arrived and were freed, and trim if due."""
        self._nbytes += num_bytes
        if self._nbytes >= HEAP_BYTES and self._clock() >= self._not_before_s:
            self._give_back()

    def ended(self) -> None:
        """Trim at the end of a load."""
        if self._nbytes >= FEWEST_BYTES:
            self._give_back()

    def _give_back(self) -> None:
        self._nbytes = 0
        if self._trim is not None:
            began_s = self._clock()
            self._trim(0)
            ended_s = self._clock()
            self._not_before_s = ended_s + (ended_s - began_s) / SHARE
