"""Track one worker from a loader's view, and choose the worker for the next task.

Each task goes to the worker that is expected to finish it first, including the tasks it already has: the
earliest completion time (Ibarra, Kim: Heuristic Algorithms for Scheduling Independent Tasks on Nonidentical
Processors, Journal of the ACM 24(2), 1977). A slow worker therefore gets a task only if the others would not
have done it by then. A batch never waits for a task that another worker would have finished sooner.

    s    seconds that one process of a worker needs for a sample (`LoaderWorker.sample_s`), a running mean
    p    its processes
    n    tasks that it would have, including this one: done after s max(1, n / p) a sample

Departures
    - s is not given. It is estimated from the tasks so far; an unknown s is assumed to be the others' mean.
      A worker with unknown s gets at most one task for each of its processes, until one is back.
    - A worker that got no task for PROBE_TIMES of its own tasks becomes unknown: it may have been slow only
      for a while. Its one task makes others wait for at most a fiftieth of the time.
    - A task is kept while the worker that would finish it first has no place.

Several training nodes may ask one worker, which then refuses excess tasks. Each node then asks for half as
much, and for one task more with each round, as TCP does on a shared link (Jacobson: Congestion Avoidance and
Control, SIGCOMM 1988).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from upriver.dataloader.tasks import Kind, Task
from upriver.errors import CodeFailed, Overloaded, UpriverError
from upriver.protocol import Info
from upriver.retry import Backoff, CircuitBreaker
from upriver.rpc.client import ServerClient

SLOTS, SLOTS_EACH = 4, 2
"""Tasks under way at a worker: at least four, and two for each process, one in work and one in transit."""

MOST_SLOTS = 256
"""Upper limit on a worker's tasks, whatever the worker reports."""

SMOOTHING = 0.25
"""Weight of the newest value in a running mean: about the last four tasks count."""

PROBE_TIMES = 50

LATE_S, LATE_TIMES = 10.0, 10
"""Seconds, and multiple of the expected time, after both of which a task is no longer waited for."""

FAILURES = Backoff(base_s=1.0, cap_s=30.0, jitter=0.0)

HANGS = Backoff(base_s=30.0, cap_s=3600.0, jitter=0.0)
"""Pauses of a worker that hung. A hang costs its batch `LATE_S`, so one success does not end their growth."""

MOST_CODE_FAILS = 3
"""Consecutive failures of a worker's copy of the dataset, after which something is missing there."""

MOST_FAULTS = 3
"""Consecutive failures of tasks of the same stages before a worker gets no more of them.

Only tasks that the training node could do count.
"""


