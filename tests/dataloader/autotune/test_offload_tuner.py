"""Check FastFlow's metrics on stages of known cost, by a simulated clock, and the decisions from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch

from tests.dataloader.world import BATCH, World, part
from tests.examples import some
from upriver.dataloader.autotune.offload_tuner import (
    LEAST_STEPS,
    PREPARED,
    SKIPPED,
    TimedSteps,
    TunerMeasurements,
)
from upriver.dataloader.prefetch_limit import num_bytes
from upriver.dataloader.tasks import Task


def train(
    world: World,
    batches: int,
    *,
    measured: TunerMeasurements | None = None,
    number: int = 0,
    leave: int | None = None,
    policy: str = "fastflow",
    candidates: Sequence[str] = ("p2", "p3"),
) -> tuple[TunerMeasurements, int]:
    """Return an epoch's measurements and its number of batches; ``leave`` stops the epoch early."""
    measured = measured or TunerMeasurements()
    auto = world.auto(batches, measured, number=number, policy=policy, candidates=candidates)
    return measured, len(world.train(islice(auto, leave)))


def test_the_metrics_of_a_job_that_stalls():
    world = World(here=0.1, there=0.05, step=0.1, receive=0.05)
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


def test_workers_that_are_far_slower_are_not_timed_beside_the_model():
    """Their preparation rate is their rate; FastFlow times each of them all the same."""
    took = {}
    for policy in ("upriver", "fastflow"):
        world = World(here=0.05, there=0.5, step=0.1, receive=0.01)
        measured, count = train(world, 400, policy=policy)
        assert count == 400
        assert measured.rthp == {name: pytest.approx(4 / 2, rel=0.06) for name in ("p2", "p3")}
        assert measured.ocycles == {name: pytest.approx(0.01) for name in ("p2", "p3")}
        took[policy] = {name: len(measured.timed[name].both.seconds) for name in ("p2", "p3")}
    assert took["upriver"] == {"p2": 0, "p3": 0}
    assert min(took["fastflow"].values()) >= LEAST_STEPS


def test_a_job_that_does_not_stall_never_asks_anybody():
    world = World(here=0.001, there=0.025, step=0.5)
    measured, count = train(world, 100)
    assert count == 100 and world.made_there == 0
    assert measured.decision is not None and not measured.decision.offload
    assert not measured.rthp and "1.01 times" in measured.decision.why


def test_an_epoch_that_is_too_short_decides_nothing_and_loses_nothing():
    for batches in (0, 1, PREPARED, 2 * PREPARED + 3):
        measured, count = train(World(here=0.1, there=0.05, step=0.1), batches)
        assert count == batches and measured.decision is None


@pytest.mark.parametrize("processes", [0, 2])
def test_many_short_epochs_decide_as_one_long_one_does(processes: int):
    def job() -> World:
        return World(here=0.1, there=0.05, step=0.1, receive=0.05, processes=processes)

    long, _ = train(job(), 400)
    world, measured = job(), TunerMeasurements()
    epochs = 0
    while measured.decision is None:
        _, count = train(world, 5, measured=measured, number=epochs)
        assert count == 5
        epochs += 1
        assert epochs < 60
    assert measured.gthp == pytest.approx(long.gthp) and measured.pcycle == pytest.approx(long.pcycle)
    assert measured.lthp == pytest.approx(long.lthp, rel=0.2)  # each starts with no prefetched batches
    assert measured.ocycles == pytest.approx(long.ocycles)
    assert measured.rthp == pytest.approx(long.rthp, rel=0.1)
    assert long.decision is not None and measured.decision.ratio == pytest.approx(
        long.decision.ratio, rel=0.1
    )


@pytest.mark.parametrize(("batches", "decides"), [(1, False), (2, False), (3, True)])
def test_the_shortest_epochs_that_decide(batches: int, decides: bool):
    measured = TunerMeasurements()
    for number in range(120):
        train(World(here=0.1, there=0.05, step=0.1, processes=2), batches, measured=measured, number=number)
    assert (measured.decision is not None) is decides


