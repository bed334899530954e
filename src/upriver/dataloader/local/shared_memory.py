"""Samples in one piece of shared memory, as loader processes send those of a divided batch.

PyTorch sends each tensor in shared memory of its own, and whoever receives it keeps a file descriptor for it.
A process may have about a thousand, which a few batches take whose samples wait for the others of theirs.
It also moves a tensor's memory there and gives up what it was in, on which an array may still look; and NumPy
pickles an array in an order of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from upriver.errors import ConfigError
from upriver.protocol.tree import MOST_GAPS, writeable

ALIGNED_BYTES = 64
"""Tensors begin at multiples of this, as PyTorch's own do."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor, or an array, in the shared memory.

    Attributes:
        start: Its first byte.
        extent: Elements from its first to its last, with those between that it leaves out.
    """

    start: int
    extent: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    array: bool

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
        samples: With a `SharedTensor` for each.
        memory: All of it, in bytes.
    """

    samples: list[Any]
    memory: torch.Tensor

    def unpacked(self) -> list[Any]:
        """The samples, with the strides that they were packed with; they share the memory."""

        def value(place: SharedTensor) -> Any:
            tensor = place.span(self.memory).as_strided(place.shape, place.strides)
            return tensor.numpy() if place.array else tensor

        samples: list[Any] = pytree.tree_map_only(SharedTensor, value, self.samples)
        return samples


def as_sent(made: Any) -> Any:
    """What a loader process has made, as PyTorch can send it.

    It sends a conjugate or negative view as what lies under that: other numbers. A tensor within a graph
    fails in a thread of its own, and whoever waits for it waits for good.

    Raises:
        ConfigError: If there is a tensor within a graph.
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


def packed(samples: list[Any]) -> list[Any] | Packed:
    """Samples as they are sent to the training process.

    Only plain tensors and arrays in lists, tuples and dicts are packed, as samples are that can be made
    elsewhere. They keep their strides, or the order of these where most of what they span is not theirs.
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
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    memory.set_(torch.UntypedStorage._new_shared(places[-1].stop))  # type: ignore[no-untyped-call]
    for tensor, at in zip(tensors, places, strict=True):
        at.span(memory).copy_(tensor.as_strided((at.extent,), (1,)))
    return Packed(placed, memory)


def _of_array(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Over its memory, or that of a copy; None where no tensor has its like."""
    if type(array) is not np.ndarray or array.dtype.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(writeable(array))
    except (TypeError, ValueError):  # its type, or the order of its bytes
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
