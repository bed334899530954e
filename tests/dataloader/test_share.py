"""Shares at every prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.dataloader.share import Shares
from upriver.errors import ConfigError


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(1, 300))
def test_every_place_is_within_one_of_its_share_at_every_prefix(weights, count):
    dealer = Shares(dict(enumerate(map(float, weights))))
    counts = [0] * len(weights)
    for number in range(1, count + 1):
        counts[dealer.next()] += 1
        for place, weight in enumerate(weights):
            assert abs(counts[place] - weight * number / sum(weights)) < 1 + 1e-9
            assert weight or not counts[place]


@given(st.floats(0, 1), st.integers(1, 400))
def test_of_two_places_too(ratio, count):
    dealer = Shares({"there": ratio, "here": 1 - ratio})
    there = [dealer.next() for _ in range(count)].count("there")
    assert abs(there - ratio * count) < 1 + 1e-9


def test_a_third_is_every_third():
    dealer = Shares({"there": 1, "here": 2})
    assert [dealer.next() for _ in range(6)] == ["here", "there", "here"] * 2


def test_shares_that_cannot_be():
    for shares in ({"a": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan")}, {"a": float("inf")}, {}):
        with pytest.raises(ConfigError, match="share"):
            Shares(shares)
