"""Measure the current slowness of this machine: it is shared, and has two thirds of its speed for minutes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.input_pipeline.bed import TRAINER_CORE, WORKER_CORE
from benchmarks.input_pipeline.workloads import Samples

PROBE_S = 0.03
"""Approximate seconds of the computation."""

Pace = Callable[[], float]
"""Function that returns the computation's time over the shortest seen, on the slower core."""


class Probe:
    """Make a workload's samples.

    Args:
        root: Folder of the stored files.
        workload: The workload.
    """

    def __init__(self, root: Path, workload: str) -> None:
        torch.set_num_threads(1)
        self._data = Samples(str(root), workload, 1 << 30)
        self._shortest: dict[int, float] = {}
        self._count = 4
        self._on(TRAINER_CORE)  # loads everything in advance
        self._count = max(1, round(self._count * PROBE_S / self._on(TRAINER_CORE)))

    def __call__(self) -> float:
        """Measure the current pace."""
        taken = {core: self._on(core) for core in (TRAINER_CORE, WORKER_CORE)}
        self._shortest = {core: min(s, self._shortest.get(core, s)) for core, s in taken.items()}
        return max(taken[core] / self._shortest[core] for core in taken)

    def _on(self, core: int) -> float:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            began = time.perf_counter()
            for index in range(self._count):
                random.seed(index)
                self._data[index]
            return time.perf_counter() - began
        finally:
            os.sched_setaffinity(0, before)
