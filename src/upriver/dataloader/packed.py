"""Samples in one piece of shared memory, as loader processes send those of a divided batch.

PyTorch sends each tensor in shared memory of its own, and whoever receives it keeps a file descriptor for it.
A process may have about a thousand, which a few batches take whose samples wait for the others of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

ALIGNED_BYTES = 64
"""Tensors begin at multiples of this, as PyTorch's own do."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the shared memory.

    Attributes:
        start: Its first byte.
        extent: Elements from its first to its last, with those between that it leaves out.
    """

    start: int
    extent: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The byte behind its last."""
        return self.start + self.extent * self.dtype.itemsize

    def span(self, memory: torch.Tensor) -> torch.Tensor:
        """All of its elements, in the order in which they are in memory."""
        return memory[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True, slots=True)
class Packed:
    """Samples whose tensors are in one piece of shared memory.

    Attributes:
        samples: With a `Place` for each.
        memory: All of it, in bytes.
    """

    samples: list[Any]
    memory: torch.Tensor

    def unpacked(self) -> list[Any]:
        """The samples, with the strides that they had; they share the memory."""

        def tensor(place: Place) -> torch.Tensor:
            return place.span(self.memory).as_strided(place.shape, place.strides)

        samples: list[Any] = pytree.tree_map_only(Place, tensor, self.samples)
        return samples


def packed(samples: list[Any]) -> list[Any] | Packed:
    """Samples as they are sent to the training process.

    Only plain tensors in lists, tuples and dicts are packed, as samples are that can be made elsewhere.
    """
    tensors = list[torch.Tensor]()
    places = list[Place]()

    def place(tensor: torch.Tensor) -> torch.Tensor | Place:
        if not _plain(tensor):
            return tensor
        start = -(-places[-1].stop // ALIGNED_BYTES) * ALIGNED_BYTES if places else 0
        tensors.append(tensor)
        places.append(Place(start, _extent(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()))
        return places[-1]

    placed = pytree.tree_map_only(torch.Tensor, place, samples)
    if len(places) < 2:
        return samples
    memory = torch.empty(0, dtype=torch.uint8)
    memory.set_(torch.UntypedStorage._new_shared(places[-1].stop))  # type: ignore[no-untyped-call]
    for tensor, at in zip(tensors, places, strict=True):
        at.span(memory).copy_(tensor.as_strided((at.extent,), (1,)))
    return Packed(placed, memory)


def _plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
