"""How busy a server is: what its workers do with their time, and how much longer stages take than at best.

A stage of one program at one size of micro-batch is always the same work, so whatever it takes beyond the
least it ever took is others' doing: other processes on the machine, other workers, a lower clock. Input
stages are no measure, since stored samples differ.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from upriver.protocol import Load

WINDOW_S = 60.0
"""What is recent: some micro-batches of the slowest network, and a load that is over is soon forgotten."""

MAX_SEEN = 64
"""Micro-batches of a worker that its factor looks back on, at most."""

MAX_WORKS = 256
"""Pairs of a program and a size whose best times are kept, the least recently used go first."""

MAX_JOBS = 4096
"""Finished jobs looked back on, at most. Where there were more in the window, it is shorter: those before are
not known any more."""


@dataclass(frozen=True, slots=True)
class _Job:
    began: float
    ended: float


class LoadMeter:
    """Watches the workers of one server. Everything belongs to the event loop's thread.

    Args:
        num_workers: How many there are to be.
        now: Seconds of a clock that never goes back.
    """

    def __init__(
        self, num_workers: int, *, window_s: float = WINDOW_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_workers, self._window_s, self._now = num_workers, window_s, now
        self._since = now()
        self._queue = 0
        self._under_way: dict[int, float] = {}
        self._jobs: deque[_Job] = deque(maxlen=MAX_JOBS)
        self._best: OrderedDict[Hashable, dict[int, float]] = OrderedDict()
        self._factors: dict[int, deque[tuple[float, float]]] = {}

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
        spent = {position: seconds for position, seconds in stages.items() if position > 0 and seconds > 0}
        if not spent or worker not in self._factors:
            return
        best = self._best.setdefault(work, {})
        self._best.move_to_end(work)
        if len(self._best) > MAX_WORKS:
            self._best.popitem(last=False)
        for position, seconds in spent.items():
            best[position] = min(seconds, best.get(position, math.inf))
        factor = sum(spent.values()) / sum(best[position] for position in spent)
        self._factors[worker].append((self._now(), max(1.0, factor)))

    def load(self, *, running: int, **more: Any) -> Load:
        """What it comes to now.

        Args:
            running: Requests in progress.
            more: Further fields of the answer, which are not this one's to know.
        """
        factors = [self._factor(worker) for worker in self._factors]
        window_s = self._looked_back_s()
        return Load(
            window_s=window_s,
            utilisation=min(1.0, self._busy_s(window_s) / (window_s * self._num_workers)),
            running=running,
            queue=self._queue,
            expected_wait_s=self._expected_wait_s(),
            k=mean(factors) if factors else 1.0,
            workers=tuple(factors),
            **more,
        )

    def _factor(self, worker: int) -> float:
        """The median of what is recent: an odd slow micro-batch shows in none."""
        recent = [factor for at, factor in self._factors[worker] if at >= self._now() - self._window_s]
        return median(recent) if recent else 1.0

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
