"""Candidates tried in turns: who is, and who is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.dataloader.world import World
from upriver.dataloader.auto import Measured
from upriver.dataloader.epoch import Waits
from upriver.dataloader.rivals import NEAR, TURNS, Rivals
from upriver.dataloader.steer import Step, Window
from upriver.policies import OFFLOAD_POLICIES, Offload
from upriver.profile.metrics import Candidate, Metrics

OURS = OFFLOAD_POLICIES["upriver"]


def metrics(**rthp: float) -> Metrics:
    candidates = tuple(Candidate(name=name, rthp=each, ocycle=0.1) for name, each in rthp.items())
    return Metrics(
        gthp=1000.0, lthp=100.0, pcycle=1.0, pseconds=1.0, speedup_threshold=1.1, candidates=candidates
    )


def rivals(policy: str = "upriver", **rthp: float) -> Rivals | None:
    found = metrics(**rthp)
    return Rivals.of(OFFLOAD_POLICIES[policy], found, OFFLOAD_POLICIES[policy].decide(found))


def window(mb: float) -> Window:
    """16 batches of 4, half of them made elsewhere."""
    found = Window()
    for number in range(16):
        waits = Waits(samples=4, given=4 * (number % 2))
        found.add(Step(waited_s=0.5, consumed_s=0.5, nbytes=int(mb * 1e6), waits=waits))
    return found


def test_who_promises_much_less_is_not_tried() -> None:
    found = rivals(p1=100.0, p2=90.0, p3=10.0)
    assert found is not None and list(found.seen) == ["p1", "p2"]
    assert OURS.promise is not None
    near = NEAR * OURS.promise(metrics(p1=100.0), OURS.decide(metrics(p1=100.0)))
    assert 110 < near < 150, "p3 promises 110"


@pytest.mark.parametrize("rthp", [{"p1": 100.0}, {"p1": 100.0, "p2": 5.0}, {"p1": 5.0, "p2": 5.0}])
def test_one_that_is_clearly_best_or_none_at_all_has_no_rivals(rthp: dict[str, float]) -> None:
    assert rivals(**rthp) is None


def test_a_policy_that_promises_nothing_decides_once() -> None:
    assert rivals("fastflow", p1=100.0, p2=99.0) is None


def turns(found: Rivals, **given: Sequence[float]) -> list[str]:
    order = []
    while (name := found.next) is not None:
        order.append(name)
        found.add(name, window(given[name][len(found.seen[name])]))
    return order


def test_each_has_its_turn_again_and_again() -> None:
    found = rivals(p1=100.0, p2=100.0)
    assert found is not None
    assert turns(found, p1=[1.0] * TURNS, p2=[2.0] * TURNS) == ["p1", "p2"] * TURNS


@pytest.mark.parametrize(
    ("p2", "taken"),
    [
        ([12.0, 12.0, 12.0], "p2"),
        ([10.1, 10.1, 10.1], "p1"),
        ([9.0, 9.0, 50.0], "p1"),
        ([9.0, 11.0, 50.0], "p2"),
    ],
)
def test_whoever_gives_clearly_more_at_the_median_is_taken(p2: list[float], taken: str) -> None:
    found = rivals(p1=100.0, p2=100.0)
    assert found is not None
    turns(found, p1=[10.0] * TURNS, p2=p2)
    assert found.best("p1") == taken
    assert f"{taken} is taken (p1 10, p2 {found.throughput('p2'):.4g} MB/s)" in found.told(taken)


def test_a_job_takes_the_better_one_and_another_job_goes_by_it() -> None:
    world, measured = World(here=0.1, there=0.1, step=0.05), Measured()
    world.train(world.auto(900, measured), measured)
    assert measured.settled and measured.decision is not None
    assert "in turns" in measured.decision.why
    again = Measured(
        gthp=measured.gthp,
        lthp=measured.lthp,
        pcycle=measured.pcycle,
        pseconds=measured.pseconds,
        rthp=dict(measured.rthp),
        ocycles=dict(measured.ocycles),
    )
    other = World(here=0.1, there=0.1, step=0.05)
    other.train(other.auto(1, again), again)
    assert again.settled and again.decision is not None, "with figures that were kept nothing is tried"


def test_short_epochs_go_on_with_a_turn_where_the_last_one_ended() -> None:
    world, measured = World(here=0.1, there=0.1, step=0.05), Measured()
    for number in range(120):
        world.train(world.auto(12, measured, number=number), measured)
    assert measured.settled and measured.decision is not None and "in turns" in measured.decision.why


def test_figures_that_are_forgotten_leave_nobody_to_be_tried() -> None:
    measured = Measured(gthp=1.0, lthp=1.0, pcycle=1.0, rivals=rivals(p1=100.0, p2=100.0))
    measured.decision = Offload(offload=True, candidate="p1", ratio=0.5, why="because")
    assert not measured.settled and measured.in_force == "p1"
    measured.forget_candidates()
    assert measured.rivals is None and measured.in_force == "p1"
    measured.rivals = rivals(p1=100.0, p2=100.0)
    measured.forget()
    assert measured.rivals is None
