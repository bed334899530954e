"""One process of background load: computes for a share of its time, to order, and ends by itself.

Run as a process of its own, with the seconds that it may live. It says that it is there, then takes a line
with each new share, 0 to rest. It ends with those seconds, or when nobody is left to give orders.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

import numpy as np

PERIOD_S = 0.1
SIDE = 256
"""Of the matrices that are multiplied: some 0.5 ms at a time, in more memory than the first caches have."""


def main() -> None:
    """Compute as told until the time is over."""
    until = time.monotonic() + float(sys.argv[1])
    matrix = np.random.default_rng(os.getpid()).standard_normal((SIDE, SIDE), dtype=np.float32)
    product = matrix @ matrix  # whatever is loaded is loaded
    print(json.dumps({"ready": True}), flush=True)
    share = 0.0
    while (now := time.monotonic()) < until:
        wait_s = 0.0 if share == 1 else _pause_s(now) if share else until - now
        if select.select([sys.stdin], [], [], wait_s)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            share = float(line)
            continue
        spent = time.thread_time()
        while time.thread_time() - spent < share * PERIOD_S:
            np.matmul(matrix, matrix, out=product)


def _pause_s(now: float) -> float:
    """Until its next period begins: each process has its own place in them."""
    return (os.getpid() * 0.618 % 1.0 * PERIOD_S - now) % PERIOD_S


if __name__ == "__main__":
    main()
