"""What a trip over the wire does to tensors, without a wire: for proofs that a cut changes no bit.

Values, strides and shared storage survive a frame, and so does the distance of each tensor from a 64-byte
boundary. What does not survive is memory that nobody reads: a storage is sent once, and only the range of it
that is used, widened down to a multiple of 64 bytes from its start. Kernels choose their path, and with it
the low bits, by strides and alignment, so a proof feeds a suffix what would really arrive.
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
    """Copies of dense tensors as the receiver of a frame has them, in its main memory."""
    plain = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    ranges: dict[object, _Range] = {}
    for index, tensor in enumerate(plain):
        ranges.setdefault(_key(tensor, index), _Range(tensor)).widen(tensor)
    regions = {key: used.copied() for key, used in ranges.items()}
    keys = [_key(tensor, index) for index, tensor in enumerate(plain)]
    return [_view(tensor, ranges[key].start, regions[key]) for tensor, key in zip(plain, keys, strict=True)]


def _key(tensor: torch.Tensor, index: int) -> object:
    """What tensors have in common that share storage; an empty one shares nothing."""
    storage = tensor.untyped_storage()
    return (storage.device, storage.data_ptr(), storage.nbytes()) if tensor.numel() else index


class _Range:
    """The bytes of one storage, from ``start`` to ``stop``, that some tensors use."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.start, self.stop = self.storage.nbytes() if tensor.numel() else 0, 0

    def widen(self, tensor: torch.Tensor) -> None:
        """Take in what ``tensor`` uses."""
        if tensor.numel():
            low = int(tensor.storage_offset()) * tensor.itemsize
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * step for size, step in steps)
            self.start = min(self.start, low - low % BOUNDARY)
            self.stop = max(self.stop, low + (last + 1) * tensor.itemsize)

    def copied(self) -> torch.UntypedStorage:
        """A copy of the range, as far from a boundary as the storage itself."""
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
    """What a program gives, each of its stages run on tensors that stay and on tensors that were sent.

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
