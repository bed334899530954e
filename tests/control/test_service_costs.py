"""Check what work is expected to take, from what earlier work took."""

from __future__ import annotations

import pytest

from upriver.control.service_costs import FIRST_GUESS_S, MAX_COSTS, SMOOTH, ServiceCosts


def test_of_known_work_is_a_moving_mean_and_of_other_work_the_mean_of_all() -> None:
    costs = ServiceCosts()
    assert costs.of("a") == FIRST_GUESS_S
    costs.saw("a", 1.0)
    costs.saw("b", 3.0)
    assert (costs.of("a"), costs.of("b"), costs.of("c")) == (1.0, 3.0, 2.0)
    costs.saw("a", 2.0)
    assert costs.of("a") == pytest.approx(1.0 + SMOOTH)


def test_saw_forgets_the_kind_that_was_not_seen_for_longest() -> None:
    costs = ServiceCosts()
    for kind in range(MAX_COSTS):
        costs.saw(kind, 1.0 + kind)
    costs.saw(0, 1.0)
    costs.saw("new", 5.0)
    assert (costs.of(0), costs.of(2), costs.of("new")) == (1.0, 3.0, 5.0)
    assert costs.of(1) != 2.0, "the mean of the others"
