"""Check that a snapshot is the object as it was: values, layouts, sharing, alignment; and what has none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.program.nets import frozen_small
from upriver.finetune.preparation.snapshot import NoSnapshot, SharedMemory, restore, store

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def copied(value: object) -> Any:
    memory = SharedMemory()
    try:
        store(value, memory.descriptor)
        return restore(memory.descriptor)
    finally:
        memory.close()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Return a tensor anywhere in its storage, with any strides that its storage holds."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    offset, skew = draw(st.integers(0, 9)), draw(st.integers(0, 70))
    span = offset + sum((max(size, 1) - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    whole = torch.randint(0, 2, (skew + span,), dtype=torch.int64).to(dtype)
    return whole[skew:].as_strided(shape, strides, skew + offset)


@given(tensors())
def test_a_tensor_has_the_values_the_layout_and_the_alignment_that_it_had(tensor: torch.Tensor) -> None:
    copy = copied(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert copy.storage_offset() == tensor.storage_offset()
    if tensor.untyped_storage().nbytes():
        assert copy.untyped_storage().data_ptr() % 64 == tensor.untyped_storage().data_ptr() % 64
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_model_is_the_same_one_and_neither_sees_the_other_change() -> None:
    model = frozen_small().to(memory_format=torch.channels_last)
    model.block2.conv2.weight = model.block1.conv1.weight  # tied
    model.block3.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copy = copied(model)
    assert [(n, m.training, type(m)) for n, m in copy.named_modules()] == [
        (n, m.training, type(m)) for n, m in model.named_modules()
    ]
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(remove_duplicate=False),
        copy.named_parameters(remove_duplicate=False),
        strict=True,
    ):
        assert torch.equal(mine, theirs), name
        assert (mine.stride(), mine.requires_grad) == (theirs.stride(), theirs.requires_grad)
        assert not mine.is_shared()
    assert copy.block2.conv2.weight is copy.block1.conv1.weight
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.head.weight.zero_()
    assert not torch.equal(copy.head.weight, model.head.weight)


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    whole = torch.arange(12.0)
    first, second = copied((whole[2:6], whole[4:8].view(2, 2)))
    first[2] = 100
    assert second[0, 0] == 100


def test_empty_tensors_and_tensors_without_memory_are_copied() -> None:
    given = (torch.empty(0), torch.empty(0, 3, dtype=torch.int64), torch.ones(2), torch.empty(0))
    assert all(map(torch.equal, copied(given), given))


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_does_not_pickle_has_no_snapshot_and_the_error_says_why() -> None:
    with pytest.raises(NoSnapshot, match=r"it does not pickle: .*lock"):
        copied(Locked())


def test_classes_that_no_module_names_are_copied_by_value() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert copied(Doubled())(torch.ones(1)) == 2
