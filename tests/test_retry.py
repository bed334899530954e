import random

import pytest

from upriver.errors import ConfigError
from upriver.retry import Backoff, RetryBudget


def test_full_jitter_fills_its_range_and_stays_below_the_cap():
    backoff = Backoff(base_s=0.1, cap_s=2.0, rng=random.Random(0))
    for failures, bound in [(0, 0.1), (1, 0.2), (3, 0.8), (5, 2.0), (10_000, 2.0)]:
        waits = [backoff.wait_s(failures) for _ in range(300)]
        assert 0 <= min(waits) < 0.1 * bound
        assert 0.9 * bound < max(waits) <= bound


@pytest.mark.parametrize("bad", [{"base_s": 0}, {"base_s": 3.0, "cap_s": 1.0}, {"cap_s": float("nan")}])
def test_bad_backoff(bad):
    with pytest.raises(ConfigError):
        Backoff(**bad)


def test_budget_runs_out_and_recovers_with_successes():
    budget = RetryBudget(2, per_success=0.5)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    budget.succeeded()
    assert not budget.withdraw()
    budget.succeeded()
    assert budget.withdraw()
    assert not budget.withdraw()


def test_budget_saves_up_no_more_than_its_capacity():
    budget = RetryBudget(1, per_success=1)
    for _ in range(10):
        budget.succeeded()
    assert [budget.withdraw(), budget.withdraw()] == [True, False]


def test_bad_budget():
    with pytest.raises(ConfigError):
        RetryBudget(-1)
