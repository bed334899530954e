"""Check that values shipped without a wire equal those of a real frame."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from upriver.program.graph.alignment import as_shipped
from upriver.protocol.tensors import build_tensors, lay_out
from upriver.tensor_memory import aligned_empty


def through_a_frame(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    layout = lay_out(tensors)
    payload = aligned_empty(layout.nbytes)
    layout.write_into(payload.numpy().data)
    return list(build_tensors(layout.tensors, layout.storages, payload))


def distance(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() % 64 if tensor.numel() else 0


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert a.equal(b)
        assert distance(a) == distance(b)


base = torch.arange(4096, dtype=torch.float32)
CASES = {
    "contiguous": [base[:64].view(8, 8)],
    "unaligned": [base[3:67].view(8, 8)],
    "far into its storage": [base[1003:1067].view(8, 8)],
    "transposed": [base[:64].view(8, 8).t()],
    "with gaps": [base[5:1000].as_strided((4, 5), (100, 3))],
    "repeated": [base[:8].expand(3, 8)],
    "scalar": [torch.tensor(3.0)],
    "empty": [torch.empty(0, 3), base[:4]],
    "two views of one storage": [base[10:20], base[15:40].view(5, 5).t()],
    "far apart in one storage": [base[:2], base[-2:]],
    "the same twice": [base[:9], base[:9]],
    "types": [base[1:5].half(), base[:7].long(), base[:6] > 2, base[3:9].bfloat16()],
    "two types on one storage": [base[:8], base[4:8].view(torch.int32)],
}


@pytest.mark.parametrize("what", sorted(CASES))
def test_it_is_what_a_frame_gives(what: str) -> None:
    ours, theirs = as_shipped(CASES[what]), through_a_frame(CASES[what])
    same(ours, theirs)
    same(ours, CASES[what])
    assert [t.data_ptr() for t in ours] != [t.data_ptr() for t in CASES[what]]


def test_only_what_is_used_is_copied_and_each_storage_once() -> None:
    first, second = as_shipped([base[1000:1010], base[1020:1024]])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() <= 64 + 24 * 4
    second[0] = -1.0
    first.as_strided((21,), (1,))[20] = -2.0
    assert second[0] == -2.0


@settings(max_examples=examples(200), deadline=None)
@given(
    views=st.lists(
        st.tuples(
            st.integers(0, 99), st.integers(0, 5), st.integers(0, 7), st.integers(0, 5), st.integers(0, 7)
        ),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int16, torch.uint8]),
)
def test_any_views_of_one_storage(views: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    storage = torch.arange(200).to(dtype)
    tensors = [storage.as_strided((a, b), (s, t), offset) for offset, a, s, b, t in views]
    ours, theirs = as_shipped(tensors), through_a_frame(tensors)
    same(ours, theirs)
    filled = [tensor for tensor in ours if tensor.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in filled}) <= 1
