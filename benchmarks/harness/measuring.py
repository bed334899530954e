"""Measure fairly: runs in turns, spreads, CPU time, cores, and facts about the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

T = TypeVar("T")

CONFIDENCE = 0.95
"""Confidence of an interval."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one figure. A single measurement means nothing on a shared machine."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Build a spread from the repeats, in the order in which they were measured."""
        return cls(tuple(values))

    @property
    def median(self) -> float:
        """Return the median of the repeats."""
        return statistics.median(self.values)

    def text(self, digits: int = 2) -> str:
        """Return ``median (lowest to highest)`` as text."""
        low, high = min(self.values), max(self.values)
        return f"{self.median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A ratio and its confidence interval.

    Attributes:
        middle: Geometric mean of the ratios.
        low: Lower end; 0 with a single pair, which bounds nothing.
        high: Upper end; infinite with a single pair.
        pairs: Number of pairs.
    """

    middle: float
    low: float
    high: float
    pairs: int

    def text(self) -> str:
        """Return ``middle (low to high)`` as text."""
        if self.pairs == 1:
            return f"{self.middle:.2f} (one pair)"
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> Interval | None:
    """Return the ratio of paired figures with its interval, by Student's t on the logarithms; None of none.

    Logarithms, since a ratio and its inverse must say the same.
    """
    logs = [math.log(one / other) for one, other in zip(ones, others, strict=True)]
    if not logs:
        return None
    middle, pairs = statistics.fmean(logs), len(logs)
    if pairs == 1:
        return Interval(middle=math.exp(middle), low=0.0, high=math.inf, pairs=1)
    from scipy.special import stdtrit  # no process that is measured needs it

    half = float(stdtrit(pairs - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(logs) / math.sqrt(pairs)
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Interval(middle=math.exp(middle), low=low, high=high, pairs=pairs)


def interleave(runs: Mapping[str, Callable[[int], T]], repeats: int) -> dict[str, list[T]]:
    """Interleave runs as A B A B …, so that other load on the machine affects all alike.

    Args:
        runs: Name to a function that receives the number of the repeat.
        repeats: How often each function runs.

    Returns:
        The results of each function, in order.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            results[name].append(run(repeat))
    return results


def cpu_seconds() -> float:
    """Return the CPU time, user and system, of this process and all its descendants so far.

    Ended descendants count too.
    """
    mine = os.times()
    total = mine.user + mine.system + mine.children_user + mine.children_system
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def confine(cores: Sequence[int]) -> None:
    """Pin every thread of this process and its descendants to these cores, and what they start later.

    ``os.sched_setaffinity`` moves a single thread, so the threads of libraries would stay behind.
    """
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def let_threads_sleep() -> None:
    """Restart this program with OpenMP threads that sleep while they wait, unless the user set a policy.

    OpenMP threads spin by default. Spinning takes cores from other processes of the same run. On a busy
    machine the threads then wait for each other.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads it once, when the library is loaded
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def machine() -> str:
    """Return the processor, cores and memory, without the name of the host."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return (
        f"{model}, {cores} cores as the operating system counts them, {memory:.0f} GiB, "
        f"torch kernels for {torch.backends.cpu.get_cpu_capability()}"
    )


def versions(*packages: str) -> str:
    """Return the versions of Python and of the named packages."""
    found = (f"{package} {importlib.metadata.version(package)}" for package in packages)
    return ", ".join((f"Python {platform.python_version()}", *found))
