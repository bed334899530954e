"""Bound the memory that libraries keep in a process after calls, however large the tensors.

This memory stays from run to run, in addition to all live tensors. Three parts are counted. Each was measured
with torch 2.13, oneDNN 3.12 and MKL 2024.2 (``benchmarks/memory_model`` shows a process's memory):

- a start: pools, tables and pages half used;
- the code that oneDNN generates for each form of convolution, one kernel a direction;
- the buffers into which a matrix product packs its operands. For each thread, MKL keeps each buffer that was
  larger than the earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

START_BYTES = 2 << 20
"""Memory of a process that has done next to nothing: 0.2 to 1.3 MB were measured."""

KERNEL_BYTES = 112 << 10
"""Code and descriptors of one kernel: 60 to 98 kB were measured, from 1 x 1 to 7 x 7, dense and depthwise."""

KERNELS = 1024
"""Largest number of kernels that torch lets oneDNN keep at once."""

PACKED_DEPTH = 192
"""Columns of the left operand, and rows of the right one, that a product packs at once."""

PACKED_BYTES = 5 << 20
"""Upper bound of the bytes that one product packs for one thread; see :func:`_packed`."""

PACKED_START_BYTES = 256 << 10
"""Bytes of a product's buffers however small the operands are."""

ALL_PACKED_BYTES = 11 << 20
"""Upper bound of the bytes that products of 60 random forms made one thread keep in all."""

ACCELERATOR_BYTES = 128 << 20
"""Workspaces of matrix products on an accelerator, which torch allocates. Up to 32 MiB for each of two
libraries and each of two threads, the caller's and autograd's."""

PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "dot"})
"""Operators that are matrix products."""

_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})


class LibraryMemory:
    """Record calls, and bound the memory that libraries keep after them."""

    def __init__(self) -> None:
        self._kernels: dict[Any, int] = {}
        self._products: set[tuple[int, bool, bool]] = set()
        self._accelerated = False

    def note(self, name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Record a call.

        Args:
            name: Name of the operator, without namespace.
            tensors: The tensors among its arguments.
        """
        if name in _CONVOLUTIONS:
            self._kernels[_form(name, args)] = sum(args[-1][:2]) if name.endswith("backward") else 1
        elif name in PRODUCTS:
            self._accelerated |= tensors[0].device.type != "cpu"
            if any(tensor.itemsize < 4 for tensor in tensors):
                self._kernels[_form(name, args)] = 1  # oneDNN computes these too
            self._products.add((_packed(*tensors[-2:]), _by_rows(tensors[-2]), _by_rows(tensors[-1])))

    @property
    def nbytes(self) -> int:
        """Bytes kept after these calls."""
        threads = torch.get_num_threads()
        packed = sum(each for each, *_ in self._products)  # one buffer for each size and layout
        return self._always + threads * min(packed, ALL_PACKED_BYTES)

    @property
    def most(self) -> int:
        """Bytes kept after these calls with any number of samples."""
        return self._always + torch.get_num_threads() * ALL_PACKED_BYTES * bool(self._products)

    @property
    def _always(self) -> int:
        kernels = min(sum(self._kernels.values()), KERNELS)
        return START_BYTES + kernels * KERNEL_BYTES + self._accelerated * ACCELERATOR_BYTES


def _packed(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return the bytes that one thread packs of two operands: slices of both, one block deep.

    For 200 random forms of 2 to 16384 rows and columns the result was never too low, and 1.5 times too high
    at the median.
    """
    depth, outer = min(left.shape[-1], PACKED_DEPTH), sum(left.shape[-2:-1]) + right.shape[-1]
    return min(4 * depth * outer, PACKED_BYTES) + PACKED_START_BYTES


def _by_rows(tensor: torch.Tensor) -> bool:
    return tensor.stride()[-1:] == (1,)


def _form(name: str, args: Sequence[Any]) -> Any:
    """Return the facts that decide on a kernel: forms of tensors, and all other arguments."""
    return name, tuple(_part(argument) for argument in args)


def _part(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return tuple(argument) if isinstance(argument, list | tuple) else argument
