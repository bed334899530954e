"""Test the cap on the rate of transfers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.link import TokenBucket

TAKES = st.lists(st.tuples(st.sampled_from((0.0, 0.001, 0.01, 3.0)), st.integers(1, 500)), max_size=60)
"""Seconds before each taking, and its bytes."""


@given(takes=TAKES, burst=st.sampled_from((0, 1, 50, 1000)))
def test_bytes_in_any_window_are_the_rate_and_a_burst_at_most(
    takes: list[tuple[float, int]], burst: int
) -> None:
    bucket, now_s, passed = TokenBucket(1000.0, burst_bytes=burst), 50.0, 0
    marks = [(now_s, 0)]
    for pause_s, num_bytes in takes:
        now_s += pause_s
        marks.append((now_s, passed))
        now_s += bucket.take(num_bytes, now_s)
        passed += num_bytes
        marks.append((now_s, passed))
    for i, (since_s, before) in enumerate(marks):
        for until_s, after in marks[i:]:
            assert after - before <= 1000.0 * (until_s - since_s) + burst + 1e-6


@given(takes=TAKES)
def test_all_callers_share_one_rate_and_none_waits_longer(takes: list[tuple[float, int]]) -> None:
    """The oracle sends all bytes one after the other."""
    bucket, now_s, free_s = TokenBucket(1000.0, burst_bytes=0), 50.0, 0.0
    for pause_s, num_bytes in takes:
        now_s += pause_s
        free_s = max(free_s, now_s) + num_bytes / 1000.0
        assert bucket.take(num_bytes, now_s) == pytest.approx(free_s - now_s)


def test_an_infinite_rate_never_waits() -> None:
    assert TokenBucket(math.inf, burst_bytes=math.inf).take(10**12, 1.0) == 0.0


def test_a_rate_that_changes_holds_for_what_is_taken_from_then_on() -> None:
    bucket = TokenBucket(1000.0, burst_bytes=0)
    assert bucket.take(500, 10.0) == pytest.approx(0.5)
    bucket.rate_bytes_per_s = 100.0
    assert bucket.take(500, 10.0) == pytest.approx(5.5)
