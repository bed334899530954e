"""Measure a server's load: the workers' busy time, and how much longer stages take than at best.

A stage of one program at one micro-batch size is always the same work. So time beyond its best ever is caused
by something else: other processes, other workers, a lower clock. Input stages are no measure, since stored
samples differ.

That factor is LoADPart's ``k`` (Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural
Networks for Edge Offloading", ICDCS 2022, section III-C): the measured time of recent stretches over their
predicted time. The paper predicts with a latency model. So does this module, until a work has run on a free
machine: its best time is exact then. A server that was busy since its start knows its load by that. Without
models of the machine (``upriver calibrate``) the best time seen has to do.

The paper takes the mean of a period. This module takes the median over the time of each worker's recent
micro-batches, and the mean of the medians. Time decides, not number: a stretch of a millisecond escapes a
scheduler that makes one of half a second nine times as long.

A factor without new measurements keeps its value (section IV). A device that computes locally sends nothing
to measure, and must learn that it may return. So a machine that is not busy bounds the factor: a processor
that others use for a share u of the time makes work 1 / (1 - u) times as long.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from upriver.protocol import Load

WINDOW_S = 5.0
"""Seconds that count as recent: LoADPart's monitoring period (sections III-C and V-A), so that a device knows
of a load some seconds after it begins. The median of a longer window turns only when half of it is new. A
window ends with the last micro-batch, so a slow model's window holds one, too."""

FREE_BELOW = 0.9
"""Utilisation below which a machine is free: LoADPart's threshold, above which latency rose."""

EXACT_BELOW = 0.5
"""Utilisation below which the best times of stages are those of an idle machine. It includes the stages."""

MOST_SLOWED = 1000.0
"""Largest factor. A larger one means nothing more, and bounds what a compromised worker can report to
clients."""

MAX_SEEN = 64
"""Most recent micro-batches of a worker that its factor considers."""

MAX_WORKS = 256
"""Pairs of a program and a size whose best times are kept. The least recently used pair is evicted first."""

MAX_JOBS = 4096
"""Most finished jobs kept. If the window held more, it is shortened: earlier ones are not known."""


@dataclass(frozen=True, slots=True)
class _Job:
    began: float
    ended: float


class _Factor(NamedTuple):
    """A micro-batch's time relative to its best, that time, and when the micro-batch ended."""

    at: float
    value: float
    spent_s: float


