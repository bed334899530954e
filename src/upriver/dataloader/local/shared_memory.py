"""Pack the samples of a divided batch into one block of shared memory, for loader processes to send.

PyTorch sends each tensor in shared memory of its own, and the receiver holds a file descriptor for each. A
process may have about a thousand, which a few batches of waiting samples use up. PyTorch also moves a tensor
into shared memory and frees its old memory, which an array may still view. NumPy pickles an array in a memory
order of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from upriver.errors import ConfigError
from upriver.protocol.tree import MOST_GAPS, writeable

ALIGNED_BYTES = 64
"""Alignment of tensors in bytes, as in PyTorch."""

SHARED_MEMORY, ROOM_BYTES = "/dev/shm", 2**28
"""Directory of shared memory, and the bytes that must stay free there for what is not needed at once."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Location of a tensor or an array in the shared memory.

    Attributes:
        start: First byte.
        extent: Number of elements from the first to the last, including gaps.
    """

    start: int
    extent: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    array: bool

    @property
    def stop(self) -> int:
        """Return the position after the last byte."""
        return self.start + self.extent * self.dtype.itemsize

    def span(self, memory: torch.Tensor) -> torch.Tensor:
        """Return all elements, in memory order."""
        return memory[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples whose tensors are in one block of memory.

    Attributes:
        samples: Samples with a `SharedTensor` in place of each tensor.
        memory: The block, in bytes: a tensor in shared memory, or an array that is sent through a pipe.
    """

    samples: list[Any]
    memory: torch.Tensor | np.ndarray[Any, Any]

    def unpacked(self) -> list[Any]:
        """Return the samples with their original strides; they share the memory."""
        memory = torch.as_tensor(self.memory, device="cpu")

        def value(place: SharedTensor) -> Any:
            tensor = place.span(memory).as_strided(place.shape, place.strides)
            return tensor.numpy() if place.array else tensor

        samples: list[Any] = pytree.tree_map_only(SharedTensor, value, self.samples)
        return samples


def as_sent(made: Any) -> Any:
    """Convert the result of a loader process so that PyTorch can send it.

    PyTorch would send the memory below a conjugate or negative view, which holds other numbers. A tensor in
    an autograd graph fails in a sending thread, and the receiver would wait forever.

    Raises:
        ConfigError: If a tensor is part of an autograd graph.
    """
    if not any(_is_lazy(each) for each in pytree.tree_leaves(made)):
        return made
    return pytree.tree_map_only(torch.Tensor, lambda each: _as_sent(each) if _is_lazy(each) else each, made)


def _is_lazy(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.is_conj() or value.is_neg() or (value.requires_grad and not value.is_leaf)


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad and not tensor.is_leaf:
        raise ConfigError(
            "a loader process cannot send a tensor with the graph that made it: detach() it, or make samples "
            "with num_workers=0"
        )
    return tensor.resolve_conj().resolve_neg()


def has_room(num_bytes: int = 0) -> bool:
    """Return whether shared memory is far from full, also with some bytes more."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except (AttributeError, OSError):  # on another system
        return False
    return room.f_bavail * room.f_frsize >= ROOM_BYTES + num_bytes


def packed(samples: list[Any], *, shared: bool = True) -> list[Any] | PackedSamples:
    """Return samples as they are sent to another process of the loader.

    Only plain tensors and arrays in lists, tuples and dicts are packed, which are the types that samples made
    elsewhere have. They keep their strides, or only the order of these if most of their span is gaps.

    Args:
        shared: Whether to use shared memory, which the other process need not copy.
    """
    tensors = list[torch.Tensor]()
    places = list[SharedTensor]()

    def place(value: torch.Tensor | np.ndarray[Any, Any]) -> Any:
        array = isinstance(value, np.ndarray)
        tensor = _of_array(value) if isinstance(value, np.ndarray) else value
        if tensor is None or not _plain(tensor):
            return value
        if _extent(tensor) > MOST_GAPS * tensor.numel():
            tensor = tensor.clone()
        start = -(-places[-1].stop // ALIGNED_BYTES) * ALIGNED_BYTES if places else 0
        tensors.append(tensor)
        shape, strides = tuple(tensor.shape), tensor.stride()
        places.append(SharedTensor(start, _extent(tensor), tensor.dtype, shape, strides, array))
        return places[-1]

    placed = pytree.tree_map_only((torch.Tensor, np.ndarray), place, samples)
    if not places:
        return samples
    memory = _memory(places[-1].stop, shared=shared)
    for tensor, at in zip(tensors, places, strict=True):
        at.span(memory).copy_(tensor.as_strided((at.extent,), (1,)))
    return PackedSamples(placed, memory if shared else memory.numpy())


def _memory(num_bytes: int, *, shared: bool) -> torch.Tensor:
    if not shared:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    return memory.set_(torch.UntypedStorage._new_shared(num_bytes))  # type: ignore[no-untyped-call]


def _of_array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor over the array's memory or a copy; None if no tensor can represent it."""
    if type(array) is not np.ndarray or array.dtype.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(writeable(array))
    except (TypeError, ValueError):  # its type, or its byte order
        return None


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
