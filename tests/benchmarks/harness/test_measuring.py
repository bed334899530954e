"""Test the intervals of ratios of paired runs."""

from __future__ import annotations

import math

import pytest

from benchmarks.harness.measuring import ratio_interval


def test_ratio_interval_of_equal_ratios_is_that_ratio() -> None:
    found = ratio_interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert found is not None and found.pairs == 3
    assert (found.low, found.middle, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert found.text() == "0.50 (0.50 to 0.50)"


def test_ratio_interval_of_the_inverse_is_the_inverse() -> None:
    ones, others = [1.0, 1.1, 0.9, 1.3, 1.0], [1.0, 1.0, 1.2, 1.0, 1.1]
    found, inverse = ratio_interval(ones, others), ratio_interval(others, ones)
    assert found is not None and inverse is not None
    assert found.low * inverse.high == pytest.approx(1) and found.low < found.middle < found.high


def test_ratio_interval_has_students_width() -> None:
    logs = [0.0, 0.1, -0.1, 0.05, -0.05]
    found = ratio_interval([math.exp(log) for log in logs], [1.0] * 5)
    assert found is not None and found.middle == pytest.approx(1)
    assert math.log(found.high) == pytest.approx(2.7764 * 0.0790569 / math.sqrt(5), rel=1e-4)


def test_ratio_interval_of_a_single_pair_bounds_nothing() -> None:
    found = ratio_interval([3.0], [2.0])
    assert found is not None and (found.low, found.middle, found.high) == (0.0, pytest.approx(1.5), math.inf)
    assert ratio_interval([], []) is None
