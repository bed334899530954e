"""Check FastFlow's Algorithm 1: both branches, the threshold, the argmax, ties; and its file, strictly."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from upriver.errors import ConfigError
from upriver.policies.fastflow import OffloadDecision, decide, estimate, lower, workers_needed
from upriver.profile.throughput import Candidate, Metrics, metrics_from_json, metrics_to_json


def candidate(name: str, rthp: float, ocycle: float) -> Candidate:
    return Candidate(name=name, rthp=rthp, ocycle=ocycle)


def metrics(*candidates: Candidate, gthp: float = 100, lthp: float = 40, pcycle: float = 10) -> Metrics:
    return Metrics(gthp=gthp, lthp=lthp, pcycle=pcycle, candidates=candidates)


def chosen(decision: OffloadDecision) -> tuple[bool, str | None, float]:
    return decision.offload, decision.candidate, decision.ratio


P1 = candidate("p1", 60, 4)
P2 = candidate("p2", 90, 1)
P3 = candidate("p3", 80, 0.5)
HERE = (False, None, 0.0)


# ------------------------------------------------------------------------------------------ golden


@pytest.mark.parametrize(
    ("gthp", "lthp", "offload"),
    [(40, 40, False), (39, 40, False), (44, 40, False), (44.1, 40, True), (100, 40, True)],
)
def test_nothing_is_offloaded_unless_more_than_the_threshold_can_be_won(gthp, lthp, offload):
    decision = decide(metrics(P2, gthp=gthp, lthp=lthp))
    assert decision.offload is offload
    assert offload or chosen(decision) == HERE


def test_the_threshold_is_what_the_metrics_say():
    given = dict(gthp=100.0, lthp=40.0, pcycle=10.0, candidates=(P2,))
    assert decide(Metrics(**given, speedup_threshold=2.5)).offload is False
    assert decide(Metrics(**given, speedup_threshold=2.4)).offload is True


def test_the_candidate_that_promises_the_most_is_taken_and_upper_over_gthp_where_it_can_make_up_the_lack():
    # Estimates: 40 (1 - 0.4) + 60 = 84, 40 (1 - 0.1) + 90 = 126, 40 (1 - 0.05) + 80 = 118.
    # Lower of p2: 60 (1 + 0.1) = 66 < Upper = 90.
    assert chosen(decide(metrics(P1, P2, P3))) == (True, "p2", 0.9)


def test_the_share_of_the_whole_where_both_sides_together_are_too_slow():
    # Lower of p1: 60 (1 + 0.4) = 84 > Upper = 60.
    assert chosen(decide(metrics(P1))) == (True, "p1", 0.6)
    assert chosen(decide(metrics(candidate("p2", 34.5, 1), lthp=40.5, gthp=200))) == (True, "p2", 0.46)


def test_equal_bounds_take_the_second_branch():
    assert chosen(decide(metrics(candidate("p2", 60, 0), gthp=100))) == (True, "p2", 0.6)
    assert chosen(decide(metrics(candidate("p2", 60.5, 0), gthp=100))) == (True, "p2", 0.605)


def test_overhead_can_make_the_faster_candidate_the_worse_one():
    slower, faster = candidate("slower", 55, 0), candidate("faster", 60, 5)  # 95 against 80
    assert decide(metrics(faster, slower)).candidate == "slower"


def test_of_equal_candidates_the_first_is_taken():
    twin = candidate("twin", P2.rthp, P2.ocycle)
    assert decide(metrics(P1, P2, twin)).candidate == "p2"
    assert decide(metrics(P1, twin, P2)).candidate == "twin"


def test_no_more_than_everything_is_offloaded():
    assert chosen(decide(metrics(candidate("p2", 101, 0)))) == (True, "p2", 1.0)


@pytest.mark.parametrize("candidates", [(), (candidate("p1", 0, 0), candidate("p2", 0, 1))])
def test_where_nothing_can_be_had_elsewhere_nothing_is_offloaded(candidates):
    assert chosen(decide(metrics(*candidates))) == HERE


def test_why_holds_the_numbers_that_decided():
    why = decide(metrics(P1, P2, P3)).why
    for part in ("p2", "126", "100", "40", "90%", "66"):
        assert part in why, part
    assert "1.05 times" in decide(metrics(P2, gthp=42)).why


@pytest.mark.parametrize(
    ("rthp", "most", "number"), [(66, 8, 1), (65, 8, 2), (10, 8, 7), (10, 3, 3), (0, 5, 5), (1000, 8, 1)]
)
def test_as_many_workers_as_lower_over_one_workers_throughput(rthp, most, number):
    assert workers_needed(metrics(), candidate("p2", rthp, 1), most=most) == number


def test_no_worker_is_needed_where_nothing_lacks():
    assert workers_needed(metrics(gthp=40), P2, most=4) == 0
    with pytest.raises(ConfigError, match="most must be at least 1, got 0"):
        workers_needed(metrics(), P2, most=0)


# -------------------------------------------------------------------------------------- properties

positive = st.floats(1e-3, 1e6)
some = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=5)


@given(positive, positive, positive, some)
@example(3.0, 2.0, 1.0, [(5e-324, 0.0)])  # whose share of the samples is below a float's resolution
def test_the_algorithm_line_by_line(gthp, lthp, pcycle, pairs):
    found = decide(
        metrics(
            *(candidate(f"c{n}", *pair) for n, pair in enumerate(pairs)),
            gthp=gthp,
            lthp=lthp,
            pcycle=pcycle,
        )
    )
    if gthp <= lthp or gthp / lthp <= 1.1 or not pairs:
        assert chosen(found) == HERE
        return
    scores = [lthp * (1 - ocycle / pcycle) + rthp for rthp, ocycle in pairs]
    best = scores.index(max(scores))
    rthp, ocycle = pairs[best]
    upper, least = rthp, (gthp - lthp) * (1 + ocycle / pcycle)
    ratio = upper / gthp if least < upper else rthp / (lthp + rthp)
    assert chosen(found) == ((True, f"c{best}", min(1.0, ratio)) if ratio > 0 else HERE)


@given(positive, positive, positive, some)
@example(3.0, 2.0, 1.0, [(5e-324, 0.0)])  # whose share of the samples is below a float's resolution
def test_what_is_decided_is_sound(gthp, lthp, pcycle, pairs):
    given = metrics(
        *(candidate(f"c{n}", *pair) for n, pair in enumerate(pairs)), gthp=gthp, lthp=lthp, pcycle=pcycle
    )
    found = decide(given)
    assert 0 <= found.ratio <= 1 and (found.ratio > 0) == found.offload == (found.candidate is not None)
    for each in given.candidates:
        assert math.isfinite(estimate(given, each)) and math.isfinite(lower(given, each))
    assert metrics_from_json(metrics_to_json(given)) == given
    waits = replace(given, pseconds=lthp)
    assert metrics_from_json(metrics_to_json(waits)) == waits and decide(waits) == found


# ------------------------------------------------------------------------------------------ the file

GOOD = {
    "schema": "upriver.metrics/1",
    "gthp": 100,
    "lthp": 40,
    "pcycle": 10,
    "candidates": [{"name": "p2", "rthp": 90, "ocycle": 1}],
}


def test_a_file_is_read_with_the_papers_threshold_where_it_names_none():
    assert metrics_from_json(json.dumps(GOOD)) == metrics(P2)
    assert metrics_from_json(json.dumps(GOOD | {"speedup_threshold": 2})).speedup_threshold == 2


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e308, "1", True])
def test_seconds_that_cannot_be_are_named(value):
    with pytest.raises(ConfigError, match="pseconds"):
        metrics_from_json(json.dumps(GOOD | {"pseconds": value}))


@pytest.mark.parametrize("field", ["gthp", "lthp", "pcycle", "speedup_threshold"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1e308, 10**400, "1", None, True, [1]])
def test_a_number_that_cannot_be_names_its_field(field, value):
    with pytest.raises(ConfigError, match=field):
        metrics_from_json(json.dumps(GOOD | {field: value}))


@pytest.mark.parametrize("field", ["rthp", "ocycle"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 1e308, 10**400, "1", None, True])
def test_a_candidates_number_that_cannot_be_names_its_field(field, value):
    file = GOOD | {"candidates": [GOOD["candidates"][0] | {field: value}]}
    with pytest.raises(ConfigError, match=rf"candidates\[.*\]\.{field}|\$\.candidates\[\.\.\.\]\.{field}"):
        metrics_from_json(json.dumps(file))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "upriver.metrics/1"),
        ("[]", "object"),
        (json.dumps(GOOD | {"more": 1}), "more"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "gthp"}), "gthp"),
        (json.dumps(GOOD | {"schema": "upriver.profile/1"}), "schema"),
        (json.dumps(GOOD | {"candidates": [{"name": "p2", "rthp": 1}]}), "ocycle"),
        (json.dumps(GOOD | {"candidates": 2 * GOOD["candidates"]}), "'p2' twice"),
        (json.dumps(GOOD | {"candidates": [{"name": "", "rthp": 1, "ocycle": 1}]}), "1 to 200 characters"),
        (json.dumps(GOOD | {"candidates": [{"name": "x" * 201, "rthp": 1, "ocycle": 1}]}), "200"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(text, says):
    with pytest.raises(ConfigError, match=r"upriver\.metrics/1|candidate") as refused:
        metrics_from_json(text)
    assert says in str(refused.value)
