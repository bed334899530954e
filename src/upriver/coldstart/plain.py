"""The plain way: construct, read all, copy, and only then answer. What the others are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from upriver.coldstart.filling import match, memories
from upriver.coldstart.layout import damaged
from upriver.coldstart.source import damaged_error, find
from upriver.coldstart.uris import opened
from upriver.store import Store


def load_plainly(
    build_model: Callable[[], nn.Module],
    uri: str,
    *,
    store: Store | None = None,
    store_options: Mapping[str, str] | None = None,
) -> nn.Module:
    """A model with its weights, one step after the other: the weights are in memory twice meanwhile.

    Args:
        build_model: Makes it.
        uri: As for :func:`upriver.coldstart.load`.
        store: As there.
        store_options: As there.

    Raises:
        ModelError: If the weights are not those of such a model.
        ProgramError: If the file is not what it should be.
        Damaged: If a weight has another checksum than was published.
        StoreError: If the store cannot be read.
    """
    where, path = (store, uri) if store is not None else opened(uri, store_options)
    model, source = build_model(), find(where, path)
    files = {name: memoryview(where.get(name, etag=etag or None)) for name, etag in source.etags.items()}
    matched = match(model, source)
    for placed, memory in zip(
        matched.source.tensors, memories(matched.source.tensors, matched.targets), strict=True
    ):
        found = files[placed.path][placed.start : placed.stop]
        if placed.crc32c and (wrong := damaged(placed, found, chunk_bytes=source.chunk_bytes)):
            raise damaged_error(source, placed, wrong[0])
        memory.room()[:] = found
        memory.settle()
    return model
