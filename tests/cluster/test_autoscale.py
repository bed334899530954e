"""Test the number of replicas: bounds and steps on random loads, and the policy as Ray Serve calls it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from upriver.cluster import autoscale
from upriver.cluster.autoscale import (
    CALM,
    FULL,
    SETTLE_S,
    TARGET,
    TARGET_BYTES,
    UTILISATION,
    WAITING,
    decide,
    desired_replicas,
    policy,
    report,
)

T = 1000
LOADS = st.lists(st.integers(0, 20 * T), max_size=12)
BUSY = st.lists(st.floats(0, 1), max_size=12)


@st.composite
def bounds(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw the minimum, the maximum, and the current number."""
    least = draw(st.integers(1, 10))
    most = draw(st.integers(least, 20))
    return least, most, draw(st.integers(least, most))


@given(LOADS, bounds(), BUSY)
def test_it_keeps_to_the_bounds_and_goes_down_by_one_at_most(
    queued: list[int], limits: tuple[int, int, int], busy: list[float]
) -> None:
    least, most, current = limits
    wanted = desired_replicas(queued, current, least, most, T, utilisation=busy)
    assert least <= wanted <= most
    assert wanted >= current - 1


@given(LOADS, bounds(), BUSY)
def test_it_is_enough_for_the_queue_or_all_there_may_be(
    queued: list[int], limits: tuple[int, int, int], busy: list[float]
) -> None:
    least, most, current = limits
    wanted = desired_replicas(queued, current, least, most, T, utilisation=busy)
    assert wanted == most or wanted * T >= sum(queued)


@given(LOADS, bounds(), BUSY)
def test_more_at_once_is_no_more_than_the_queue_asks_for(
    queued: list[int], limits: tuple[int, int, int], busy: list[float]
) -> None:
    least, most, current = limits
    wanted = desired_replicas(queued, current, least, most, T, utilisation=busy)
    if wanted > current:
        assert wanted == min(most, math.ceil(sum(queued) / T))


@given(LOADS, st.integers(0, 11), st.integers(1, 5 * T), bounds(), BUSY)
def test_a_longer_queue_never_asks_for_fewer(
    queued: list[int], index: int, more: int, limits: tuple[int, int, int], busy: list[float]
) -> None:
    assume(index < len(queued))
    least, most, current = limits
    longer = [load + more * (i == index) for i, load in enumerate(queued)]
    assert desired_replicas(longer, current, least, most, T, utilisation=busy) >= desired_replicas(
        queued, current, least, most, T, utilisation=busy
    )


@given(st.integers(0, 40 * T), st.floats(0, 10), bounds())
def test_a_load_that_stays_is_answered_by_a_number_that_stays(
    queued: int, work: float, limits: tuple[int, int, int]
) -> None:
    """From any number of replicas, the number moves one way, then rests: it never oscillates."""
    least, most, current = limits
    steps: list[int] = []
    for _ in range(2 * most):
        loads = [queued / current] * current
        busy = [min(1.0, work / current)] * current
        wanted = desired_replicas(loads, current, least, most, T, utilisation=busy)
        steps.append(wanted - current)
        current = wanted
    assert steps[-1] == 0
    assert all(step >= 0 for step in steps) or all(step <= 0 for step in steps)


def test_one_fewer_only_when_the_others_can_take_it_over() -> None:
    calm = [0.0, 0.0, 0.0]
    assert desired_replicas(calm, 3, 1, 5, T) == 2
    assert desired_replicas(calm, 3, 3, 5, T) == 3, "never fewer than the least"
    left = 2 * CALM * T
    assert desired_replicas([left, 0, 0], 3, 1, 5, T) == 2
    assert desired_replicas([left + 1, 0, 0], 3, 1, 5, T) == 3, "the next request would bring it back"
    busy = 2 * FULL / 3
    assert desired_replicas(calm, 3, 1, 5, T, utilisation=[busy - 0.01] * 3) == 2
    assert desired_replicas(calm, 3, 1, 5, T, utilisation=[busy + 0.01] * 3) == 3, "an empty queue, all busy"
    assert desired_replicas([0.0, 0.0], 3, 1, 5, T) == 3, "one has not said how it is: it has just started"


