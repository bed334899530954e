"""Check trials of offload candidates in turns: which are tried, and which one is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataloader.world import World
from upriver.dataloader.autotune.candidate_trials import MORE_TURNS, NEAR, TURNS, CandidateTrials
from upriver.dataloader.autotune.offload_tuner import TunerMeasurements
from upriver.dataloader.autotune.ratio_controller import BatchStep, RatioController, StepWindow
from upriver.dataloader.epoch import EpochWaits
from upriver.policies import OFFLOAD_POLICIES, OffloadDecision
from upriver.policies.pipeline import highest
from upriver.profile.throughput import Candidate, Metrics

OURS = OFFLOAD_POLICIES["upriver"]


def metrics(**rthp: float) -> Metrics:
    """Return metrics in which the first candidate is the cheapest."""
    candidates = tuple(
        Candidate(name=name, rthp=each, ocycle=0.1 + number / 1000)
        for number, (name, each) in enumerate(rthp.items())
    )
    return Metrics(
        gthp=1000.0, lthp=100.0, pcycle=1.0, pseconds=1.0, speedup_threshold=1.1, candidates=candidates
    )


def rivals(policy: str = "upriver", **rthp: float) -> CandidateTrials | None:
    found = metrics(**rthp)
    return CandidateTrials.of(OFFLOAD_POLICIES[policy], found, OFFLOAD_POLICIES[policy].decide(found))


def window(mb: float, *, elsewhere_s: float = 0.0, given: int = 32) -> StepWindow:
    """Return a window of 16 batches of 4, half of them made elsewhere, at most ``given`` samples in all."""
    found = StepWindow()
    for number in range(16):
        there = min(4, given) if number % 2 else 0
        given -= there
        waits = EpochWaits(samples=4, given=there, elsewhere_s=elsewhere_s)
        found.add(BatchStep(waited_s=0.5, consumed_s=0.5, nbytes=int(mb * 1e6), waits=waits))
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


def turns(found: CandidateTrials, **mb: Sequence[float]) -> list[str]:
    order = []
    while (name := found.next) is not None:
        order.append(name)
        found.add(name, window(mb[name][len(found.seen[name])]))
    return order


def test_each_has_its_turn_again_and_again() -> None:
    found = rivals(p1=100.0, p2=100.0)
    assert found is not None
    assert turns(found, p1=[1.0] * TURNS, p2=[2.0] * TURNS) == ["p1", "p2"] * TURNS


def test_those_that_are_near_each_other_have_more_turns_and_the_others_none() -> None:
    found = rivals(p1=100.0, p2=100.0, p3=100.0)
    assert found is not None
    order = turns(found, p1=[10.0] * MORE_TURNS, p2=[5.0] * TURNS, p3=[9.5] * MORE_TURNS)
    assert order == ["p1", "p2", "p3"] * TURNS + ["p1", "p3"] * (MORE_TURNS - TURNS)


@pytest.mark.parametrize(
    ("p2", "taken"),
    [
        ([12.0, 12.0, 12.0], "p2"),
        ([10.4] * MORE_TURNS, "p1"),
        ([10.6] * MORE_TURNS, "p2"),
        ([9.0, 9.0, 50.0, 9.0, 9.0, 9.0], "p1"),
        ([9.0, 11.0, 50.0, 50.0, 11.0, 11.0], "p2"),
        ([10.6, 10.6, 10.6, 9.0, 9.0, 9.0], "p1"),
    ],
)
def test_whoever_gives_clearly_more_at_the_median_is_taken_else_who_costs_less(
    p2: list[float], taken: str
) -> None:
    found = rivals(p1=100.0, p2=100.0)
    assert found is not None
    turns(found, p1=[10.0] * MORE_TURNS, p2=p2)
    assert found.best == taken
    assert f"{taken} is taken" in found.told()
    assert f"(p1 10, p2 {found.throughput('p2'):.4g} MB/s)" in found.told()
    near = abs(found.throughput("p2") - 10.0) < 0.5
    assert ("costs the least here" in found.told()) == near


def test_of_equals_in_all_the_one_that_was_decided_for_is_taken() -> None:
    steered = {name: RatioController(0.5, here=1.0, elsewhere=1.0) for name in ("p1", "p2")}
    found = CandidateTrials(1.0, {"p2": 10.0, "p1": 10.0}, {"p1": 0.1, "p2": 0.1}, steered)
    turns(found, p1=[10.0] * MORE_TURNS, p2=[10.0] * MORE_TURNS)
    assert found.best == "p2"


@pytest.mark.parametrize(("p2", "taken"), [(10.6, "p2"), (10.51, ""), (10.4, ""), (9.4, "")])
def test_nothing_is_tried_too_where_it_promises_about_as_much_and_taken_if_no_other_gives_clearly_more(
    p2: float, taken: str
) -> None:
    found = rivals(p1=20.0, p2=30.0)
    assert found is not None and list(found.seen) == ["", "p2", "p1"]
    turns(found, **{"": [10.0] * MORE_TURNS, "p1": [8.0] * TURNS, "p2": [p2] * MORE_TURNS})
    assert found.best == taken
    said = f"{taken} is taken" if taken else "nothing is offloaded"
    assert f"{said} (nothing 10, p2 {p2:.4g}, p1 8 MB/s)" in found.told()


@given(st.floats(1, 1000), st.floats(0.9, 1.1), st.floats(0.9, 1.1))
def test_one_that_gives_about_the_most_is_taken_and_nothing_wherever_that_does(
    here: float, p1: float, p2: float
) -> None:
    found = rivals(p1=20.0, p2=30.0)
    assert found is not None
    turns(found, **{"": [here] * MORE_TURNS, "p1": [p1 * here] * MORE_TURNS, "p2": [p2 * here] * MORE_TURNS})
    most = max(map(found.throughput, found.seen))
    assert found.throughput(found.best) >= 0.95 * most and (found.best == "") == (here >= 0.95 * most)
    assert (f"{found.best} is taken" if found.best else "nothing is offloaded") in found.told()


@given(st.dictionaries(st.sampled_from(["", "p1", "p2", "p3"]), st.floats(1, 1000), min_size=2))
def test_promises_become_what_turns_have_shown(given_mb: dict[str, float]) -> None:
    """They follow the best one's, stay above the rate without offloading, and hold to 2 %."""
    before = metrics(p1=120.0, p2=110.0, p3=100.0)
    assert OURS.promise is not None
    promises = {
        each.name: OURS.promise(one, OURS.decide(one))
        for each in before.candidates
        for one in [replace(before, candidates=(each,))]
    }
    found = CandidateTrials(
        before.lthp,
        {name: promises.get(name, before.lthp) for name in given_mb},
        {each.name: each.ocycle for each in before.candidates},
        {},
    )
    for name, mb in given_mb.items():
        found.seen[name].extend([mb] * TURNS)
    scale = found.promises[found.best] / given_mb[found.best]
    for each in before.candidates:
        if each.name in given_mb:
            now = replace(each, rthp=each.rthp * found.factor(each.name))
            promised = highest(before, now)
            assert promised == pytest.approx(max(before.lthp, scale * given_mb[each.name]), rel=0.02)