class LoadMeter:
    """Measure the load of one server's workers. Use it from the event loop's thread only.

    Args:
        num_workers: Number of workers when all are running.
        now: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        window_s: float = WINDOW_S,
        free_below: float = FREE_BELOW,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_workers, self._window_s, self._now = num_workers, window_s, now
        self._free_below = free_below
        self._since = now()
        self._machine: float | None = None
        self._queue = 0
        self._under_way: dict[int, float] = {}
        self._jobs: deque[_Job] = deque(maxlen=MAX_JOBS)
        self._best: OrderedDict[Hashable, dict[int, float]] = OrderedDict()
        self._lately: set[Hashable] = set()
        self._exact: set[Hashable] = set()
        self._factors: dict[int, deque[_Factor]] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a job as waiting for a worker while the block runs."""
        self._queue += 1
        try:
            yield
        finally:
            self._queue -= 1

    def came(self, worker: int) -> None:
        """Add a worker that is ready."""
        self._factors[worker] = deque(maxlen=MAX_SEEN)

    def began(self, worker: int) -> None:
        """Note that a worker has started a job."""
        self._under_way[worker] = self._now()

    def ended(self, worker: int) -> None:
        """Note that a worker has finished its job, or has died."""
        began = self._under_way.pop(worker, None)
        if began is not None:
            self._jobs.append(_Job(began, self._now()))

    def gone(self, worker: int) -> None:
        """Remove a worker that has ended."""
        self.ended(worker)
        self._factors.pop(worker, None)

    def saw(
        self,
        worker: int,
        work: Hashable,
        stages: Mapping[int, float],
        predicted_s: Mapping[int, float] | None = None,
    ) -> None:
        """Add the times of one micro-batch.

        Args:
            work: Key of all that decides a stage's time on an idle machine: program and micro-batch.
            stages: Seconds by position.
            predicted_s: Seconds of the stages on an idle machine by its latency models, where these exist.
        """
        spent = {at: seconds for at, seconds in stages.items() if at > 0 and 0 < seconds < math.inf}
        if not spent or worker not in self._factors:
            return
        best = self._best.setdefault(work, {})
        self._best.move_to_end(work)
        if len(self._best) > MAX_WORKS:
            self._exact.discard(self._best.popitem(last=False)[0])
        for position, seconds in spent.items():
            best[position] = min(seconds, best.get(position, math.inf))
        self._lately.add(work)
        spent_s, alone_s = sum(spent.values()), sum(best[position] for position in spent)
        if predicted_s and work not in self._exact:
            foretold_s = sum(predicted_s.get(position, best[position]) for position in spent)
            alone_s = min(alone_s, foretold_s) if foretold_s > 0 else alone_s
        factor = min(max(1.0, spent_s / alone_s), MOST_SLOWED)
        self._factors[worker].append(_Factor(self._now(), factor, min(spent_s, self._window_s)))

    def looked(self, machine: float | None) -> None:
        """Add the machine's utilisation by all processes since the last call.

        Args:
            machine: Share of time; None if unknown, and then only the window drops measurements.
        """
        if machine is not None and machine < EXACT_BELOW:
            self._exact |= self._lately & self._best.keys()
        self._lately.clear()
        self._machine = machine

    @property
    def k(self) -> float:
        """Load factor: present over best time of the stages, as the mean over measured workers."""
        known = [factor for worker in self._factors if (factor := self._factor(worker)) is not None]
        return mean(known) if known else 1.0

    def load(self, *, running: int, **more: Any) -> Load:
        """Return the present load.

        Args:
            more: Further fields of the answer, which the meter does not know.
        """
        window_s = self._looked_back_s()
        return Load(
            window_s=window_s,
            utilisation=min(1.0, self._busy_s(window_s) / (window_s * self._num_workers)),
            running=running,
            queue=self._queue,
            expected_wait_s=self._expected_wait_s(),
            k=self.k,
            workers=tuple(self._factor(worker) or 1.0 for worker in self._factors),
            machine=self._machine or 0.0,
            **more,
        )

    def _factor(self, worker: int) -> float | None:
        """Return the factor of half of a worker's recent time: one slow micro-batch of many does not move it.

        None without any. The window ends with the worker's last micro-batch, whenever that was, unless nobody
        can tell how busy the machine is.
        """
        factors = self._factors[worker]
        until = self._now() if not factors or self._machine is None else factors[-1].at
        recent = sorted(
            (factor.value, factor.spent_s) for factor in factors if factor.at >= until - self._window_s
        )
        left_s = sum(spent_s for _, spent_s in recent) / 2
        for value, spent_s in recent:
            left_s -= spent_s
            if left_s <= 0:
                return min(value, self._most)
        return None

    @property
    def _most(self) -> float:
        """Return the largest factor that the machine's utilisation allows."""
        if self._machine is None or self._machine >= self._free_below:
            return MOST_SLOWED
        return 1 / (1 - self._machine)

    def _looked_back_s(self) -> float:
        """Return the seconds of the window that lie after the start and are still known."""
        since = self._since
        if len(self._jobs) == MAX_JOBS:  # jobs are kept in the order in which they ended
            since = max(since, self._jobs[0].ended)
        return min(self._window_s, max(self._now() - since, 1e-9))

    def _busy_s(self, window_s: float) -> float:
        now = self._now()
        spans = [*self._jobs, *(_Job(began, now) for began in self._under_way.values())]
        return sum(max(0.0, job.ended - max(job.began, now - window_s)) for job in spans)

    def _expected_wait_s(self) -> float:
        """Estimate the wait of a new job: the jobs that wait and one more, at the workers' rate."""
        if not self._queue and len(self._under_way) < self._num_workers:
            return 0.0
        now = self._now()
        recent = [job.ended - job.began for job in self._jobs if job.ended >= now - self._window_s]
        took = mean(recent or [now - began for began in self._under_way.values()] or [0.0])
        return (self._queue + 1) * took / self._num_workers
