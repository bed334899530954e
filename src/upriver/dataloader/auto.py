"""Whether to offload, decided while training goes on: every batch that is made for measuring is handed out.

FastFlow's metrics (PVLDB 16(5), Table 1 and section 5.1), with what the loader sees of the training loop: how
long it waits for a batch, and how long its consumer takes until it asks for the next.

    Pcycle, Ocycle   CPU seconds of this process and its loader processes while some batches are prepared and
                     nobody trains
    Gthp             while these are consumed, and nobody prepares any
    Lthp, Rthp       while both go on, all of it here, all of it offloaded

Departures
    - The model is not run on a copy: the steps that are timed are the user's own, on batches that are ready.
    - A candidate is measured only where something stalls, as in the paper, and can be left out by name.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from upriver.dataloader.epoch import Epoch, Split
from upriver.policies import fastflow
from upriver.policies.fastflow import Offload
from upriver.profile.metrics import SPEEDUP_THRESHOLD, Candidate, Metrics

MOST_STEPS = 50
"""Of one throughput: FastFlow found 50 to 100 steps to be enough (section 5.1)."""

LEAST_STEPS = 8
SETTLED = 0.02
"""Fewer do where the standard error of a step's seconds is below this part of their mean."""

SKIPPED = 2
"""Steps after a change that do not count: what was under way is not yet what is measured."""

PREPARED = 8
"""Batches that are prepared while nobody trains."""

MEGA = 1e6

OVER = object()
"""In place of a batch: there are no more."""


@dataclass(eq=False, slots=True)
class Steps:
    """Steps that were timed.

    Attributes:
        seconds: Of each, by what they are timed for.
        nbytes: Of each step's batch.
    """

    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def add(self, seconds: float, nbytes: int) -> None:
        """One more."""
        self.seconds.append(seconds)
        self.nbytes.append(nbytes)

    @property
    def enough(self) -> bool:
        """Whether further ones would change little."""
        if len(self.seconds) >= MOST_STEPS:
            return True
        if len(self.seconds) < LEAST_STEPS:
            return False
        error = statistics.stdev(self.seconds) / len(self.seconds) ** 0.5
        return bool(error <= SETTLED * statistics.fmean(self.seconds))

    @property
    def throughput(self) -> float:
        """MB/s; of no step at all it is 0."""
        total_s = sum(self.seconds)
        return sum(self.nbytes) / total_s / MEGA if total_s > 0 else 0.0


@dataclass(eq=False, slots=True)
class Measured:
    """What has been measured so far; an epoch that ends early leaves the rest to the next.

    Attributes:
        gthp: MB/s of the consumer alone.
        lthp: MB/s of both, all of it here.
        pcycle: CPU seconds of a batch, all of it here.
        candidates: By name, as far as they were measured.
        ocycles: CPU seconds of a batch, where a candidate makes it.
        decision: Once there is one.
    """

    gthp: float | None = None
    lthp: float | None = None
    pcycle: float | None = None
    ocycles: dict[str, float] = field(default_factory=dict)
    rthp: dict[str, float] = field(default_factory=dict)
    decision: Offload | None = None

    def metrics(self, threshold: float, names: Sequence[str]) -> Metrics:
        """All of it as the policy takes it; candidates that were not measured are left out."""
        candidates = tuple(
            Candidate(name=name, rthp=self.rthp[name], ocycle=self.ocycles[name])
            for name in names
            if name in self.rthp
        )
        return Metrics(
            gthp=_positive(self.gthp),
            lthp=_positive(self.lthp),
            pcycle=_positive(self.pcycle),
            speedup_threshold=threshold,
            candidates=candidates,
        )


def _positive(value: float | None) -> float:
    return max(value or 0.0, 1e-9)


