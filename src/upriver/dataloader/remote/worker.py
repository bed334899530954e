"""One worker as a loader knows it, and which of several gets the next task.

Each task goes to whoever is expected to be done with it first, what that one has before it included: the
earliest completion time (Ibarra, Kim: Heuristic Algorithms for Scheduling Independent Tasks on Nonidentical
Processors, Journal of the ACM 24(2), 1977). So a slow worker gets a task only where the others would not have
done it by then, and a batch never waits for one that another would have made sooner.

    s    seconds that one process of a worker takes for a sample (`LoaderWorker.sample_s`), a running mean
    p    its processes
    n    tasks that it would have, with this one: done after s max(1, n / p) a sample

Departures
    - s is not given. It is what came of the tasks so far, and what is not known yet is taken to be as with
      the others; then a worker gets no more than one task for each of its processes, until one is back.
    - Who was not given anything for PROBE_TIMES of its own tasks is not known any more: it may have been slow
      for a while only. That one task may make others wait takes a fiftieth of the time at most.
    - A task is kept while whoever would be done with it first has no place.

Several training nodes may ask one worker, which then refuses what is too much. Each of them asks for half as
much after that and for one task more with each round, as TCP does on a link that many share (Jacobson:
Congestion Avoidance and Control, SIGCOMM 1988).
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
from upriver.rpc.client import ServerClient

SLOTS, SLOTS_EACH = 4, 2
"""Tasks under way at a worker: for each process one that it makes and one on its way, and four at least."""

MOST_SLOTS = 256
"""Whatever a worker says of itself."""

SMOOTHING = 0.25
"""Of a running mean: the last four tasks or so count."""

PROBE_TIMES = 50

LATE_S, LATE_TIMES = 10.0, 10
"""Who has had a task for longer, and so many times longer than it should take, is not waited for."""

REST_S, MOST_REST_S = 1.0, 30.0
"""A worker that failed is not asked again for so long, doubled each time that it fails again."""

HUNG_REST_S, MOST_HUNG_REST_S = 30.0, 3600.0
"""The same where it had to be waited for; what it has worked well since then is taken off."""

MOST_CODE_FAILS = 3
"""Times in a row that a worker's copy of the dataset may fail: then something is missing there."""

MOST_FAULTS = 3
"""The same of tasks of the same stages that the training node could do: then they are beyond that worker."""


