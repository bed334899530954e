"""Simulate a training node, its loader processes and workers elsewhere, on a clock that never sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from upriver.dataloader.autotune.offload_tuner import OffloadTuner, TunerMeasurements
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local.workers import SampleMaker
from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.share import OffloadShare
from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.pipeline.mapstyle import MapStyle
from upriver.policies import OFFLOAD_POLICIES, OffloadDecision
from upriver.types import DONE, START

BATCH = 4
SAMPLE = torch.zeros(1).expand(250_000)
"""1 MB by its shape, without memory."""

Change = Callable[["World"], None]


class Queue(SimpleQueue[Arrival]):
    """Deliver arrivals at their time, each at a cost for the receiving thread."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.coming = world, list[tuple[float, int, Arrival, float]]()

    def at(self, time: float, arrival: Arrival, cost: float = 0.0) -> None:
        heapq.heappush(self.coming, (time, arrival.number, arrival, cost))

    def get(self, *args: Any) -> Arrival:
        time, _, arrival, cost = heapq.heappop(self.coming)
        self.world.now = max(self.world.now, time) + cost
        self.world.cpu_s += cost
        return arrival

    def empty(self) -> bool:
        return not self.coming or self.coming[0][0] > self.world.now


class Processes:
    """Loader processes: each does one task at a time."""

    def __init__(self, world: World) -> None:
        self.world, self.free_at = world, [world.now] * world.processes

    def start(self, arrivals: Arrivals, tasks: Iterable[Task]) -> Processes:
        for task in tasks:
            self.give(task)
        return self

    def give(self, task: Task) -> None:
        world, work = self.world, self.world.here * len(task.indices)
        first = min(range(len(self.free_at)), key=self.free_at.__getitem__)
        self.free_at[first] = max(world.now, self.free_at[first]) + work
        world.cpu_s += work
        value = world.made(task)
        world.arrivals.at(self.free_at[first], Arrival(task.number, value))

    def let_go(self, made: object) -> None: ...

    def halt(self) -> None: ...


class World:
    """The costs of a simulated job.

    Attributes:
        here: CPU seconds of a sample on the training node.
        there: Seconds of a sample elsewhere, where samples are made one after another.
        step: Seconds of a training step per batch.
        receive: CPU seconds to receive a batch that was made elsewhere.
        latency: Minimum seconds until such a batch arrives.
        processes: Loader processes; 0: the training thread makes samples.
        dead: Whether all workers elsewhere refuse tasks.
        bad: Samples that cannot be made.
    """

    def __init__(
        self,
        *,
        here: float,
        there: float,
        step: float,
        receive: float = 0.0,
        latency: float = 0.0,
        processes: int = 0,
        bad: Container[int] = (),
    ) -> None:
        self.now = self.cpu_s = self.free_at = 0.0
        self.here, self.there, self.step, self.receive = here, there, step, receive
        self.latency, self.processes, self.dead, self.bad = latency, processes, False, bad
        self.arrivals: Queue = Queue(self)
        self.made_there = 0
        self.ratios: list[float] = []
        self.collate: Callable[[list[Any]], Any] = list

    # as dataset
    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise LookupError(f"sample {index} is gone")
        self.now += self.here
        self.cpu_s += self.here
        return SAMPLE

    def made(self, task: Task) -> Any:
        rows = [SAMPLE] * len(task.indices)
        return self.collate(rows) if task.whole else rows

    # as elsewhere
    slots = 0

    def late(self) -> list[int]:
        return []

    coming = False

    @property
    def ready(self) -> bool:
        return not self.dead

    def look(self, task: Task) -> bool:
        return self.ready

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        if self.dead:
            return False
        count = len(task.indices)
        self.made_there += count
        self.free_at = max(self.now, self.free_at) + self.there * count
        arrival = Arrival(task.number, self.made(task), place="there")
        self.arrivals.at(self.free_at + self.latency, arrival, self.receive * count / BATCH)
        return True

    def epoch(self, batches: int, split: OffloadShare, *, number: int = 0, hold: bool = False) -> Epoch:
        self.arrivals = Queue(self)
        epoch = Epoch(
            number,
            (tuple(range(at, at + BATCH)) for at in range(0, batches * BATCH, BATCH)),
            maker=SampleMaker(MapStyle(self), self.collate),
            split=split,
            arrivals=self.arrivals,
            elsewhere=self,
            ahead=4 + 2 * self.processes,
            hold=hold,
            clock=lambda: self.now,
        )
        if self.processes:
            epoch.use(Processes(self))  # type: ignore[arg-type]
        return epoch

    def auto(
        self,
        batches: int,
        measured: TunerMeasurements,
        *,
        number: int = 0,
        policy: str = "upriver",
        candidates: Sequence[str] = ("p2", "p3"),
        why_not: Callable[[], Mapping[str, str]] = dict,
    ) -> Iterator[Any]:
        epoch = self.epoch(batches, part(measured.decision), number=number, hold=measured.measuring)
        return self.auto_of(epoch, measured, policy=policy, candidates=candidates, why_not=why_not)

    def auto_of(
        self,
        epoch: Epoch,
        measured: TunerMeasurements,
        *,
        policy: str = "upriver",
        candidates: Sequence[str],
        why_not: Callable[[], Mapping[str, str]] = dict,
    ) -> Iterator[Any]:
        return OffloadTuner(
            epoch,
            measured,
            candidates=candidates,
            part=lambda name, ratio: OffloadShare(ratio, stretch(whole=name == "p3")),
            policy=OFFLOAD_POLICIES[policy],
            warm=self.processes,
            why_not=why_not,
            cpu_s=lambda: self.cpu_s,
            clock=lambda: self.now,
        )

    def train(
        self,
        batches: Iterator[Any],
        measured: TunerMeasurements | None = None,
        changes: Mapping[int, Change] | None = None,
    ) -> list[float]:
        """Return the time at which each batch was consumed; keep the ratio in force at each."""
        times = []
        for number, batch in enumerate(batches):
            assert len(batch) == BATCH
            self.now += self.step
            times.append(self.now)
            if changes and number in changes:
                changes[number](self)
            if measured is not None:
                self.ratios.append(measured.decision.ratio if measured.decision is not None else -1.0)
        return times


def stretch(*, whole: bool) -> OffloadStretch:
    """Return the stretch of all stages."""
    return OffloadStretch(start=START, stop=DONE, whole=whole)


def part(decision: OffloadDecision | None) -> OffloadShare:
    if decision is None or decision.candidate is None:
        return OffloadShare(0.0, stretch(whole=False))
    return OffloadShare(decision.ratio, stretch(whole=decision.candidate == "p3"))


def rate(times: Sequence[float], last: int) -> float:
    """Return MB/s over the last batches."""
    return BATCH * last / (times[-1] - times[-1 - last])


def best(make: Callable[[], World], *, whole: bool) -> float:
    """Return MB/s at the best ratio of a sweep in tenths."""
    rates = []
    for tenth in range(11):
        world = make()
        rates.append(rate(world.train(world.epoch(200, OffloadShare(tenth / 10, stretch(whole=whole)))), 150))
    return max(rates)