def test_an_epoch_that_is_left_early_loses_nothing_that_was_timed():
    world, measured = World(here=0.1, there=0.05, step=0.1), TunerMeasurements()
    for number in range(40):
        train(world, 30, measured=measured, number=number, leave=7)
    assert measured.decision is not None and measured.gthp == pytest.approx(40)


def test_what_a_sample_raises_takes_the_place_of_its_batch_and_measuring_goes_on():
    world, measured = World(here=0.1, there=0.05, step=0.1, bad=range(0, 480, 48)), TunerMeasurements()
    batches = world.auto(120, measured, policy="fastflow", candidates=("p2",))
    handed_out = raised = 0
    while True:
        try:
            next(batches)
        except LookupError:
            raised += 1
        except StopIteration:
            break
        else:
            handed_out += 1
            world.now += world.step
    assert raised > 1 and handed_out + raised == 120
    assert measured.decision is not None and measured.gthp == pytest.approx(40)


class Faulty(World):
    """Workers that skip some of their tasks."""

    given = 0

    def __init__(self, lost: Callable[[int], bool]) -> None:
        super().__init__(here=0.1, there=0.05, step=0.1, receive=0.05)
        self.lost = lost

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        self.given += 1
        return not self.lost(self.given) and super().give(task, raw)


@pytest.mark.parametrize("policy", ["upriver", "fastflow"])
def test_where_no_worker_does_anything_nothing_is_measured_of_them(policy: str):
    world, measured = Faulty(lambda number: True), TunerMeasurements()
    world.dead = True
    why_not = {"http://a": "http://a: Connection refused"}
    batches = world.auto(200, measured, policy=policy, why_not=lambda: why_not)
    assert len(world.train(batches)) == 200
    assert not measured.rthp and not measured.ocycles and measured.nobody
    decision = measured.decision
    assert decision is not None and not decision.offload and measured.in_force == (None, 0.0)
    assert decision.why == "nothing is offloaded, as no worker could be used (http://a: Connection refused)"
    assert measured.useless == ["p2"], "with others it would be the same"


@pytest.mark.parametrize("policy", ["upriver", "fastflow"])
def test_workers_that_come_later_are_measured_as_soon_as_they_are_there(policy: str):
    world, measured = Faulty(lambda number: False), TunerMeasurements()
    world.dead = True

    def come(world: World) -> None:
        assert measured.nobody and measured.decision is not None
        world.dead = False

    world.train(world.auto(400, measured, policy=policy), changes={200: come})
    assert measured.decision is not None and measured.decision.offload and not measured.nobody
    assert measured.rthp == {name: pytest.approx(20, rel=0.1) for name in ("p2", "p3")}


@pytest.mark.full
def test_workers_that_are_there_and_do_nothing_are_measured_anew_after_a_while():
    measured = TunerMeasurements()
    world = Faulty(lambda number: number < 30)
    world.train(world.auto(12_000, measured, policy="upriver"), changes={200: lambda _: _useless(measured)})
    assert measured.decision is not None and measured.decision.offload and not measured.nobody
    assert measured.rthp and all(rthp == pytest.approx(20, rel=0.1) for rthp in measured.rthp.values())


class Booting(World):
    """Workers that refuse tasks first, then prove their first sample, then are ready."""

    def __init__(self, refused: int) -> None:
        super().__init__(here=0.1, there=0.05, step=0.1, receive=0.05)
        self.refused, self.proving = refused, 5

    @property
    def ready(self) -> bool:
        return not self.refused and not self.proving

    @property
    def coming(self) -> bool:  # type: ignore[override]
        self.proving -= bool(not self.refused and self.proving)
        return not self.refused and self.proving > 0

    def look(self, task: Task) -> bool:
        self.refused -= bool(self.refused)
        return self.ready

    def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
        return self.look(task) and super().give(task, raw)


