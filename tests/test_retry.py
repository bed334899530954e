import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import ServerUnavailable
from upriver.retry import Backoff, CircuitBreaker, RetryBudget

seconds = st.floats(0, 1e6)
backoffs = st.builds(
    lambda base_s, factor, jitter, seed: Backoff(
        base_s=base_s, cap_s=base_s * factor, jitter=jitter, rng=random.Random(seed)
    ),
    st.floats(1e-3, 10),
    st.floats(1, 1e4),
    st.floats(0, 1),
    st.integers(0, 100),
)


def longest_s(backoff: Backoff, failures: int) -> float:
    """Return the bound of a pause, by doubling."""
    bound = 0.0
    for _ in range(min(failures, 60)):
        bound = min(backoff.cap_s, 2 * bound or backoff.base_s)
    return bound


@given(backoff=backoffs, failures=st.integers(0, 10**9))
def test_a_pause_doubles_up_to_its_cap_and_only_its_jitter_is_random(backoff: Backoff, failures: int) -> None:
    bound, pause_s = longest_s(backoff, failures), backoff.pause_s(failures)
    assert (1 - backoff.jitter) * bound * (1 - 1e-9) <= pause_s <= bound * (1 + 1e-9)


def test_full_jitter_fills_its_range() -> None:
    backoff = Backoff(base_s=0.1, cap_s=2.0, rng=random.Random(0))
    for failures, bound in [(1, 0.1), (2, 0.2), (4, 0.8), (6, 2.0), (10_000, 2.0)]:
        pauses = [backoff.pause_s(failures) for _ in range(300)]
        assert 0 <= min(pauses) < 0.1 * bound
        assert 0.9 * bound < max(pauses) <= bound


def test_a_told_pause_is_spread_over_one_to_two_times_its_length() -> None:
    pauses = [Backoff(rng=random.Random(seed)).spread_s(3.0) for seed in range(100)]
    assert 3.0 <= min(pauses) < 3.3 and 5.7 < max(pauses) <= 6.0


@given(
    backoff=backoffs,
    events=st.lists(st.tuples(seconds, st.one_of(st.none(), st.floats(0, 100))), max_size=30),
)
def test_a_breaker_counts_failures_since_the_last_success_and_keeps_every_pause(
    backoff: Backoff, events: list[tuple[float, float | None]]
) -> None:
    """Each event comes some seconds after the one before: a success, or a failure with a least pause."""
    breaker, now, in_a_row, error = CircuitBreaker(backoff), 0.0, 0, None
    pauses = [-math.inf]
    for after_s, least_s in events:
        now += after_s
        if least_s is None:
            breaker.succeed(now)
            in_a_row, error = 0, error if now < max(pauses) else None
        else:
            in_a_row, error = in_a_row + 1, ServerUnavailable(str(now))
            breaker.fail(now, error, least_s=least_s)
            assert least_s <= breaker.pause_s <= max(least_s, longest_s(backoff, in_a_row) * (1 + 1e-9))
            pauses.append(now + breaker.pause_s)
        assert breaker.failures == in_a_row and breaker.error is error
        assert breaker.until_s == max(pauses), "no later event shortens a pause"
        assert breaker.left_s(now) == max(0.0, max(pauses) - now)
        assert breaker.left_s(breaker.until_s) == 0.0


def test_a_breaker_that_has_seen_nothing_lets_calls_through() -> None:
    breaker = CircuitBreaker(Backoff())
    assert breaker.left_s(-1e9) == 0.0 and breaker.failures == 0 and breaker.error is None


@given(
    capacity=st.integers(0, 20),
    per_success=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    events=st.lists(st.booleans(), max_size=100),
)
def test_a_budget_never_lets_more_retries_through_than_capacity_and_successes_pay_for(
    capacity: int, per_success: float, events: list[bool]
) -> None:
    """True is a retry that is asked for, False a success. Quarters add up without rounding."""
    budget, tokens = RetryBudget(capacity, per_success=per_success), float(capacity)
    for is_retry in events:
        if is_retry:
            assert budget.withdraw() == (tokens >= 1)
            tokens -= tokens >= 1
        else:
            budget.succeeded()
            tokens = min(capacity, tokens + per_success)


@pytest.mark.parametrize("capacity", [0, 1, 10])
def test_a_budget_without_successes_runs_out(capacity: int) -> None:
    budget = RetryBudget(capacity)
    assert [budget.withdraw() for _ in range(capacity + 2)] == [True] * capacity + [False] * 2