@dataclass(eq=False, slots=True)
class LoaderWorker:
    """One worker, as far as it is known.

    Attributes:
        processes: That make samples.
        admits: Tasks that it takes at once.
        proved: Whether it has made the canary since it was last lost sight of.
        proving_s: Since when it is at the canary, by the monotonic clock; None where it is not.
        proof_s: How long it took for it.
        answers: Tasks that it has done since.
        warm_s: When all of its processes are taken to have begun, by the monotonic clock.
        room: Tasks that it has not refused to have at once.
        refused: How often it has refused one that it was given after it had last refused one.
        faults: Tasks in a row, of each kind, that it could not do and the training node could.
        cannot_do: Kinds of tasks that it is not given, and why.
        sample_s: Seconds that one of its processes takes for a sample; 0 where that is not known.
        given_s: When it was given its last task.
        fails: How often in a row.
        rests_until: It is asked again then.
        rest_s: How long it rested when it was last waited for in vain.
        failed: What it failed with last; empty where it has not since it made something.
        why_not: Why it is not asked any more; empty where it is.
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
    fails: int = 0
    rests_until: float = 0.0
    rest_s: float = 0.0
    failed: str = ""
    why_not: str = ""

    @property
    def slots(self) -> int:
        """Tasks that it is given at once, at most, for one epoch."""
        return max(1, min(self.admits, int(self.room), max(SLOTS, SLOTS_EACH * self.processes)))

    @property
    def places(self) -> int:
        """The same as of now: what nobody has seen it do yet does not wait behind other tasks."""
        return self.slots if self.sample_s else max(1, min(self.slots, self.processes))

    @property
    def reason(self) -> str:
        """Why it is not asked any more, what it failed with last, or why it is not asked for some stages."""
        return self.why_not or self.failed or "; ".join(sorted({*self.cannot_do.values()}))

    def may(self, now: float) -> bool:
        """Whether it may be asked."""
        return not self.why_not and self.rests_until <= now

    def takes(self, task: Task) -> bool:
        """Whether it is given such tasks."""
        return task.kind not in self.cannot_do

    def told(self, info: Info) -> None:
        """What it says of itself."""
        self.processes, self.admits = max(1, info.workers), max(1, info.admits)

    def proves(self, seconds: float) -> None:
        """It has made the canary; whoever answers there may be another one than before.

        Args:
            seconds: That it took for it.
        """
        self.proved, self.failed, self.proof_s = True, "", seconds
        self.answers, self.warm_s = 0, math.inf
        self.faults.clear()
        self.cannot_do.clear()

    def given(self, now: float, *, samples: int, tasks: int) -> None:
        """It is given a task.

        Args:
            now: By the monotonic clock.
            samples: Of the task.
            tasks: That it has now, with this one.
        """
        if tasks == 1 and self.forgotten(now, samples):
            self.sample_s = 0.0
        self.given_s = now

    def forgotten(self, now: float, samples: int) -> bool:
        """Whether what is known of it is too old, for a task of so many samples, where it has no other."""
        return bool(self.sample_s) and now - self.given_s > PROBE_TIMES * self.sample_s * samples

    def took(self, task: Task, *, now: float, begun_s: float, tasks: int) -> None:
        """It has done a task.

        Args:
            task: Which.
            now: By the monotonic clock.
            begun_s: When it was given it, by the same.
            tasks: That it had then, with this one.
        """
        sample_s = (now - begun_s) / max(1, len(task.samples)) / max(1.0, tasks / self.processes)
        self.sample_s += (SMOOTHING if self.sample_s else 1.0) * (sample_s - self.sample_s)
        self.fails, self.failed = 0, ""
        self.faults[task.kind] = 0
        self.room = min(MOST_SLOTS, self.room + 1 / self.room)
        self.answers += 1
        if self.answers == self.processes:
            self.warm_s = now + self.proof_s  # others may be at their first one still

    def full(self, *, refused: int, tasks: int) -> None:
        """It has no place for a task.

        Args:
            refused: How often it had refused one when it was given this one.
            tasks: That it still has.
        """
        if refused == self.refused:  # else it was given while too much was still asked
            self.room, self.refused = max(1.0, tasks / 2), refused + 1

    def cannot(self, task: Task, error: Exception) -> None:
        """It could not do a task that the training node could."""
        self.faults[task.kind] += 1
        self.failed = str(error) or type(error).__name__
        if self.faults[task.kind] >= MOST_FAULTS:
            self.cannot_do[task.kind] = self.failed

    def hung(self, now: float, *, since: float) -> None:
        """It was waited for in vain; it must make the canary again before a batch depends on it.

        Args:
            now: By the monotonic clock.
            since: When it was given what it was waited for.
        """
        self.fails, self.failed, self.proved = self.fails + 1, "it does not answer", False
        if self.rests_until > now:
            return  # as another task of it has shown
        left = 2 * self.rest_s - max(0.0, since - self.rests_until)
        self.rest_s = min(MOST_HUNG_REST_S, max(HUNG_REST_S, left))
        self.rests_until = now + self.rest_s

    def failed_with(self, error: Exception, now: float, *, for_good: bool) -> None:
        """What a failure says of it.

        Args:
            error: Which it was.
            for_good: Whether asking again would not change it.
        """
        self.fails, self.failed = self.fails + 1, str(error) or type(error).__name__
        if for_good or not isinstance(error, UpriverError):
            self.why_not = self.failed
        elif isinstance(error, CodeFailed):
            self.why_not = self.failed if self.fails >= MOST_CODE_FAILS else ""
        else:
            busy = isinstance(error, Overloaded)
            self.proved = self.proved and busy  # who answers next may be another one
            rest_s = min(MOST_REST_S, REST_S * 2 ** min(self.fails - 1, 10))
            self.rests_until = now + max(
                rest_s, error.retry_after_s if isinstance(error, Overloaded) else 0.0
            )

    def limit_s(self, usual_s: float, *, samples: int, tasks: int, begun_s: float) -> float:
        """How long a task is waited for.

        Args:
            usual_s: Seconds for a sample, of a process as there are others.
            samples: Of the task.
            tasks: That it had when it was given this one, with it.
            begun_s: When that was, by the monotonic clock.
        """
        expected_s = usual_s * samples * max(1.0, tasks / self.processes)
        begins_s = self.proof_s if begun_s < self.warm_s else 0.0  # each process may begin like the first
        return max(LATE_S, begins_s + LATE_TIMES * expected_s)


def usual_s(workers: Sequence[LoaderWorker]) -> float:
    """Seconds that a process of a worker takes for a sample; 0 where nobody has made any."""
    known = [worker.sample_s for worker in workers if worker.sample_s]
    return fmean(known) if known else 0.0


def deal(
    waiting: Sequence[Task], workers: Sequence[LoaderWorker], under_way: Mapping[str, int], now: float
) -> list[LoaderWorker | None]:
    """Who gets each of the tasks that wait; None where it goes on waiting.

    Args:
        waiting: Tasks, in the order in which they are needed.
        workers: Who may be given some.
        under_way: Tasks that each has, by address.
        now: By the monotonic clock.
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
