"""Check features of two tiers: equal to the bit, or within the stated tolerance."""

from __future__ import annotations

import pytest
import torch

from upriver.rpc.tolerance import (
    COARSER,
    FLOAT32,
    Agreement,
    Deviation,
    difference,
    largest,
    tolerance,
    tolerance_between,
    widest,
)

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


def test_the_side_that_computes_float32_in_fewer_bits_decides() -> None:
    ieee = {"conv_precision": "cuda tf32, cpu ieee"}
    tf32, bf16 = {**ieee, "cuda": "13.0"}, {"conv_precision": "cuda tf32, cpu bf16"}
    assert tolerance_between() is tolerance_between(ieee, ieee) is FLOAT32
    assert tolerance_between(ieee, tf32) is tolerance_between(tf32, ieee) is COARSER[torch.float16]
    assert tolerance_between(tf32, bf16) is COARSER[torch.bfloat16]
    assert widest(FLOAT32, COARSER[torch.float16]) is COARSER[torch.float16]


def test_a_tolerance_grows_until_a_server_has_passed() -> None:
    agreement, half = Agreement("numeric", FLOAT32), COARSER[torch.float16]
    agreement.widen(half)
    agreement.widen(FLOAT32)
    assert agreement.allowed is half and str(agreement) == f"within {half}"
    agreement.prove()
    agreement.widen(COARSER[torch.bfloat16])
    assert agreement.allowed is half


def test_a_tolerance_never_shows_in_a_job_that_is_bit_for_bit() -> None:
    agreement, half = Agreement("auto", FLOAT32), COARSER[torch.float16]
    agreement.widen(half)
    agreement.prove()
    assert agreement.allowed is None and str(agreement) == "bit for bit"
    assert agreement.resume("numeric"), "a state of an earlier job within a tolerance"
    agreement.widen(COARSER[torch.bfloat16])
    assert agreement.allowed is COARSER[torch.bfloat16], "none of this mode's servers has passed"


def test_what_another_process_decided_includes_its_tolerance() -> None:
    agreement, half = Agreement("auto", FLOAT32), COARSER[torch.float16]
    agreement.decided(None, "", None)
    assert agreement.mode is None
    agreement.decided("numeric", "another device", half)
    assert agreement.allowed is half and str(agreement) == f"within {half}, since another device"


# ------------------------------------------------------------------------------------------- deviations

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ours", "theirs", "relative", "num_different"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0, 0),
        ([1.0, -4.0], [1.5, -4.0], 0.125, 1),
        ([1e-6, 2e-6], [1e-6, 1e-6], 0.5, 1),  # relative to the values, however small
        ([0.0, 1.0], [-0.0, 1.0], 0.0, 1),
        ([NAN, INF, 2.0], [NAN, INF, 2.0], 0.0, 0),
        ([NAN, INF, 2.0], [NAN, INF, 1.0], 0.5, 1),
        ([NAN, 2.0], [1.0, 2.0], INF, 1),
        ([1.0, 2.0], [INF, 2.0], INF, 1),
        ([-INF, 2.0], [INF, 2.0], INF, 1),
        ([0.0, 0.0], [0.0, 1e-9], INF, 1),
        ([], [], 0.0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deviation_is_relative_to_the_largest_value_and_counts_bits(
    ours: list[float], theirs: list[float], relative: float, num_different: int, dtype: torch.dtype
) -> None:
    a, b = torch.tensor(ours, dtype=dtype), torch.tensor(theirs, dtype=dtype)
    found = Deviation.between((a,), (b,))
    assert found.relative == pytest.approx(relative, rel=1e-6)
    assert (found.num_different, found.num_elements) == (num_different, len(ours))
    assert found.equal == (not num_different) == (difference((a,), (b,), None) == "")


def test_deviation_of_several_tensors_is_the_largest_and_counts_all() -> None:
    ours = (ONES, COUNTS, COUNTS > 2, torch.tensor(4.0))
    theirs = (ONES.clone(), COUNTS + 1, COUNTS > 3, torch.tensor(5.0))
    found = Deviation.between(ours, theirs)
    assert found == Deviation(relative=1.0, num_different=6 + 1 + 1, num_elements=6 + 6 + 6 + 1)
    strided = torch.arange(12.0).view(3, 4)
    assert Deviation.between((strided.T,), (strided.T.contiguous(),)).equal
    other = strided.T.contiguous()
    other[1, 2] += 11.0
    assert Deviation.between((strided.T,), (other,)) == Deviation(
        relative=1.0, num_different=1, num_elements=12
    )