@pytest.mark.parametrize("refused", some(4, range(1, 40, 3)))
def test_a_worker_that_begins_late_has_all_its_tries(refused: int):
    """The worker may arrive during any of its tries."""
    world, measured = Booting(refused), TunerMeasurements()
    world.train(world.auto(300, measured, policy="fastflow", candidates=("p2",)))
    assert measured.rthp == {"p2": pytest.approx(20, rel=0.1)}
    assert measured.decision is not None and measured.decision.offload


@pytest.mark.full
@pytest.mark.parametrize("policy", ["upriver", "fastflow"])
def test_workers_that_are_away_for_a_while_are_measured_for_what_was_left_out(policy: str):
    measured = TunerMeasurements()

    class Restarting(World):
        since: float | None = None

        @property
        def ready(self) -> bool:
            if self.since is None and "p2" in measured.rthp:
                self.since = self.now
            return self.since is None or self.now - self.since > 60

        def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
            return self.ready and super().give(task, raw)

    world = Restarting(here=0.1, there=0.05, step=0.1, receive=0.05)
    candidates, seen = ("p2", "p3", "p1"), list[str]()

    def look(_: World) -> None:
        assert measured.decision is not None
        seen.append(measured.decision.why)

    batches = world.auto(900, measured, policy=policy, candidates=candidates)
    world.train(batches, changes={110: look})
    assert "not p3, p1, which workers could not be used for" in seen[0]
    assert measured.rthp.keys() == set(candidates) and not measured.useless
    assert measured.decision is not None and "not" not in measured.decision.why.split(";")[-1]


@pytest.mark.full
def test_workers_that_come_and_fail_each_time_are_measured_ever_more_rarely():
    class Flapping(World):
        """Run out of memory soon after each start."""

        left = 0

        @property
        def ready(self) -> bool:
            return self.left > 0

        def look(self, task: Task) -> bool:
            self.left = 5
            return True

        def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
            self.left -= self.left > 0
            return self.left > 0 and super().give(task, raw)

    class Counting(TunerMeasurements):
        decided = 0

        def decide(self, *arguments: Any) -> None:
            self.decided += 1
            super().decide(*arguments)

    for policy in ("upriver", "fastflow"):
        world, measured = Flapping(here=0.1, there=0.05, step=0.1, receive=0.05), Counting()
        assert len(world.train(world.auto(12_000, measured, policy=policy))) == 12_000
        assert 3 <= measured.decided <= 16 and not measured.rthp


def _useless(measured: TunerMeasurements) -> None:
    assert measured.useless == ["p2", "p3"] and measured.nobody and not measured.waiting


@pytest.mark.parametrize(
    "lost",
    some(
        1,
        [
            lambda number: not number % 20,  # they cannot do some
            lambda number: number <= 8,  # or start late
            lambda number: 10 < number <= 18,  # or are away for a while
        ],
    ),
)
def test_what_is_made_here_in_place_of_a_worker_is_not_counted_as_its(lost: Callable[[int], bool]):
    measured, count = train(Faulty(lost), 600)
    assert count == 600
    assert measured.rthp == {name: pytest.approx(20, rel=0.2) for name in ("p2", "p3")}
    assert all(rthp < 22 for rthp in measured.rthp.values())
    assert measured.ocycles == {name: pytest.approx(0.05, abs=0.01) for name in ("p2", "p3")}


def test_a_candidate_for_which_workers_do_half_of_their_tasks_is_left_out():
    measured, count = train(Faulty(lambda number: bool(number % 2)), 600)
    assert count == 600 and not measured.rthp and measured.useless == ["p2", "p3"]
    assert measured.decision is not None and "what they were given has come back" in measured.decision.why


