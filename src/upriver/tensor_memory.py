"""Name the element types that files and frames may hold, and allocate memory at aligned addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""A cache line, and the widest vector of any CPU that PyTorch has kernels for."""

ITEM_NBYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element of each dtype that may leave a process, by the dtype's name. Headers are checked
without PyTorch, which a server's front imports only for tensors."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in headers, where it is a key of `ITEM_NBYTES` if it may leave a process."""
    return str(dtype).removeprefix("torch.")


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of 64."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def aligned_empty(nbytes: int) -> torch.Tensor:
    """Return a fresh uint8 tensor of ``nbytes`` bytes that starts on a 64-byte boundary."""
    import torch

    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    skew = buffer.data_ptr() % ALIGNMENT
    if skew:  # not seen on Linux, where PyTorch aligns to 64 by itself
        buffer = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
        skew = buffer.data_ptr() % ALIGNMENT
        start = (ALIGNMENT - skew) % ALIGNMENT
        buffer = buffer[start : start + nbytes]
    return buffer
