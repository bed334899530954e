"""What arrived pieces leave behind in the C library's heaps, given back while more of them come.

Each piece is memory of whichever thread handed it on, and is freed by another one. glibc keeps what was freed
in the heap of the thread that it came from: by the end of a load that is up to a third of a small model.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

HEAP_BYTES = 64 << 20
"""Of arrived pieces, between two times that memory is given back."""

FEWEST_BYTES = 8 << 20
"""Less leaves little behind, and a small model is to answer soon."""

SHARE = 0.01
"""Of a load's time that this may take: a process with large heaps of its own may need long."""


def _trimming() -> Callable[[int], object] | None:
    """``malloc_trim`` of glibc; None where the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


_trim = _trimming()


class Heap:
    """Gives memory back, a load long; one thread's.

    Args:
        trim: What does so; None if nothing can.
        clock: Seconds.
    """

    def __init__(
        self,
        trim: Callable[[int], object] | None = _trim,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim, self._clock = trim, clock
        self._nbytes, self._not_before_s = 0, 0.0

    def came(self, num_bytes: int) -> None:
        """So many more bytes have come, and were freed."""
        self._nbytes += num_bytes
        if self._nbytes >= HEAP_BYTES and self._clock() >= self._not_before_s:
            self._give_back()

    def ended(self) -> None:
        """No more come."""
        if self._nbytes >= FEWEST_BYTES:
            self._give_back()

    def _give_back(self) -> None:
        self._nbytes = 0
        if self._trim is not None:
            began_s = self._clock()
            self._trim(0)
            ended_s = self._clock()
            self._not_before_s = ended_s + (ended_s - began_s) / SHARE
