"""Handle tensors outside plain memory: sparse, nested, packed, or of a class of their own.

A tracer sees that an operator reads such a tensor, but not which memory it shares. So no prefix holds one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from upriver.errors import CaptureError, ConfigError, ModelError


def unusual(tensor: torch.Tensor) -> str:
    """Return the kind of an unusual tensor in words. Empty for a tensor in plain memory."""
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
    """Return dense tensors that hold all values of a tensor. Gradients flow through them."""
    if tensor.is_nested:
        return tensor.unbind()
    return (tensor,) if tensor.layout is torch.strided else (tensor.to_dense(),)


def same_bits(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal as by ``torch.equal``, with NaN equal to NaN."""
    # A network that gives a NaN as a whole must give it when split too.
    if b is None or (a.dtype, a.layout, a.is_nested) != (b.dtype, b.layout, b.is_nested):
        return False
    if a.is_nested or a.layout is not torch.strided:
        parts, others = (stored_parts(each) for each in (a.detach(), b.detach()))
        return len(parts) == len(others) and all(map(same_bits, parts, others))
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))


def storages_of(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """Return the storages of a tensor: one, several if sparse or jagged, none if opaque."""
    match tensor.layout:
        case torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case torch.jagged:
            jagged: Any = tensor  # of a class unknown to mypy
            parts = [jagged.values(), jagged.offsets()]
        case _:
            parts = [tensor] if torch._C._has_storage(tensor) else []
    return [part.untyped_storage() for part in parts]


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Convert errors that only a watched run raises, in torch or the model's own classes, to a refusal.

    Raises:
        CaptureError: In place of the error, beginning with ``what``.
    """
    try:
        yield
    except (ModelError, ConfigError):
        raise
    except Exception as error:
        raise CaptureError(f"{what}: {type(error).__name__}: {error}".splitlines()[0]) from error


def stored_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors that store a tensor's values.

    The gradient of a large table has few rows. As a dense tensor it would have all of them.
    """
    if tensor.layout is torch.sparse_coo:
        shape = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu")
        return (shape, tensor._indices(), tensor._values())
    return dense_parts(tensor)
