"""Cores that OpenMP's threads would spin on while a model waits for its weights, left to who brings them.

libgomp's threads wait for the next operator by spinning, for milliseconds each time, as long as there are no
more of them than cores. Where operators wait for weights that keeps cores busy, which the stream needs, and
the store where it is on the same machine. With one thread more than cores they sleep some hundred times
sooner.
"""

from __future__ import annotations

import ctypes
import sys


def sleep_sooner() -> None:
    """Have OpenMP's threads sleep soon, until the calling thread ends.

    It gets a second thread, which sleeps. Nothing else changes, neither how many threads an operator has nor
    any bit of what it computes. Where there is no OpenMP, or it has one thread, nothing is done.
    """
    if sys.platform != "linux":
        return
    loaded = ctypes.CDLL(None)
    run_in_parallel = getattr(loaded, "GOMP_parallel", None)
    num_threads = getattr(loaded, "omp_get_max_threads", lambda: 1)
    if run_in_parallel is None or num_threads() == 1:
        return
    nothing = ctypes.cast(loaded.free, ctypes.c_void_p)  # of the null pointer
    run_in_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run_in_parallel.restype = None
    run_in_parallel(nothing, None, 2, 0)
