"""Turn a row into bytes and back, with the type, shape and strides of each tensor.

A tensor is stored without gaps, in the order in which its dimensions lie in memory. A job concatenates rows
by `torch.cat`, which takes the order of dimensions from strides. So a rebuilt row has strides that give the
same result as the row that was stored, which is a narrow part of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from upriver.errors import ConfigError, Damaged
from upriver.tensor_memory import ALIGNMENT, ITEM_NBYTES, aligned, aligned_empty, dtype_name

Row: TypeAlias = tuple[torch.Tensor, ...]
"""Hold one sample of every tensor that crosses a cut, in main memory."""

MAX_DIMS = 64
"""Most dimensions of a tensor in PyTorch's own loops."""

_PADDING = memoryview(bytes(ALIGNMENT))


class TensorForm(NamedTuple):
    """Form of one tensor of a row.

    Attributes:
        dtype: Name of the element type, as ``float32``.
        strides: Elements between neighbours along each dimension.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


RowForm: TypeAlias = tuple[TensorForm, ...]


class PackedRow(NamedTuple):
    """A row as bytes: views of its tensors' memory where that is dense, else copies.

    Attributes:
        parts: Bytes of each tensor, with padding up to a multiple of 64.
        nbytes: Sum of the parts' sizes.
    """

    form: RowForm
    parts: tuple[memoryview, ...]
    nbytes: int


def packed(row: Sequence[torch.Tensor]) -> PackedRow:
    """Return a row as bytes.

    Raises:
        ConfigError: If a tensor is not dense in main memory, or of a dtype that is not stored.
    """
    form, parts, nbytes = list[TensorForm](), list[memoryview](), 0
    for tensor in row:
        plain = _plain(tensor)
        each = _form_of(plain.dtype, plain.shape, plain.stride())
        form.append(each)
        if plain.numel():
            parts.append(_bytes_in_order(plain, each.strides))
            gap = -len(parts[-1]) % ALIGNMENT
            nbytes += len(parts[-1]) + gap
            if gap:
                parts.append(_PADDING[:gap])
    return PackedRow(tuple(form), tuple(parts), nbytes)


class RowBuffer:
    """Memory for the bytes of some rows, one allocation for all.

    Attributes:
        array: The bytes, at a multiple of 64.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = aligned_empty(nbytes)
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = self._bytes.numpy()
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def view(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int
    ) -> torch.Tensor:
        """Return a tensor in this memory, whose first element is ``start`` elements behind the beginning."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._bytes.view(dtype)
        return typed.as_strided(shape, strides, typed.storage_offset() + start)


class RowLayout:
    """Positions of a row's tensors in its bytes.

    Attributes:
        nbytes: Bytes of the row as stored, a multiple of 64.
        memory_nbytes: Bytes of the row's tensors in memory: more if there are gaps between elements.

    Raises:
        Damaged: If no row has this form.
    """

    def __init__(self, form: RowForm) -> None:
        self.nbytes, gaps_nbytes = 0, 0
        self._makers = list[Callable[[RowBuffer, int], torch.Tensor]]()
        for each in form:
            _check(each)
            itemsize = ITEM_NBYTES[each.dtype]
            self._makers.append(_maker(each, self.nbytes))
            self.nbytes += aligned(math.prod(each.shape) * itemsize)
            if not _is_dense(each.shape, each.strides):
                gaps_nbytes += (_last_element(each.shape, each.strides) + 1) * itemsize
        self.memory_nbytes = self.nbytes + gaps_nbytes

    def build(self, buffer: RowBuffer, start: int = 0) -> Row:
        """Return the row whose bytes a buffer holds from ``start`` on, as views of the buffer."""
        return tuple(make(buffer, start) for make in self._makers)


def unpacked(pack: PackedRow) -> Row:
    """Return the row in memory of its own, as if it had been stored and read."""
    buffer, end = RowBuffer(pack.nbytes), 0
    for part in pack.parts:
        buffer.array[end : end + len(part)] = part
        end += len(part)
    return layout_of(pack.form).build(buffer)


@lru_cache(maxsize=1024)
def layout_of(form: RowForm) -> RowLayout:
    """Return the layout of a form.

    Raises:
        Damaged: If no row has this form.
    """
    return RowLayout(form)


# ------------------------------------------------------------------------------------------ strides


@lru_cache(maxsize=4096)
def kept_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a stored tensor: its own if it is dense, else dense ones in the same order.

    Strides of dimensions of size 1 count, too: `torch.cat` looks at them. Where the same order would lose or
    make up channels that lie last, the usual strides with channels last or first take its place.
    """
    if _is_dense(shape, strides):
        return strides
    last = _channels_last(shape, strides)
    dims = len(shape)
    first_order = range(dims - 1, -1, -1)
    for order in (_ascending(strides), first_order, _CHANNELS_LAST.get(dims, first_order)):
        found = _dense_strides(shape, order)
        if _channels_last(shape, found) == last:
            return found
    return strides  # channels last with one dimension above size 1, which needs gaps to be seen as such


