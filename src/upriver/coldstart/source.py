"""Where a model's weights lie in a store: objects, places in them, and the order in which to ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from upriver.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """One tensor, in row-major order.

    Attributes:
        name: As in the model's state dict.
        dtype: One of :data:`~upriver.program.graph.DTYPES`.
        shape: Its sizes.
        path: The object that it lies in.
        start: Its first byte, counted from the object's.
        stop: The byte behind its last one.
        crc32c: Of each chunk of :attr:`Source.chunk_bytes`, counted from ``start``; empty where none are known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    stop: int
    crc32c: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model's weights in a store.

    Attributes:
        store: Where they are.
        path: What was asked for.
        tensors: In execution order where ``ordered``, else as they lie.
        ties: Names of tensors that are others too, and the names that those have in ``tensors``.
        etags: Object to its ETag, which is empty where the store has none.
        chunk_bytes: How many bytes of a tensor one checksum is for.
        ordered: Whether the execution order is known.
    """

    store: Store
    path: str
    tensors: tuple[Placed, ...]
    ties: Mapping[str, str]
    etags: Mapping[str, str]
    chunk_bytes: int
    ordered: bool
