"""The plain way: construct, read all, copy, and only then answer. What the others are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from upriver.coldstart.source import find
from upriver.coldstart.uris import opened
from upriver.errors import ModelError
from upriver.program.graph import DTYPES
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
        StoreError: If the store cannot be read.
    """
    where, path = (store, uri) if store is not None else opened(uri, store_options)
    model = build_model()
    source = find(where, path)
    files = {name: where.get(name, etag=etag or None) for name, etag in source.etags.items()}
    state = {
        placed.name: torch.frombuffer(
            bytearray(memoryview(files[placed.path])[placed.start : placed.stop]), dtype=DTYPES[placed.dtype]
        ).reshape(placed.shape)
        if placed.stop > placed.start
        else torch.empty(placed.shape, dtype=DTYPES[placed.dtype])
        for placed in source.tensors
    }
    state |= {tie: state[name] for tie, name in source.ties.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error
    return model
