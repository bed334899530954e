"""Check features of two tiers: equal to the bit, or within the stated tolerance."""

from __future__ import annotations

import pytest
import torch

from upriver.rpc.tolerance import COARSER, FLOAT32, difference, largest, tolerance

ONES = torch.ones(2, 3)
COUNTS = torch.arange(6)


@pytest.mark.parametrize("allowed", [None, FLOAT32])
def test_equal_features_are_the_same(allowed: object) -> None:
    values = (ONES, COUNTS, COUNTS > 2, torch.full((2,), float("nan")), torch.zeros(0, 4))
    assert difference(values, tuple(value.clone() for value in values), allowed) == ""  # type: ignore[arg-type]
    assert largest(values, values) == 0.0


def test_a_single_bit_in_any_tensor_is_seen() -> None:
    nudged = ONES.clone()
    nudged[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert difference((COUNTS, ONES), (COUNTS, nudged), None) == "other bits in tensor 1"
    assert difference((ONES,), (nudged,), None) == "other bits"
    assert difference((COUNTS, ONES), (COUNTS, nudged), FLOAT32) == ""
    assert difference((torch.zeros(1),), (-torch.zeros(1),), None) == "other bits"


def test_more_than_the_tolerance_is_too_much() -> None:
    assert difference((ONES,), (ONES * 1.01,), FLOAT32) == "features that are 0.01 of the largest apart"
    assert difference((ONES * 1000,), (ONES * 1000 + 0.05,), FLOAT32) == ""
    assert largest((ONES, ONES), (ONES, ONES * 1.5)) == pytest.approx(0.5)
    halves = ONES.bfloat16()
    assert difference((halves,), (halves * 1.01,), COARSER[torch.bfloat16]) == ""


@pytest.mark.parametrize("allowed", [None, FLOAT32, COARSER[torch.bfloat16]])
def test_whole_numbers_and_flags_have_no_tolerance(allowed: object) -> None:
    assert "bits" in difference((COUNTS,), (COUNTS + 1,), None)
    assert difference((COUNTS * 10**6,), (COUNTS * 10**6 + 1,), FLOAT32) == "other values of int64"
    flags = COUNTS > 2
    assert difference((flags,), (~flags,), allowed) != ""  # type: ignore[arg-type]


@pytest.mark.parametrize("allowed", [None, FLOAT32])
@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ((ONES,), "1 tensors instead of 2"),
        ((ONES, ONES.T), r"float32 of shape \(3, 2\) instead of float32 of shape \(2, 3\) in tensor 1"),
        ((ONES, ONES.double()), "float64 of shape"),
    ],
)
def test_another_form_is_named(allowed: object, theirs: tuple[torch.Tensor, ...], named: str) -> None:
    import re

    assert re.search(named, difference((ONES, ONES), theirs, allowed))  # type: ignore[arg-type]


def test_the_coarsest_type_decides() -> None:
    assert tolerance([torch.float32, torch.int64]) is FLOAT32
    assert tolerance([torch.float16, torch.bfloat16, torch.float32]) is COARSER[torch.bfloat16]
    assert str(FLOAT32) == "0.001 of each value plus 0.0001 of the largest"