class Auto:
    """An epoch whose first batches tell how the others are made.

    Args:
        epoch: Makes them.
        measured: What is known; changed as more is.
        here: Nothing is offloaded.
        candidates: What could be, all of it, by name.
        part: Some of it: by name and ratio.
        threshold: FastFlow's SpeedUpThreshold.
        cpu_s: CPU seconds of this process and its loader processes so far.
        clock: Seconds.
    """

    def __init__(
        self,
        epoch: Epoch,
        measured: Measured,
        *,
        here: Callable[[], Split],
        candidates: Sequence[str],
        part: Callable[[str, float], Split],
        threshold: float = SPEEDUP_THRESHOLD,
        cpu_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._epoch, self._measured, self._threshold = epoch, measured, threshold
        self._here, self._candidates, self._part = here, candidates, part
        self._cpu_s, self._clock = cpu_s or cpu_seconds, clock

    def batches(self) -> Iterator[Any]:
        """All of the epoch, in order."""
        if self._measured.decision is None:
            yield from self._measure()
        decision = self._measured.decision
        if decision is not None and decision.offload and decision.candidate is not None:
            self._epoch.split = self._part(decision.candidate, decision.ratio)
        else:
            self._epoch.split = self._here()
        yield from self._epoch

    def _measure(self) -> Iterator[Any]:
        found = self._measured
        if found.lthp is None:
            self._epoch.split = self._here()
            found.pcycle, found.gthp = yield from self._prepare()
            found.lthp = yield from self._train()
        if found.lthp is None or found.pcycle is None or found.gthp is None:
            return  # the epoch was too short
        if fastflow.stalls(found.gthp, found.lthp, self._threshold):
            for name in self._candidates:
                if name in found.rthp:
                    continue
                self._epoch.split = self._part(name, 1.0)
                ocycle, _ = yield from self._prepare()
                rthp = yield from self._train()
                if ocycle is None or rthp is None:
                    return
                found.ocycles[name], found.rthp[name] = ocycle, rthp
        found.decision = fastflow.decide(found.metrics(self._threshold, self._candidates))

    def _prepare(self) -> Generator[Any, None, tuple[float | None, float | None]]:
        """Hand out what was planned before; prepare some batches; hand them out while nothing is prepared.

        Returns:
            CPU seconds that a batch took, and MB/s of their consumer; None where no batch was left.
        """
        for _ in range(self._epoch.planned):
            batch = next(self._epoch, OVER)
            if batch is OVER:
                return None, None
            yield batch
        warm = self._epoch.prepare(self._epoch.planned)
        began = self._cpu_s()
        count = self._epoch.prepare(warm + PREPARED) - warm
        cpu_s = (self._cpu_s() - began) / count if count else None
        steps = Steps()
        self._epoch.hold = True
        try:
            for _ in range(warm + count):
                batch = next(self._epoch)
                began = self._clock()
                yield batch
                steps.add(self._clock() - began, num_bytes(batch))
        finally:
            self._epoch.hold = False
        return cpu_s, steps.throughput if steps.seconds else None

    def _train(self) -> Generator[Any, None, float | None]:
        """Hand out batches as ever, and take the time.

        Returns:
            MB/s; None where too few batches were left.
        """
        steps = Steps()
        for number in range(SKIPPED + MOST_STEPS):
            began = self._clock()
            batch = next(self._epoch, OVER)
            if batch is OVER:
                return steps.throughput if len(steps.seconds) >= LEAST_STEPS else None
            yield batch
            if number >= SKIPPED:
                steps.add(self._clock() - began, num_bytes(batch))
            if steps.enough:
                break
        return steps.throughput


def num_bytes(value: Any) -> int:
    """Bytes of all tensors and arrays in a batch."""
    match value:
        case torch.Tensor() | np.ndarray():
            return int(value.nbytes)
        case bytes() | str():
            return len(value)
        case Mapping():
            return sum(map(num_bytes, value.values()))
        case Sequence():
            return sum(map(num_bytes, value))
    return 0


def cpu_seconds() -> float:
    """CPU seconds of this process and its loader processes so far; of no worker, wherever it runs."""
    total = sum(psutil.Process().cpu_times()[:2])
    for child in multiprocessing.active_children():
        with suppress(psutil.Error):
            total += sum(psutil.Process(child.pid).cpu_times()[:2])
    return float(total)