_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""Dimensions by ascending stride where channels lie last, by the number of dimensions."""


def _channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether PyTorch sees a tensor as one whose channels lie last.

    The rule is that of ``suggest_memory_format`` (c10/core/MemoryFormat.h), which `torch.cat` asks.
    """
    order = _CHANNELS_LAST.get(len(shape))
    if order is None or 0 in shape or strides[1] == 0:
        return False
    least = 0
    for dim in order:
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True


def _ascending(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dim: (strides[dim], -dim))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements fill their memory without gaps and overlaps."""
    if 0 in shape:
        return True
    expected = 1
    for dim in _ascending(strides):
        if shape[dim] > 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def _last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


# ------------------------------------------------------------------------------------------- tensors


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        raise ConfigError(
            f"only dense tensors in main memory can be kept, got {tensor.layout} on {tensor.device}"
        )
    # Lazy conjugation and negation are flags, not bytes: apply them to the bytes.
    return tensor.detach().resolve_conj().resolve_neg()


@lru_cache(maxsize=4096)
def _form_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorForm:
    if dtype_name(dtype) not in ITEM_NBYTES:
        raise ConfigError(f"dtype {dtype} cannot be kept; allowed are {', '.join(ITEM_NBYTES)}")
    return TensorForm(dtype_name(dtype), tuple(shape), kept_strides(tuple(shape), strides))


def _bytes_in_order(tensor: torch.Tensor, strides: Sequence[int]) -> memoryview:
    """Return the elements as bytes, by descending strides of the stored form."""
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        tensor = tensor.permute(order).contiguous()
    # Not `view`, which keeps the stride of a single element.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _check(form: TensorForm) -> None:
    shape, strides = form.shape, form.strides
    if (
        form.dtype not in ITEM_NBYTES
        or not len(shape) == len(strides) <= MAX_DIMS
        or min((*shape, *strides), default=0) < 0
        or max((*shape, *strides), default=0) >= 2**63
        or kept_strides(shape, strides) != strides
    ):
        raise Damaged(f"no row has a tensor of the form {str(tuple(form))[:200]}")


def _maker(form: TensorForm, start: int) -> Callable[[RowBuffer, int], torch.Tensor]:
    """Return a function that makes a tensor from the bytes of its row: a view, unless its strides have gaps.

    Args:
        start: Bytes of the row before the tensor.
    """
    dtype: torch.dtype = getattr(torch, form.dtype)
    shape, strides = form.shape, form.strides
    dense = strides if _is_dense(shape, strides) else _dense_strides(shape, _ascending(strides))

    def empty(buffer: RowBuffer, row: int) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")

    def view(buffer: RowBuffer, row: int) -> torch.Tensor:
        return buffer.view(dtype, shape, dense, (row + start) // dtype.itemsize)

    def spread(buffer: RowBuffer, row: int) -> torch.Tensor:
        return empty(buffer, row).copy_(view(buffer, row))

    if not math.prod(shape):
        return empty
    return view if dense == strides else spread
