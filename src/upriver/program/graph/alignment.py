"""Copy tensors as a trip over the wire would, for proofs that a cut changes no bit.

A frame preserves values, strides, shared storage, and the distance of each tensor from a 64-byte boundary. It
does not preserve unread memory: a storage is sent once, and only its used range. The range starts at a
multiple of 64 bytes from the start of the storage. Strides and alignment select a kernel's path, and so its
low bits. So a proof feeds a suffix exactly what would arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from upriver.errors import CaptureError
from upriver.program.example_inputs import Example
from upriver.program.graph.executor import Program
from upriver.program.tensor_layouts import same_bits

BOUNDARY = 64
"""A cache line, and the widest vector of any CPU that PyTorch has kernels for."""


def as_shipped(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of dense tensors, in main memory, as the receiver of a frame has them."""
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    ranges: dict[object, _Range] = {}
    for index, tensor in enumerate(plain):
        ranges.setdefault(_key(tensor, index), _Range(tensor)).widen(tensor)
    regions = {key: used.copied() for key, used in ranges.items()}
    keys = [_key(tensor, index) for index, tensor in enumerate(plain)]
    return [_view(tensor, ranges[key].start, regions[key]) for tensor, key in zip(plain, keys, strict=True)]


def _key(tensor: torch.Tensor, index: int) -> object:
    """Return a key that tensors sharing a storage have in common. An empty tensor shares none."""
    storage = tensor.untyped_storage()
    return (storage.device, storage.data_ptr(), storage.nbytes()) if tensor.numel() else index


class _Range:
    """Bytes of one storage, from ``start`` to ``stop``, that some tensors use."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.start, self.stop = self.storage.nbytes() if tensor.numel() else 0, 0

    def widen(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            low = int(tensor.storage_offset()) * tensor.itemsize
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * step for size, step in steps)
            self.start = min(self.start, low - low % BOUNDARY)
            self.stop = max(self.stop, low + (last + 1) * tensor.itemsize)

    def copied(self) -> torch.UntypedStorage:
        """Return a copy of the range, at the storage's own distance from a boundary."""
        nbytes = self.stop - self.start
        raw = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        raw = raw.set_(self.storage, self.start, (nbytes,), (1,))
        buffer = torch.empty(nbytes + 2 * BOUNDARY, dtype=torch.uint8, device="cpu")
        skew = self.storage.data_ptr() % BOUNDARY if nbytes else 0
        begin = -buffer.data_ptr() % BOUNDARY + skew
        buffer[begin : begin + nbytes] = raw.cpu()
        region = buffer.untyped_storage()[begin : begin + nbytes]
        if not isinstance(region, torch.UntypedStorage):  # a slice of a storage is a storage
            raise TypeError("a slice of a storage is no storage")
        return region


def _view(tensor: torch.Tensor, start: int, region: torch.UntypedStorage) -> torch.Tensor:
    offset = int(tensor.storage_offset()) - start // tensor.itemsize if tensor.numel() else 0
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(region, offset, tensor.shape, tensor.stride())


def through_cuts(program: Program, example: Example) -> tuple[torch.Tensor, ...]:
    """Return a program's outputs, with each stage run both on tensors in memory and on sent ones.

    Raises:
        CaptureError: Naming the first cut that changes a bit.
    """
    kept = tuple(example.tensors)
    for position in range(program.num_stages):
        going_on = program.run(kept, position, position + 1)
        sent = program.run(as_shipped(kept), position, position + 1)
        if not all(same_bits(a, b) for a, b in zip(going_on, sent, strict=True)):
            after = program.stages[position - 1].name if position else "the input"
            raise CaptureError(f"a cut after {after!r} changes bits of what follows it")
        kept = going_on
    return kept
