"""Check offload shares at every prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.dataloader.share import Backlog, OffloadShare
from upriver.errors import ConfigError
from upriver.types import DONE, START

NONE = Backlog(here=0, elsewhere=0)


def stretch(*, whole: bool) -> OffloadStretch:
    return OffloadStretch(start=START, stop=DONE, whole=whole)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 60)), min_size=1, max_size=6))
def test_a_share_holds_at_every_prefix_and_through_every_change(turns):
    part = OffloadShare(turns[0][0], stretch(whole=False))
    there = due = 0.0
    for ratio, count in turns:
        part.turn(ratio)
        for _ in range(count):
            goes = part.split(1, NONE)[0]
            there, due = there + goes, due + ratio
            assert abs(there - due) < 1 + 1e-6
            assert ratio or not goes
            assert ratio < 1 or goes


@given(st.floats(0, 1), st.lists(st.integers(1, 9), max_size=50))
def test_batches_that_are_made_whole_count_as_one(ratio, sizes):
    samples, batches = OffloadShare(ratio, stretch(whole=False)), OffloadShare(ratio, stretch(whole=True))
    assert [goes for size in sizes for goes in samples.split(size, NONE)] == samples_of(ratio, sum(sizes))
    for size, goes in zip(sizes, samples_of(ratio, len(sizes)), strict=True):
        assert batches.split(size, NONE) == [goes] * size


def samples_of(ratio: float, count: int) -> list[bool]:
    return OffloadShare(ratio, stretch(whole=False)).split(count, NONE)


def test_a_third_is_every_third():
    assert OffloadShare(1 / 3, stretch(whole=False)).split(6, NONE) == [False, False, True] * 2


def test_a_share_that_is_small_is_not_lost_to_changes():
    part = OffloadShare(0.02, stretch(whole=True))
    there = 0
    for turn in range(100):
        part.turn(0.02 + 0.001 * (turn % 2))
        there += sum(part.split(4, NONE)[0] for _ in range(10))
    assert there == pytest.approx(0.0205 * 1000, abs=1)


def test_nothing_elsewhere():
    assert OffloadShare.none().split(3, NONE) == [False] * 3 and samples_of(0.0, 3) == [False] * 3


def test_shares_that_cannot_be():
    for ratio in (-0.1, 1.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="ratio"):
            OffloadShare(ratio, stretch(whole=True))
        with pytest.raises(ConfigError, match="ratio"):
            OffloadShare(0.5, stretch(whole=True)).turn(ratio)


def evened(ratio: float, *, whole: bool) -> OffloadShare:
    return OffloadShare(ratio, stretch(whole=whole), even=True)


@given(st.floats(0, 1), st.booleans(), st.lists(st.integers(1, 9), max_size=20))
def test_where_both_sides_are_as_busy_as_the_share_says_it_is_the_share(ratio, whole, sizes):
    part, even = OffloadShare(ratio, stretch(whole=whole)), evened(ratio, whole=whole)
    assert [even.split(size, NONE) for size in sizes] == [part.split(size, NONE) for size in sizes]


@pytest.mark.parametrize(
    ("here", "elsewhere", "given"),
    # Of all samples under way half should be elsewhere; a deviation of half a batch of 4 is left alone.
    [(4, 4, 2), (6, 2, 2), (8, 2, 3), (12, 0, 4), (40, 0, 4), (2, 6, 2), (2, 8, 1), (0, 12, 0)],
)
def test_a_side_that_is_behind_gets_less_until_it_is_not(here, elsewhere, given):
    assert sum(evened(0.5, whole=False).split(4, Backlog(here, elsewhere))) == given


@pytest.mark.parametrize(("here", "elsewhere", "goes"), [(8, 0, True), (0, 8, False)])
def test_a_batch_that_is_made_whole_goes_to_whoever_is_not_behind(here, elsewhere, goes):
    even = evened(0.5, whole=True)
    assert [even.split(4, Backlog(here, elsewhere)) for _ in range(3)] == [[goes] * 4] * 3


@given(st.floats(0, 1), st.booleans(), st.integers(1, 9), st.integers(0, 99), st.integers(0, 99))
def test_nobody_gets_more_than_there_is_nor_anything_where_the_share_is_none(
    ratio, whole, count, here, elsewhere
):
    found = evened(ratio, whole=whole).split(count, Backlog(here, elsewhere))
    assert len(found) == count and (not whole or len(set(found)) == 1)
    assert ratio > 0 or not any(found)
    assert ratio < 1 or all(found)
