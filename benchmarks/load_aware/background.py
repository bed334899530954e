"""Run one process of background load, which computes for a share of its time on request.

The script runs as a process of its own, with its lifetime in seconds. It reports that it is ready, then reads
a line with each new share, 0 to rest. It ends after its lifetime, or when its input closes.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

import numpy as np

PERIOD_S = 0.1
"""Period in which it computes its share, where that is less than all."""

LOOK_S = 0.01
"""CPU seconds between two looks for another order, where it never pauses."""

SIDE = 256
"""Side of the multiplied matrices: some 0.5 ms at a time, in more memory than the first caches have."""


def main() -> None:
    """Compute as ordered until the time is over."""
    until = time.monotonic() + float(sys.argv[1])
    matrix = np.random.default_rng(os.getpid()).standard_normal((SIDE, SIDE), dtype=np.float32)
    product = matrix @ matrix  # loads everything in advance
    print(json.dumps({"ready": True}), flush=True)
    share = 0.0
    while (now := time.monotonic()) < until:
        if select.select([sys.stdin], [], [], _pause_s(share, now, until))[0]:
            line = sys.stdin.readline()
            if not line:
                return
            share = float(line)
            continue
        spent = time.thread_time()
        while time.thread_time() - spent < (LOOK_S if share == 1 else share * PERIOD_S):
            np.matmul(matrix, matrix, out=product)


def _pause_s(share: float, now: float, until: float) -> float:
    """Return the seconds to rest without a new order: to the end, none, or until the next period begins.

    Each process has its own offset in the periods.
    """
    if share in (0, 1):
        return 0.0 if share else until - now
    return (os.getpid() * 0.618 % 1.0 * PERIOD_S - now) % PERIOD_S


if __name__ == "__main__":
    main()