def test_more_at_once_fewer_after_a_while_in_which_it_was_so_all_the_time() -> None:
    assert decide(5, 2, now_s=0.0, calm_since_s=None).replicas == 5
    first = decide(2, 3, now_s=10.0, calm_since_s=None, settle_s=60)
    assert (first.replicas, first.calm_since_s) == (3, 10.0)
    later = decide(2, 3, now_s=69.0, calm_since_s=first.calm_since_s, settle_s=60)
    assert (later.replicas, later.calm_since_s) == (3, 10.0)
    broken = decide(3, 3, now_s=69.5, calm_since_s=later.calm_since_s, settle_s=60)
    assert (broken.replicas, broken.calm_since_s) == (3, None), "a queue in between, and it begins anew"
    done = decide(2, 3, now_s=70.0, calm_since_s=later.calm_since_s, settle_s=60)
    assert (done.replicas, done.calm_since_s) == (2, None), "and the next one has to wait again"


# ------------------------------------------------------------------------------ as Ray Serve calls it


@dataclass
class Point:
    timestamp: float
    value: float


@dataclass
class Context:
    """Used part of a ``ray.serve.config.AutoscalingContext``, under its names."""

    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    raw_metrics: dict[str, dict[str, list[Point]]] | None
    policy_state: dict[str, Any] = field(default_factory=dict)


def metrics(*loads: tuple[int, float]) -> dict[str, dict[str, list[Point]]]:
    """Return the last report of each replica, after an older one with another value."""
    found: dict[str, dict[str, list[Point]]] = {}
    for number, (waiting, busy) in enumerate(loads):
        for name, value in report(waiting_bytes=waiting, utilisation=busy, target_bytes=T).items():
            found.setdefault(name, {})[f"replica {number}"] = [Point(1.0, value + 7 * T), Point(2.0, value)]
    return found


def test_reports_are_numbers_by_name() -> None:
    assert report(waiting_bytes=3, utilisation=0.5, target_bytes=7) == {
        WAITING: 3.0,
        UTILISATION: 0.5,
        TARGET: 7.0,
    }
    assert all(
        type(value) is float for value in report(waiting_bytes=3, utilisation=1, target_bytes=7).values()
    )


def test_the_policy_goes_by_the_last_reports() -> None:
    context = Context(2, 1, 8, metrics((3 * T, 1.0), (2 * T, 1.0)))
    assert policy(context)[0] == 5


def test_the_policy_without_reports_leaves_things_as_they_are() -> None:
    for raw in (None, {}, {WAITING: {}}, {WAITING: {"replica 0": []}}):
        replicas, state = policy(Context(3, 1, 8, raw))
        assert (replicas, list(state.values())) == (3, [None])


def test_the_policy_counts_replicas_that_are_on_their_way() -> None:
    """Two have reported, and five are expected: the queue of the two is no reason for more."""
    assert policy(Context(5, 1, 8, metrics((2 * T, 1.0), (3 * T, 1.0))))[0] == 5


def test_the_policy_goes_down_one_by_one_and_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(autoscale, "time", clock)
    now_s, replicas, state, counts = 0.0, 3, {}, []
    for _ in range(12):
        raw = metrics(*[(0, 0.0)] * replicas)
        replicas, state = policy(Context(replicas, 1, 8, raw, state))
        counts.append(replicas)
        now_s += SETTLE_S / 4
    assert counts == [3, 3, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1]


def test_a_target_is_there_before_anybody_has_reported() -> None:
    assert TARGET_BYTES > 0
    assert policy(Context(1, 1, 4, {}))[0] == 1
