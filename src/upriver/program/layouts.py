"""Tensors that do not lie in plain memory: sparse, nested, packed, or of a class of their own.

A tracer sees that an operator reads one, and not what it shares with others, so no prefix holds any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unusual(tensor: torch.Tensor) -> str:
    """What kind of tensor it is, in words; empty for one in plain memory."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a tensor of type {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.').removeprefix('_')}"
    return ""


def dense_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Dense tensors that hold all of its values, itself if it is one. Gradients flow through them."""
    if tensor.is_nested:
        return tensor.unbind()
    return (tensor,) if tensor.layout is torch.strided else (tensor.to_dense(),)


def same_bits(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Whether two tensors are ``torch.equal``, a NaN being equal to itself."""
    # NaN equals NaN here: a network that gives one whole must give it when split, too.
    if b is None or (a.dtype, a.layout, a.is_nested) != (b.dtype, b.layout, b.is_nested):
        return False
    if a.is_nested or a.layout is not torch.strided:
        parts, others = (_stored(each) for each in (a.detach(), b.detach()))
        return len(parts) == len(others) and all(map(same_bits, parts, others))
    return a.shape == b.shape and (
        torch.equal(a, b)
        or (a.is_floating_point() and torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0)))
    )


def _stored(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that it is kept in: the gradient of a large table has few rows, and would be all of it."""
    if tensor.layout is torch.sparse_coo:
        shape = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu")
        return (shape, tensor._indices(), tensor._values())
    return dense_parts(tensor)
