"""Tensors that do not lie in plain memory: sparse, nested, packed, or of a class of their own.

A tracer sees that an operator reads one, and not what it shares with others, so no prefix holds any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from upriver.errors import CaptureError, ConfigError, ModelError


def unusual(tensor: torch.Tensor) -> str:
    """What kind of tensor it is, in words; empty for one in plain memory."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a tensor of type {type(tensor).__name__}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor of torch.func"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
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
        parts, others = (stored_parts(each) for each in (a.detach(), b.detach()))
        return len(parts) == len(others) and all(map(same_bits, parts, others))
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))


def storages_of(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """Where its elements lie: one storage, several for a sparse or jagged tensor, none for an opaque one."""
    match tensor.layout:
        case torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case torch.jagged:
            jagged: Any = tensor  # of a class that mypy does not know
            parts = [jagged.values(), jagged.offsets()]
        case _:
            parts = [tensor] if torch._C._has_storage(tensor) else []
    return [part.untyped_storage() for part in parts]


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Make an error that torch, or a class of the model's own, raises at what only a watcher does a refusal.

    Raises:
        CaptureError: In its place, beginning with ``what``.
    """
    try:
        yield
    except (ModelError, ConfigError):
        raise
    except Exception as error:
        raise CaptureError(f"{what}: {type(error).__name__}: {error}".splitlines()[0]) from error


def stored_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors that it is kept in: the gradient of a large table has few rows, and would be all of it."""
    if tensor.layout is torch.sparse_coo:
        shape = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu")
        return (shape, tensor._indices(), tensor._values())
    return dense_parts(tensor)
