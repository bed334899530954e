"""Check that rows keep bits, shapes, and the strides that decide how they are concatenated."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests.examples import examples
from tests.features.keeping import assert_same, bits
from upriver.errors import ConfigError, Damaged
from upriver.features.row_form import (
    RowLayout,
    TensorForm,
    kept_strides,
    layout_of,
    packed,
    unpacked,
)
from upriver.tensor_memory import ITEM_NBYTES

DTYPES = [getattr(torch, name) for name in sorted(ITEM_NBYTES)]


def numbered(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return elements of any bits, but for bools."""
    if dtype is torch.bool:
        return torch.arange(count) % 3 == 0
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(
        dtype
    )


def permuted(shape: list[int], order: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a dense tensor whose dimensions lie in memory in this order."""
    base = numbered(math.prod(shape), dtype).reshape([shape[dim] for dim in order])
    return base.permute(sorted(range(len(order)), key=order.__getitem__))


def dense(tensor: torch.Tensor) -> bool:
    steps = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return all(step == math.prod(size for _, size in steps[:at]) for at, (step, _) in enumerate(steps))


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Draw a batch in any order of dimensions, and the dimension of its samples."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    batch = permuted(shape, order, draw(st.sampled_from(DTYPES)))
    return batch, draw(st.integers(0, len(shape) - 1))


@settings(max_examples=examples(300))
@given(batches())
def test_row_of_any_batch_concatenates_to_what_its_slices_do(made: tuple[torch.Tensor, int]) -> None:
    batch, dim = made
    slices = [batch.narrow(dim, at, 1) for at in range(batch.shape[dim])]
    found = [unpacked(packed((each,)))[0] for each in slices]
    for one, other in zip(found, slices, strict=True):
        assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
        assert not dense(other) or one.stride() == other.stride()
        assert one.data_ptr() % 64 == 0
    whole, wanted = torch.cat(found, dim), torch.cat(slices, dim)
    assert whole.stride() == wanted.stride()
    assert bits(whole) == bits(wanted)


@settings(max_examples=examples(300))
@given(
    shape=st.lists(st.integers(0, 3), min_size=4, max_size=5),
    strides=st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 9, 12, 27, 81]), min_size=5, max_size=5),
)
def test_kept_strides_any_strides_concatenate_alike(shape: list[int], strides: list[int]) -> None:
    row = torch.arange(1000).as_strided(shape, strides[: len(shape)])
    kept = kept_strides(tuple(row.shape), row.stride())
    assert kept_strides(tuple(row.shape), kept) == kept
    (found,) = unpacked(packed((row,)))
    assert torch.equal(found, row) and found.stride() == kept
    for dim in range(row.dim()):
        assert torch.cat([found, found], dim).stride() == torch.cat([row, row], dim).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5,), (1, 3, 2, 2)], ids=str)
def test_row_of_any_type_and_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    row = (numbered(math.prod(shape), dtype).reshape(shape), torch.tensor(True), torch.ones(2, 3).T)
    assert_same(unpacked(packed(row)), row)


def test_row_of_channels_last_batch_keeps_its_format() -> None:
    batch = torch.rand(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    found = [unpacked(packed((batch[at : at + 1],)))[0] for at in range(4)]
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in found)
    assert torch.cat(found).is_contiguous(memory_format=torch.channels_last)


def test_row_without_tensors_has_no_bytes() -> None:
    assert packed(()).nbytes == 0 and unpacked(packed(())) == ()


def test_row_with_lazy_flags_is_resolved() -> None:
    row = (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag)
    found = unpacked(packed(row))
    assert torch.equal(found[0], torch.tensor([1 - 2j])) and torch.equal(found[1], torch.tensor([-2.0]))


def test_row_with_gradients_comes_back_without() -> None:
    (found,) = unpacked(packed((torch.ones(2, requires_grad=True),)))
    assert not found.requires_grad


def test_row_that_comes_back_shares_no_memory() -> None:
    row = (torch.zeros(8), torch.zeros(8))
    found = unpacked(packed(row))
    row[0].fill_(1)
    assert found[0].sum() == 0
    found[0].fill_(2)
    assert found[1].sum() == 0


def test_packed_row_of_a_dense_tensor_is_no_copy() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    pack = packed((tensor,))
    tensor[5] = 7
    assert bytes(pack.parts[0])[5] == 7


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (
            torch.zeros(2, 2).to_sparse(),
            "dense tensors in main memory can be kept, got torch.sparse_coo on cpu",
        ),
        (
            torch.zeros(2, device="meta"),
            "dense tensors in main memory can be kept, got torch.strided on meta",
        ),
        (
            torch.zeros(2).to(torch.float8_e4m3fn),
            "dtype torch.float8_e4m3fn cannot be kept; allowed are bool",
        ),
    ],
    ids=["sparse", "meta", "float8"],
)
def test_packed_tensor_that_has_no_form_is_refused(tensor: torch.Tensor, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        packed((tensor,))


@pytest.mark.parametrize(
    "form",
    [
        TensorForm("float8", (1,), (1,)),
        TensorForm("float32", (1, 2), (1,)),
        TensorForm("float32", (-1,), (1,)),
        TensorForm("float32", (2,), (-1,)),
        TensorForm("float32", (2,), (2,)),
        TensorForm("float32", (2, 3), (1, 1)),
        TensorForm("float32", (2**63,), (1,)),
        TensorForm("float32", (1,), (2**63,)),
        TensorForm("float32", (1,) * 65, (1,) * 65),
    ],
    ids=repr,
)
def test_layout_of_form_that_no_row_has_is_damage(form: TensorForm) -> None:
    with pytest.raises(Damaged, match="no row has a tensor of the form"):
        layout_of((form,))


def test_layout_memory_counts_gaps() -> None:
    row = torch.empty_strided((3, 1, 1, 1), (4, 1, 4, 4))  # seen as channels last by its gaps alone
    layout = RowLayout(packed((row,)).form)
    assert (layout.nbytes, layout.memory_nbytes) == (64, 64 + 9 * 4)
