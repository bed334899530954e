"""For how much of the time a server takes nothing: what counts is time, not how often it says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.refusals import LEAST, Refusals

WINDOW_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_server_that_refuses_nothing_is_all_there() -> None:
    assert Refusals().available == 1.0


def test_rests_count_while_they_last_and_are_forgotten() -> None:
    clock = Clock()
    refusals = Refusals(window_s=WINDOW_S, now=clock)
    refusals.refused(100.0, 105.0)
    assert refusals.available == 1.0, "it has only begun"
    clock.now = 104.0
    assert refusals.available == pytest.approx(1 - 4 / 20)
    clock.now = 115.0
    assert refusals.available == pytest.approx(1 - 5 / 20)
    clock.now = 122.0
    assert refusals.available == pytest.approx(1 - 3 / 20)
    clock.now = 125.0
    assert refusals.available == 1.0


def test_one_that_does_little_else_is_hardly_there_but_there() -> None:
    clock = Clock()
    refusals = Refusals(window_s=WINDOW_S, now=clock)
    for _ in range(20):
        refusals.refused(clock.now, clock.now + 2)
        clock.now += 2
    assert refusals.available == LEAST > 0


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(0, 5)), max_size=30)


@given(spans=SPANS, later=st.integers(0, 60))
def test_a_moment_counts_once_however_many_requests_it_is_lost_for(
    spans: list[tuple[int, int, int]], later: int
) -> None:
    """Against one bit a second: requests that end one after the other, each sent some time before that."""
    clock = Clock()
    refusals = Refusals(window_s=WINDOW_S, now=clock)
    lost: set[int] = set()
    ended = 100
    for after, before, rest in spans:
        ended += after
        clock.now = ended
        refusals.refused(ended - before, ended + rest)
        lost |= set(range(ended - before, ended + rest))
        ended += rest
    clock.now = ended + later
    recent = {second for second in lost if ended + later - 20 <= second < ended + later}
    assert refusals.available == pytest.approx(max(LEAST, 1 - len(recent) / 20))