def test_what_one_candidate_cannot_do_is_held_against_no_other():
    class NoBatches(World):
        def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
            return not task.whole and super().give(task, raw)

    measured, _ = train(NoBatches(here=0.1, there=0.05, step=0.1, receive=0.05), 600, policy="upriver")
    assert measured.useless == ["p3"] and set(measured.rthp) == {"p2"}
    assert measured.decision is not None and measured.decision.candidate == "p2"
    assert "not p3, which workers could not be used for" in measured.decision.why


def test_cpu_seconds_that_fall_end_no_epoch():
    """A counted process may end between two readings."""

    class Falling(World):
        def give(self, task: Task, raw: Sequence[Any] | None) -> bool:
            self.cpu_s -= 30.0
            return super().give(task, raw)

    measured, count = train(Falling(here=0.1, there=0.05, step=0.1, receive=0.05), 400)
    assert count == 400 and measured.decision is not None
    assert measured.ocycles == {"p2": 0.0, "p3": 0.0}


@dataclass
class Bag:
    """A batch type that no loader can inspect."""

    rows: list[Any]


@pytest.mark.parametrize("policy", ["upriver", "fastflow"])
def test_batches_that_show_no_bytes_count_by_their_samples(policy: str):
    """Each sample has 1 MB, as the other samples of this world."""
    found = []
    for bagged in (False, True):
        world, measured = World(here=0.1, there=0.05, step=0.1, receive=0.05), TunerMeasurements()
        world.collate = Bag if bagged else list
        batches = world.auto(400, measured, policy=policy)
        for batch in batches:
            assert isinstance(batch, Bag if bagged else list)
            world.now += world.step
        assert measured.by_samples is bagged
        found.append((measured.gthp, measured.lthp, measured.rthp, measured.decision))
    assert found[0] == found[1]
    decision = found[1][-1]
    assert decision is not None and decision.offload and decision.ratio > 0.5


def test_sizes_are_of_one_kind_throughout():
    bytes_first, samples_first = TunerMeasurements(), TunerMeasurements()
    assert [bytes_first.size_of(batch, 2) for batch in ([b"abc"], Bag([]), [b"a"])] == [3, 0, 1]
    assert [samples_first.size_of(batch, 2) for batch in (Bag([]), [b"abc"])] == [2_000_000, 2_000_000]


def test_steps_are_enough_when_they_tell_the_same():
    steady, shaky = TimedSteps(), TimedSteps()
    for number in range(LEAST_STEPS):
        assert not steady.enough()
        steady.add(0.1 + 0.001 * (number % 2), 10**6)
        shaky.add(0.1 + 0.2 * (number % 2), 10**6)
    assert steady.enough() and not shaky.enough()
    assert steady.throughput == pytest.approx(9.95, rel=0.01)


def test_what_workers_add_is_enough_when_it_is_known_as_exactly_as_what_there_is_beside_it():
    shaky = TimedSteps()
    for number in range(LEAST_STEPS):
        shaky.add(0.1 + 0.02 * (number % 2), 10**6)  # about 9 MB/s, to 3 %
    assert not shaky.enough() and not shaky.enough(alone=10.0)
    assert shaky.enough(alone=20.0)


def test_bytes_of_a_batch():
    batch = {"x": torch.zeros(3, 4), "more": [torch.zeros(2, dtype=torch.uint8), ("abc", 5, None)]}
    assert num_bytes(batch) == 48 + 2 + 3
    assert num_bytes([torch.eye(3).to_sparse(), torch.zeros(2)]) == 8


def test_an_epoch_whose_measuring_was_interrupted_has_all_of_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, measured = World(here=0.1, there=0.05, step=0.1), TunerMeasurements()
    epoch = world.epoch(40, part(None), hold=True)
    batches = world.auto_of(epoch, measured, candidates=("p2",))

    def interrupted(count: int, **how: float) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(epoch, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert len(world.train(batches)) == 40 and measured.decision is None
