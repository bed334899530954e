"""Notices weights that are written to after a model was captured: servers have those of before."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from upriver.errors import FrozenChanged
from upriver.program.freeze import fold
from upriver.program.weights import storage_order

PIECE_BYTES = 64 * 1024
"""Compared with each request: some 10 us. Where all weights were written to, any piece shows it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    names: tuple[str, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    versions: tuple[int, ...] = ()


class Unchanged:
    """Weights that programs share with the user's model. Thread-safe.

    In-place changes move a tensor's version, which is looked at with each request: some 15 us for the 320
    tensors of a ResNet-50. Writes through ``.data`` and by fused optimizers do not: for these the values of
    one piece are compared with each request, another one each time, and of all when the next form of call is
    captured. A tensor that comes in the place of another one changes nothing of what programs compute.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[str, int] = {}
        self._seen = _Seen()
        self._pieces: tuple[tuple[str, torch.Tensor, int], ...] = ()
        self._at = 0

    def forked(self) -> None:
        """In a child of this process: nobody there holds the lock."""
        self._lock = threading.Lock()

    def watch(self, weights: Mapping[str, torch.Tensor]) -> None:
        """They count from here on, beside those that do.

        Args:
            weights: Name to tensor.

        Raises:
            FrozenChanged: If one has other values than what had its name before.
        """
        with self._lock:
            known = {(name, tensor.data_ptr()) for name, tensor in _pairs(self._seen)}
            new = {
                name: tensor
                for name, tensor in weights.items()
                if (name, tensor.data_ptr()) not in known and not tensor.is_inference()  # has no version
            }
            versions = _versions(new.values())
            digests = {name: fold(tensor) for name, tensor in weights.items()}
            for name in digests.keys() & self._digests.keys():
                if digests[name] != self._digests[name]:
                    raise _changed(name)
            self._digests |= digests
            pieces = [(name, piece, _fold(piece)) for name in new for piece in _pieces(new[name])]
            random.Random(0).shuffle(pieces)  # large weights have many
            self._pieces = (*self._pieces, *pieces)
            seen = self._seen
            self._seen = _Seen(
                (*seen.names, *new), (*seen.tensors, *new.values()), (*seen.versions, *versions)
            )

    def check(self) -> None:
        """Whether they are as they were.

        Raises:
            FrozenChanged: If one has other values; the same ones written once more are no change.
        """
        seen = self._seen
        if _versions(seen.tensors) != seen.versions:
            with self._lock:
                self._look()
        if self._pieces:
            name, piece, digest = self._pieces[at := self._at]
            if _fold(piece) != digest:
                raise _changed(name)  # and so does the next one
            self._at = (at + 1) % len(self._pieces)

    def _look(self) -> None:
        seen = self._seen
        versions = _versions(seen.tensors)
        for (name, tensor), before, now in zip(_pairs(seen), seen.versions, versions, strict=True):
            if now != before and fold(tensor) != self._digests[name]:
                raise _changed(name)
        self._seen = _Seen(seen.names, seen.tensors, versions)


def _pairs(seen: _Seen) -> Iterator[tuple[str, torch.Tensor]]:
    return zip(seen.names, seen.tensors, strict=True)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Its bytes where it has them in main memory: to look at others takes as long as a small request."""
    if not tensor.is_cpu or not tensor.numel():
        return ()
    flat = storage_order(tensor.detach()).reshape(-1).view(torch.uint8)
    return torch.split(flat, PIECE_BYTES)


def _fold(piece: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(piece.numpy().data)


def _versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in tensors])


def _changed(name: str) -> FrozenChanged:
    return FrozenChanged(
        f"{name!r} changed after the model had been captured, and servers have what it was; make another one "
        "with upriver.offload()"
    )
