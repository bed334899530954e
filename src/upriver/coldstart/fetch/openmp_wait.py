"""Free the cores on which OpenMP threads would spin while a model waits for its weights.

libgomp's threads wait for the next operator by spinning, for milliseconds each time, if there are no more
threads than cores. While operators wait for weights, spinning keeps cores from the stream, and from a store
on the same machine. With one thread more than cores they sleep some hundred times sooner.
"""

from __future__ import annotations

import ctypes
import sys


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