@dataclass(eq=False, slots=True)
class LoaderWorker:
    """State of one worker. Times are in seconds of the monotonic clock.

    Attributes:
        processes: Number of processes that make samples.
        admits: Number of tasks that it accepts at once.
        proved: Whether it has made the canary since contact was last lost.
        proving_s: Time since when it makes the canary; None while it does not.
        proof_s: Seconds that it took for the canary.
        answers: Number of tasks that it has done since.
        warm_s: Time by which all its processes are assumed to have begun.
        room: Number of tasks at once that it has not refused.
        refused: Number of refusals of tasks that it was given after its previous refusal.
        faults: Number of consecutive tasks, by kind, that it could not do and the training node could.
        cannot_do: Kinds of tasks that it is not given, with the reason.
        sample_s: Seconds that one of its processes needs for a sample; 0 if unknown.
        given_s: Time at which it was given its last task.
        breaker: Pauses after failures, reset by each task that it has done.
        hangs: Pauses after hangs, reset once it has worked well for as long as the last one.
        failed: Its last failure; empty if it has made something since.
        why_not: Reason why it is not asked any more; empty if it is.
        told_of: Causes of failures that the log has named, each with the words for how long.
    """

    url: str
    client: ServerClient
    processes: int = 1
    admits: int = MOST_SLOTS
    proved: bool = False
    proving_s: float | None = None
    proof_s: float = 0.0
    answers: int = 0
    warm_s: float = math.inf
    room: float = MOST_SLOTS
    refused: int = 0
    faults: Counter[Kind] = field(default_factory=Counter)
    cannot_do: dict[Kind, str] = field(default_factory=dict)
    sample_s: float = 0.0
    given_s: float = 0.0
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(FAILURES))
    hangs: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(HANGS))
    failed: str = ""
    why_not: str = ""
    told_of: set[tuple[str, str]] = field(default_factory=set)

    @property
    def slots(self) -> int:
        """Return the maximum number of tasks at once for one epoch."""
        return max(1, min(self.admits, int(self.room), max(SLOTS, SLOTS_EACH * self.processes)))

    @property
    def places(self) -> int:
        """Return the current number of tasks at once: a worker of unknown speed gets no queue."""
        return self.slots if self.sample_s else max(1, min(self.slots, self.processes))

    @property
    def reason(self) -> str:
        """Return why the worker is not asked any more or not for some stages, or its last failure."""
        return self.why_not or self.failed or "; ".join(sorted({*self.cannot_do.values()}))

    def may(self, now: float) -> bool:
        """Return whether the worker may be asked."""
        return not self.why_not and not self.breaker.left_s(now) and not self.hangs.left_s(now)

    def takes(self, task: Task) -> bool:
        """Return whether the worker is given such tasks."""
        return task.kind not in self.cannot_do

    def told(self, info: Info) -> None:
        """Store what the worker reports about itself."""
        self.processes, self.admits = max(1, info.workers), max(1, info.admits)

    def proves(self, seconds: float) -> None:
        """Record that the worker made the canary; a different one may answer at its address than before."""
        self.proved, self.failed, self.proof_s = True, "", seconds
        self.answers, self.warm_s = 0, math.inf
        self.faults.clear()
        self.cannot_do.clear()

    def given(self, now: float, *, samples: int, tasks: int) -> None:
        """Record that the worker is given a task.

        Args:
            tasks: Tasks that the worker now has, including this one.
        """
        if tasks == 1 and self.forgotten(now, samples):
            self.sample_s = 0.0
        self.given_s = now

    def forgotten(self, now: float, samples: int) -> bool:
        """Return whether an idle worker's known speed is too old for a task of ``samples`` samples."""
        return bool(self.sample_s) and now - self.given_s > PROBE_TIMES * self.sample_s * samples

    def took(self, task: Task, *, now: float, begun_s: float, tasks: int) -> None:
        """Record that the worker has done a task.

        Args:
            begun_s: Time at which the task was assigned.
            tasks: Tasks that the worker then had, including this one.
        """
        sample_s = (now - begun_s) / max(1, len(task.samples)) / max(1.0, tasks / self.processes)
        self.sample_s += (SMOOTHING if self.sample_s else 1.0) * (sample_s - self.sample_s)
        self.breaker.succeed(now)
        self.failed = ""
        self.faults[task.kind] = 0
        self.room = min(MOST_SLOTS, self.room + 1 / self.room)
        self.answers += 1
        if self.answers == self.processes:
            self.warm_s = now + self.proof_s  # other processes may still be at their first task

    def full(self, *, refused: int, tasks: int) -> None:
        """Record that the worker has no place for a task.

        Args:
            refused: Number of its refusals when the task was assigned.
            tasks: Tasks that it still has.
        """
        if refused == self.refused:  # else the task was assigned before the last refusal
            self.room, self.refused = max(1.0, tasks / 2), refused + 1

    def cannot(self, task: Task, error: Exception) -> None:
        """Record that the worker could not do a task that the training node could."""
        self.faults[task.kind] += 1
        self.failed = str(error) or type(error).__name__
        if self.faults[task.kind] >= MOST_FAULTS:
            self.cannot_do[task.kind] = self.failed

    def hung(self, now: float, *, since: float) -> None:
        """Record that the worker hung; it must make the canary again before a batch depends on it.

        Args:
            since: Time at which the task it did not answer was assigned.
        """
        self.failed, self.proved = "it does not answer", False
        if self.hangs.left_s(now):
            return  # another task of this worker has shown it
        if since - self.hangs.until_s > self.hangs.pause_s:
            self.hangs.succeed(now)
        self.hangs.fail(now)

    def failed_with(self, error: Exception, now: float, *, for_good: bool) -> None:
        """Record a failure.

        Args:
            for_good: Whether asking again would not change it.
        """
        self.failed = str(error) or type(error).__name__
        self.breaker.fail(now, least_s=error.retry_after_s if isinstance(error, Overloaded) else 0.0)
        if isinstance(error, CodeFailed):
            for_good = self.breaker.failures >= MOST_CODE_FAILS
        elif not isinstance(error, Overloaded):
            self.proved = False  # a different worker may answer next
        if for_good or not isinstance(error, UpriverError):
            self.why_not = self.failed

    def limit_s(self, usual_s: float, *, samples: int, tasks: int, begun_s: float) -> float:
        """Return how many seconds a task is waited for.

        Args:
            usual_s: Seconds that a process of a worker usually needs for a sample.
            tasks: Tasks that the worker had at the assignment, including this one.
            begun_s: Time of the assignment.
        """
        expected_s = usual_s * samples * max(1.0, tasks / self.processes)
        begins_s = self.proof_s if begun_s < self.warm_s else 0.0  # each process may begin like the first
        return max(LATE_S, begins_s + LATE_TIMES * expected_s)


def faults_text(why_not: Mapping[str, str]) -> str:
    """Return workers' failures by address as one text, with each address once."""
    return "; ".join(f"{url}: {fault.removeprefix(f'{url}: ')}" for url, fault in why_not.items())


def usual_s(workers: Sequence[LoaderWorker]) -> float:
    """Return the mean seconds that a worker's process needs for a sample; 0 if unknown."""
    known = [worker.sample_s for worker in workers if worker.sample_s]
    return fmean(known) if known else 0.0


def deal(
    waiting: Sequence[Task], workers: Sequence[LoaderWorker], under_way: Mapping[str, int], now: float
) -> list[LoaderWorker | None]:
    """Return the worker for each waiting task; None for a task that keeps waiting.

    Args:
        waiting: Tasks, in the order in which they are needed.
        workers: Workers that may be given some.
        under_way: Number of tasks that each has, by address.
        now: Time by the monotonic clock.
    """
    tasks = [under_way.get(worker.url, 0) for worker in workers]
    free = {at for at, worker in enumerate(workers) if tasks[at] < worker.places}
    found: list[LoaderWorker | None] = []
    for task in waiting:
        if not free:
            return found + [None] * (len(waiting) - len(found))
        count = len(task.samples)
        stale = {at for at in free if not tasks[at] and workers[at].forgotten(now, count)}
        sample_s = [0.0 if at in stale else worker.sample_s for at, worker in enumerate(workers)]
        known = [each for each in sample_s if each]
        other_s = fmean(known) if known else 1.0

        def done(
            at: int, sample_s: Sequence[float] = sample_s, other_s: float = other_s
        ) -> tuple[float, float]:
            share = (tasks[at] + 1) / workers[at].processes
            return (sample_s[at] or other_s) * max(1.0, share), share

        first = min((at for at, worker in enumerate(workers) if worker.takes(task)), key=done, default=None)
        found.append(workers[first] if first is not None and first in free else None)
        if first is None:
            continue
        tasks[first] += 1
        if tasks[first] >= workers[first].places:
            free.discard(first)
    return found
