"""Return freed memory of arrived pieces from the C library's heaps while more pieces arrive.

One thread allocates each piece and another frees it. glibc keeps freed memory in the heap of the allocating
thread. By the end of a load that is up to a third of a small model.
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
