"""How busy a server is: what its workers do with their time, and how much longer stages take than at best.

A stage of one program at one size of micro-batch is always the same work, so whatever it takes beyond the
least it ever took is others' doing: other processes on the machine, other workers, a lower clock. Input
stages are no measure, since stored samples differ.

That factor is LoADPart's ``k`` (Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep
Neural Networks for Edge Offloading", ICDCS 2022, section III-C): what recent stretches took over what they
were predicted to take. There a latency model predicts, here the least that was seen, unless somebody knows
better. There the mean of a period counts, here the median of each worker's recent micro-batches, and the mean
of those.

A factor that nobody measures anew stays what it is while the machine is busy, and is forgotten once it is not
(section IV): a device that has gone local sends nothing to measure, and must learn that it may come back.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

from upriver.protocol import Load

WINDOW_S = 5.0
"""What is recent: LoADPart's monitoring period (sections III-C and V-A), so that a device knows of a load
some seconds after it has come. The median of a longer window turns only when half of it is new. On a busy
machine a window ends with the last micro-batch, so that a slow network has one in it, however short it is."""

FREE_BELOW = 0.9
"""Utilisation below which a machine is free: LoADPart's threshold, above which it saw latency rise."""

MOST_SLOWED = 1000.0
"""More tells nobody anything, and whatever a worker says that was taken over, clients get a number."""

MAX_SEEN = 64
"""Micro-batches of a worker that its factor looks back on, at most."""

MAX_WORKS = 256
"""Pairs of a program and a size whose best times are kept, the least recently used go first."""

MAX_JOBS = 4096
"""Finished jobs looked back on, at most. Where there were more in the window, it is shorter: those before are
not known any more."""

Predicted = Callable[[Hashable, Collection[int]], float | None]
"""Seconds that the stages of a work at these positions take together where nothing disturbs; None where that
is not known."""


def nobody_knows(work: Hashable, positions: Collection[int]) -> float | None:
    """Predicts nothing: the least that was seen counts."""
    return None


@dataclass(frozen=True, slots=True)
class _Job:
    began: float
    ended: float


class _Factor(NamedTuple):
    """How many times as long as predicted a micro-batch took, and when that was."""

    at: float
    value: float


class LoadMeter:
    """Watches the workers of one server. Everything belongs to the event loop's thread.

    Args:
        num_workers: How many there are to be.
        window_s: What is recent.
        free_below: Utilisation below which the machine is free.
        predicted: What stages take where nothing disturbs.
        now: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        window_s: float = WINDOW_S,
        free_below: float = FREE_BELOW,
        predicted: Predicted = nobody_knows,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_workers, self._window_s, self._now = num_workers, window_s, now
        self._free_below, self._predicted = free_below, predicted
        self._since = self._looked_at = now()
        self._machine: float | None = None
        self._queue = 0
        self._under_way: dict[int, float] = {}
        self._jobs: deque[_Job] = deque(maxlen=MAX_JOBS)
        self._best: OrderedDict[Hashable, dict[int, float]] = OrderedDict()
        self._factors: dict[int, deque[_Factor]] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A job waits for a worker while the block runs."""
        self._queue += 1
        try:
            yield
        finally:
            self._queue -= 1

    def came(self, worker: int) -> None:
        """A worker is ready."""
        self._factors[worker] = deque(maxlen=MAX_SEEN)

    def began(self, worker: int) -> None:
        """A worker has taken a job."""
        self._under_way[worker] = self._now()

    def ended(self, worker: int) -> None:
        """It has done it, or died of it."""
        began = self._under_way.pop(worker, None)
        if began is not None:
            self._jobs.append(_Job(began, self._now()))

    def gone(self, worker: int) -> None:
        """A worker is no more."""
        self.ended(worker)
        self._factors.pop(worker, None)

    def saw(self, worker: int, work: Hashable, stages: Mapping[int, float]) -> None:
        """Take in one micro-batch.

        Args:
            work: What decides how long a stage takes where nothing disturbs: program and micro-batch.
            stages: Position to seconds.
        """
        spent = {at: seconds for at, seconds in stages.items() if at > 0 and 0 < seconds < math.inf}
        if not spent or worker not in self._factors:
            return
        best = self._best.setdefault(work, {})
        self._best.move_to_end(work)
        if len(self._best) > MAX_WORKS:
            self._best.popitem(last=False)
        for position, seconds in spent.items():
            best[position] = min(seconds, best.get(position, math.inf))
        alone = self._predicted(work, spent.keys()) or sum(best[position] for position in spent)
        factor = sum(spent.values()) / alone
        self._factors[worker].append(_Factor(self._now(), min(max(1.0, factor), MOST_SLOWED)))

    def looked(self, machine: float | None) -> None:
        """Take in how busy everybody together has kept the machine since this was told last.

        Where it was free, what was measured before that time says nothing of now.

        Args:
            machine: A share; None where it cannot be told, and the window alone forgets.
        """
        if machine is not None and machine < self._free_below:
            for factors in self._factors.values():
                while factors and factors[0].at < self._looked_at:
                    factors.popleft()
        self._machine, self._looked_at = machine, self._now()

    @property
    def k(self) -> float:
        """How many times as long as at best stages take now, by the workers of which that is known."""
        known = [factor for worker in self._factors if (factor := self._factor(worker)) is not None]
        return mean(known) if known else 1.0

    def load(self, *, running: int, **more: Any) -> Load:
        """What it comes to now.

        Args:
            running: Requests in progress.
            more: Further fields of the answer, which are not this one's to know.
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
        """The median of what is recent: an odd slow micro-batch shows in none. None where nothing is.

        On a busy machine what is recent ends with the worker's last micro-batch, whenever that was.
        """
        factors = self._factors[worker]
        until = factors[-1].at if factors and self._held else self._now()
        recent = [factor.value for factor in factors if factor.at >= until - self._window_s]
        return median(recent) if recent else None

    @property
    def _held(self) -> bool:
        """Whether others keep the machine busy, as far as anybody knows."""
        return self._machine is not None and self._machine >= self._free_below

    def _looked_back_s(self) -> float:
        """The window, or as much of it as there was, and as is known."""
        since = self._since
        if len(self._jobs) == MAX_JOBS:  # they are kept in the order in which they ended
            since = max(since, self._jobs[0].ended)
        return min(self._window_s, max(self._now() - since, 1e-9))

    def _busy_s(self, window_s: float) -> float:
        now = self._now()
        spans = [*self._jobs, *(_Job(began, now) for began in self._under_way.values())]
        return sum(max(0.0, job.ended - max(job.began, now - window_s)) for job in spans)

    def _expected_wait_s(self) -> float:
        """As many jobs as wait, and the rest of one under way, at the rate the workers get through them."""
        if not self._queue and len(self._under_way) < self._num_workers:
            return 0.0
        now = self._now()
        recent = [job.ended - job.began for job in self._jobs if job.ended >= now - self._window_s]
        took = mean(recent or [now - began for began in self._under_way.values()] or [0.0])
        return (self._queue + 1) * took / self._num_workers