def test_a_job_in_which_workers_turn_out_to_be_of_no_use_offloads_nothing() -> None:
    measured = TunerMeasurements(gthp=1000.0, lthp=100.0, pcycle=1.0, pseconds=1.0, spent=1)
    measured.rthp, measured.ocycles = {"p1": 20.0}, {"p1": 0.1}
    measured.decide(OURS, 1.1, ["p1"])
    found = measured.rivals
    assert found is not None and measured.in_force is None, "nothing has its turn first"
    turns(found, **{"": [100.0] * MORE_TURNS, "p1": [90.0] * MORE_TURNS})
    measured.settle(found)
    assert measured.settled and measured.decision is not None and measured.in_force is None
    assert not measured.decision.offload and "nothing is offloaded" in measured.decision.why
    again = TunerMeasurements(gthp=1000.0, lthp=100.0, pcycle=1.0, pseconds=1.0, rthp=measured.rthp)
    again.ocycles = measured.ocycles
    again.decide(OURS, 1.1, ["p1"])
    assert again.decision is not None and not again.decision.offload


def decided(**rthp: float) -> TunerMeasurements:
    """Return measurements with a decision and rivals."""
    found = TunerMeasurements(gthp=1000.0, lthp=100.0, pcycle=1.0, pseconds=1.0, spent=1)
    found.rthp, found.ocycles = dict(rthp), dict.fromkeys(rthp, 0.1)
    found.decide(OURS, 1.1, list(rthp))
    assert found.rivals is not None
    return found


