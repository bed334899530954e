"""Check upriver's policy for input pipelines against brute force over ratios, and its guarantees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from upriver.policies import OFFLOAD_POLICIES
from upriver.policies.pipeline import CLOSE, crossing, decide, highest, promise, smallest_ratio, throughput
from upriver.profile.throughput import Candidate, Metrics


def candidate(name: str, rthp: float, ocycle: float) -> Candidate:
    return Candidate(name=name, rthp=rthp, ocycle=ocycle)


def metrics(
    *candidates: Candidate,
    gthp: float = 100,
    lthp: float = 40,
    pcycle: float = 10,
    pseconds: float | None = None,
) -> Metrics:
    return Metrics(gthp=gthp, lthp=lthp, pcycle=pcycle, pseconds=pseconds, candidates=candidates)


speed = st.floats(0.1, 1000)
pairs = st.lists(
    st.tuples(st.one_of(st.just(0.0), speed), st.one_of(st.just(0.0), st.floats(0, 20))),
    min_size=1,
    max_size=4,
)
questions = st.builds(
    lambda gthp, lthp, pairs, pseconds: metrics(
        *(candidate(f"c{number}", *pair) for number, pair in enumerate(pairs)),
        gthp=gthp,
        lthp=lthp,
        pseconds=pseconds,
    ),
    speed,
    speed,
    pairs,
    st.one_of(st.none(), st.floats(0.1, 40)),
)


def brute(given: Metrics, each: Candidate) -> tuple[float, float]:
    """Return the best throughput over a grid of ratios, refined around it, and its smallest ratio."""
    low, high = 0.0, 1.0
    cost = each.ocycle / max(given.pcycle, given.pseconds or 0)
    for _ in range(4):
        ratios = np.linspace(low, high, 401)
        with np.errstate(divide="ignore"):
            times = [
                np.full_like(ratios, 1 / given.gthp),
                ((1 - ratios) + ratios * cost) / given.lthp,
                np.divide(ratios, each.rthp, out=np.where(ratios > 0, np.inf, 0.0), where=each.rthp > 0),
            ]
        found = 1 / np.maximum.reduce(times)
        at = int(np.argmax(found))
        low, high = ratios[max(0, at - 1)], ratios[min(400, at + 1)]
    return float(found[at]), float(ratios[at])


@given(questions)
def test_the_greatest_throughput_is_that_of_brute_force(given):
    for each in given.candidates:
        most, _ = brute(given, each)
        assert highest(given, each) == pytest.approx(most, rel=1e-5)


@given(questions)
def test_the_decision_is_that_of_brute_force(given):
    found = decide(given)
    most = max(brute(given, each)[0] for each in given.candidates)
    gain = most / given.lthp
    assume(abs(gain - 1.1) > 1e-4)
    assert found.offload == (gain > 1.1)
    if not found.offload:
        assert (found.candidate, found.ratio) == (None, 0.0)
        return
    assert promise(given, found) >= most * (1 - CLOSE) * (1 - 1e-5)
    # No smaller ratio of any candidate is as good, and no earlier candidate reaches it at the same ratio.
    for each in given.candidates:
        for ratio in np.linspace(0, max(0.0, found.ratio - 1e-6), 500):
            assert throughput(given, each, float(ratio)) < most * (1 - CLOSE) * (1 + 1e-5)


@given(questions)
def test_what_is_decided_is_sound(given):
    found = decide(given)
    assert 0 <= found.ratio <= 1 and (found.ratio > 0) == found.offload == (found.candidate is not None)
    assert min(given.gthp, given.lthp) <= promise(given, found) * (1 + 1e-9)
    assert promise(given, found) <= given.gthp


@given(st.floats(1e-300, 1e12), st.floats(1e-300, 1e12), st.floats(1e-300, 1e12), st.floats(0, 1e12))
def test_any_numbers_that_metrics_take_are_answered(gthp, lthp, pcycle, other):
    given = metrics(
        candidate("a", other, other), candidate("b", other, 0), gthp=gthp, lthp=lthp, pcycle=pcycle
    )
    found = decide(given)
    assert 0 <= found.ratio <= 1 and math.isfinite(promise(given, found))


# ------------------------------------------------------------------------------------------ golden


def test_both_sides_together_where_they_are_slower_than_the_model():
    given = metrics(candidate("p2", 30, 0))
    found = decide(given)
    assert crossing(given, given.candidates[0]) == pytest.approx(30 / 70)
    assert highest(given, given.candidates[0]) == pytest.approx(70)
    assert found.ratio == pytest.approx(1 - 40 / 69.3)  # 1 % below 70 is enough
    assert promise(given, found) == pytest.approx(69.3)


def test_no_more_than_lacks_where_workers_could_do_all_of_it():
    found = decide(metrics(candidate("p2", 100, 1)))
    assert found.ratio == pytest.approx((1 - 40 / 99) / 0.9)  # FastFlow's would be 1
    assert OFFLOAD_POLICIES["fastflow"].decide(metrics(candidate("p2", 100, 1))).ratio == 1


def test_what_a_sample_made_elsewhere_costs_here_counts():
    cheap, dear = candidate("cheap", 50, 1), candidate("dear", 60, 8)
    assert decide(metrics(dear, cheap)).candidate == "cheap"
    assert not decide(metrics(candidate("p1", 90, 10))).offload  # as much as making it
    assert not decide(metrics(candidate("p1", 90, 20))).offload


def test_a_pipeline_that_waits_more_than_it_computes_is_offloaded_too():
    waits = candidate("p2", 40, 2)
    assert not decide(metrics(waits, pcycle=1)).offload
    found = decide(metrics(waits, pcycle=1, pseconds=10))
    assert found.offload and promise(metrics(waits, pcycle=1, pseconds=10), found) > 70
    # A dataset that computes in several processes takes fewer seconds than CPU seconds.
    assert decide(metrics(waits, pcycle=10, pseconds=1)) == decide(metrics(waits, pcycle=10))


def test_everything_where_the_training_node_keeps_up_with_no_more():
    assert crossing(metrics(candidate("p2", 90, 1)), candidate("p2", 90, 1)) < 1
    assert decide(metrics(candidate("p3", 100, 0), lthp=1)).ratio == pytest.approx(1 - 1 / 99)
    assert crossing(metrics(candidate("p3", 20, 5)), candidate("p3", 90, 5)) == 1


def test_of_those_that_are_as_good_the_smallest_ratio_then_the_first():
    first, second = candidate("first", 60, 1), candidate("second", 60, 1)
    assert decide(metrics(first, second, gthp=90)).candidate == "first"
    assert decide(metrics(second, first, gthp=90)).candidate == "second"
    # Both can feed the model; the one that costs the training node less needs fewer samples for it.
    assert decide(metrics(candidate("more", 95, 4), candidate("less", 95, 0))).candidate == "less"


@pytest.mark.parametrize(
    ("gthp", "rthp", "offload"),
    [
        (44, 40, False),
        (44.1, 40, True),
        (100, 3.9, False),
        (100, 4.1, True),
        (30, 90, False),
        (100, 0, False),
    ],
)
def test_nothing_is_offloaded_unless_more_than_the_threshold_is_won(gthp, rthp, offload):
    found = decide(metrics(candidate("p2", rthp, 0), gthp=gthp))
    assert found.offload is offload
    assert "least" in found.why


def test_the_threshold_is_what_the_metrics_say():
    given = dict(gthp=100.0, lthp=40.0, pcycle=10.0, candidates=(candidate("p2", 40, 0),))
    assert decide(Metrics(**given, speedup_threshold=2.1)).offload is False
    assert decide(Metrics(**given, speedup_threshold=1.9)).offload is True
    # Even with a threshold that any gain passes, a gain too small to measure offloads nothing.
    tiny = given | {"candidates": (candidate("p2", 0.2, 0),)}
    assert decide(Metrics(**tiny, speedup_threshold=1.0)).offload is False


def test_where_there_is_nothing_to_offload_to():
    assert not decide(metrics()).offload
    assert smallest_ratio(metrics(), candidate("p2", 10, 20), 50) == 0


def test_why_holds_the_numbers_that_decided():
    why = decide(metrics(candidate("p2", 30, 0))).why
    for part in ("p2", "42%", "69.3", "40", "30", "100"):
        assert part in why, part
