"""Test when refused requests are told to retry."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from upriver.control.retry_times import LEAST_RETRY_S, MOST_RETRY_S, SPREAD, RetryTimes


def test_the_time_follows_the_rate_at_which_memory_comes_free() -> None:
    retries = RetryTimes()
    assert retries.soonest_s(1000, 0.5, 0) == LEAST_RETRY_S
    assert retries.soonest_s(1000, 7.0, 7) == 7  # nothing was released meanwhile
    found = []
    for now, nbytes in ((10, 100), (20, 300), (30, 600)):
        retries.freed(nbytes, now)
        found.append(retries.soonest_s(1000, now, now))
    assert found == [10, 25, 20]  # 1000 bytes, at 100, 40 and 50 a second
    assert retries.soonest_s(1000, 61.0, 61) == MOST_RETRY_S  # all of that is long ago


def test_those_who_are_refused_come_back_one_after_another() -> None:
    retries = RetryTimes()
    retries.freed(200, 0)

    def told(now: int) -> int:
        return math.ceil(retries.next_s(100, 400, now, now))

    # 50 bytes a second: the waiting requests need 8 s, each 2 s
    assert [told(4) for _ in range(3)] == [8, 10, 12]
    # nothing was released meanwhile: 20 bytes a second
    assert [told(10) for _ in range(2)] == [20, 25]
    assert [told(10) for _ in range(20)][-3:] == [60, 60, 60]
    retries.freed(4800, 10)
    assert [told(10) for _ in range(2)] == [4, 4]  # 500 a second: 4 times 0.8 s, at least 1 s
    assert told(18) == 2


events = st.lists(st.tuples(st.booleans(), st.integers(1, 1000), st.integers(0, 10)), min_size=1, max_size=50)


@given(events, st.integers(0, 10_000))
def test_nobody_is_told_to_come_before_the_waiting_are_done_or_long_after(
    steps: list[tuple[bool, int, int]], waiting_bytes: int
) -> None:
    retries, now = RetryTimes(), 0
    for is_freed, nbytes, later in steps:
        now += later
        if is_freed:
            retries.freed(nbytes, now)
            continue
        soonest = retries.soonest_s(waiting_bytes, now, now)
        assert LEAST_RETRY_S <= soonest <= MOST_RETRY_S
        assert (
            soonest <= retries.next_s(nbytes, waiting_bytes, now, now) <= min(MOST_RETRY_S, SPREAD * soonest)
        )
