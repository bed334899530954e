"""FastFlow's metrics on stages of known cost, by a clock of our own, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from upriver.dataloader.auto import LEAST_STEPS, PREPARED, SKIPPED, Auto, Measured, Steps, num_bytes
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local import Maker
from upriver.dataloader.plan import Stretch
from upriver.dataloader.share import AllHere, Part
from upriver.dataloader.tasks import Arrival, Arrivals, Task
from upriver.pipeline.mapstyle import DONE, START, MapStyle

BATCH = 4
NBYTES = BATCH * 250_000 * 4
"""Of a batch: 4 MB."""


class World:
    """A training node with a clock that moves by what is done, and workers with one of their own.

    A sample takes ``here`` CPU seconds to make, a batch ``receive`` to take in that was made elsewhere, where
    one is ready every ``there`` seconds at best; a step of the model takes ``step``.
    """

    def __init__(self, *, here: float, there: float, step: float, receive: float = 0.0) -> None:
        self.now = self.cpu_s = self.free_at = 0.0
        self.here, self.there, self.step, self.receive = here, there, step, receive
        self.ready: dict[int, float] = {}
        self.arrivals: Arrivals = Queue(self)
        self.made_there = 0

    # as dataset
    def __getitem__(self, index: int) -> torch.Tensor:
        self.now += self.here
        self.cpu_s += self.here
        return torch.zeros(250_000)

    # as elsewhere
    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        self.made_there += len(task.indices)
        self.free_at = max(self.now, self.free_at) + self.there * len(task.indices) / BATCH
        self.ready[task.number] = self.free_at
        value: Any = [torch.zeros(250_000) for _ in task.indices]
        self.arrivals.put(Arrival(task.number, torch.stack(value) if task.whole else value, place="there"))
        return True


class Queue(SimpleQueue[Arrival]):
    """What arrives does so at its time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def get(self, *args: Any) -> Arrival:
        arrival = super().get(*args)
        self.world.now = max(self.world.now, self.world.ready[arrival.number])
        self.world.now += self.world.receive
        self.world.cpu_s += self.world.receive
        return arrival

    def empty(self) -> bool:
        return super().empty()


def collate(rows: list[Any]) -> Any:
    return torch.stack(rows)


def train(world: World, batches: int, candidates: Sequence[str] = ("p2", "p3")) -> tuple[Measured, int]:
    maker = Maker(MapStyle(world), collate)
    indices = [tuple(range(at, at + BATCH)) for at in range(0, batches * BATCH, BATCH)]
    epoch = Epoch(
        0,
        iter(indices),
        maker=maker,
        number_of=int,
        split=AllHere(),
        arrivals=world.arrivals,
        elsewhere=world,
        ahead=4,
    )
    measured = Measured()
    auto = Auto(
        epoch,
        measured,
        here=AllHere,
        candidates=candidates,
        part=lambda name, ratio: Part(ratio, Stretch(start=START, stop=DONE, whole=name == "p3")),
        cpu_s=lambda: world.cpu_s,
        clock=lambda: world.now,
    )
    count = 0
    for batch in auto.batches():
        assert batch.shape == (BATCH, 250_000)
        count += 1
        world.now += world.step
    return measured, count


def test_the_metrics_of_a_job_that_stalls():
    world = World(here=0.1, there=0.2, step=0.1, receive=0.05)
    measured, count = train(world, 400)
    assert count == 400
    assert measured.gthp == pytest.approx(4 / 0.1)  # MB/s
    assert measured.lthp == pytest.approx(4 / 0.5)  # made in the process that trains: 4 x 0.1, and the step
    assert measured.pcycle == pytest.approx(0.4)
    assert measured.ocycles == {"p2": pytest.approx(0.05), "p3": pytest.approx(0.05)}
    for rthp in measured.rthp.values():
        assert rthp == pytest.approx(4 / 0.2, rel=0.05)
    decision = measured.decision
    assert decision is not None and decision.offload and decision.candidate in ("p2", "p3")
    # Lower = 32 x (1 + 0.125) = 36 > Upper = 20: Rthp / (Lthp + Rthp).
    assert decision.ratio == pytest.approx(20 / 28, rel=0.03)
    rest = 400 * BATCH - 2 * (2 * PREPARED + SKIPPED + LEAST_STEPS + 10) * BATCH
    assert world.made_there >= decision.ratio * rest * 0.8


def test_a_job_that_does_not_stall_never_asks_anybody():
    world = World(here=0.001, there=0.1, step=0.5)
    measured, count = train(world, 100)
    assert count == 100 and world.made_there == 0
    assert measured.decision is not None and not measured.decision.offload
    assert not measured.rthp and "1.01 times" in measured.decision.why


def test_an_epoch_that_is_too_short_decides_nothing_and_loses_nothing():
    for batches in (0, 1, PREPARED, 2 * PREPARED + 3):
        measured, count = train(World(here=0.1, there=0.2, step=0.1), batches)
        assert count == batches and measured.decision is None


def test_steps_are_enough_when_they_tell_the_same():
    steady, shaky = Steps(), Steps()
    for number in range(LEAST_STEPS):
        assert not steady.enough
        steady.add(0.1 + 0.001 * (number % 2), 10**6)
        shaky.add(0.1 + 0.2 * (number % 2), 10**6)
    assert steady.enough and not shaky.enough
    assert steady.throughput == pytest.approx(9.95, rel=0.01)


def test_bytes_of_a_batch():
    batch = {"x": torch.zeros(3, 4), "more": [torch.zeros(2, dtype=torch.uint8), ("abc", 5, None)]}
    assert num_bytes(batch) == 48 + 2 + 3