def test_what_one_waits_for_is_nothing_to_the_ratio_of_another() -> None:
    measured = decided(p1=150.0, p2=120.0)
    found, ratios = measured.rivals, dict[str, list[float]]()
    assert found is not None
    while (name := found.next) is not None:
        assert measured.in_force == name and measured.ratio == found.ratio(name)
        ratios.setdefault(name, []).append(measured.ratio)
        found.add(name, window(10.0) if name == "p1" else window(5.0, elsewhere_s=0.9))
    own = [OURS.decide(metrics(**{name: rthp})).ratio for name, rthp in (("p1", 150.0), ("p2", 120.0))]
    assert ratios["p1"] == [own[0]] * TURNS, "the ratio at which it promises the most"
    assert ratios["p2"][0] == own[1] and ratios["p2"][-1] < ratios["p2"][0] / 2
    measured.settle(found)
    assert measured.in_force == "p1" and measured.ratio == own[0]
    for _ in range(3):
        ratio = measured.steer(window(10.0, elsewhere_s=0.9))
    assert ratio == measured.ratio < own[0], "and from there it is steered on"


def test_one_that_is_steered_to_nothing_has_no_further_turn() -> None:
    measured = decided(p1=150.0, p2=120.0)
    found = measured.rivals
    assert found is not None
    found.steered["p2"].ratio = 0.002
    order = []
    while (name := found.next) is not None:
        order.append(name)
        found.add(name, window(10.0) if name == "p1" else window(10.0, elsewhere_s=0.9, given=1))
    assert order == ["p1", "p2"] + ["p1"] * (TURNS - 1) and found.useless == ["p2"]
    assert "p1 is taken (p1 10 MB/s; p2 was of no use)" in found.told()
    measured.settle(found)
    assert measured.in_force == "p1" and measured.rthp["p1"] > 0 == measured.rthp["p2"]


def test_where_all_are_steered_to_nothing_nothing_is_offloaded() -> None:
    measured = decided(p1=150.0, p2=120.0)
    found = measured.rivals
    assert found is not None
    for name in ("p1", "p2"):
        assert found.next == name
        found.steered[name].ratio = 0.002
        found.add(name, window(10.0, elsewhere_s=0.9, given=1))
    assert found.next is None and measured.ratio > 0, "of what was decided before"
    measured.settle(found)
    assert measured.settled and measured.in_force is None and not measured.ratio
    assert measured.decision is not None and not measured.decision.offload
    assert "nothing is offloaded (p1 was of no use; p2 was of no use)" in measured.decision.why


def test_a_job_takes_the_better_one_and_another_job_goes_by_it() -> None:
    world, measured = World(here=0.1, there=0.1, step=0.05), TunerMeasurements()
    world.train(world.auto(900, measured), measured)
    assert measured.settled and measured.decision is not None
    assert "in turns" in measured.decision.why
    again = TunerMeasurements(
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
    world, measured = World(here=0.1, there=0.1, step=0.05), TunerMeasurements()
    for number in range(120):
        world.train(world.auto(12, measured, number=number), measured)
    assert measured.settled and measured.decision is not None and "in turns" in measured.decision.why


def test_figures_that_are_forgotten_leave_nobody_to_be_tried() -> None:
    measured = TunerMeasurements(gthp=1.0, lthp=1.0, pcycle=1.0, rivals=rivals(p1=100.0, p2=100.0))
    measured.decision = OffloadDecision(offload=True, candidate="p1", ratio=0.5, why="because")
    assert not measured.settled and measured.in_force == "p1"
    measured.forget_candidates()
    assert measured.rivals is None and measured.in_force == "p1"
    measured.rivals = rivals(p1=100.0, p2=100.0)
    measured.forget()
    assert measured.rivals is None
