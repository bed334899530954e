"""Load a model the plain way, as the baseline of the others: construct, read all, copy, then compute.

The module also loads a local file into a model through the model's own loading code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from upriver.coldstart.format.checkpoint import (
    INDEX_ENDING,
    TensorLocation,
    WeightSource,
    check_bytes,
    find,
    find_any,
)
from upriver.coldstart.format.manifest import ENDING
from upriver.coldstart.format.saved_names import is_pretrained
from upriver.coldstart.format.uris import file_at, opened
from upriver.coldstart.model.assignment import WeightMemory, match, memories
from upriver.errors import ConfigError, Damaged, ModelError, StoreError
from upriver.program.graph.schema import DTYPES
from upriver.program.graph.weights_file import is_dense, place_of
from upriver.store import Store


def load_plainly(
    build_model: Callable[[], nn.Module],
    uri: str,
    *,
    store: Store | None = None,
    store_options: Mapping[str, str] | None = None,
) -> nn.Module:
    """Return a model with its weights, loaded step by step. Memory holds the weights twice meanwhile.

    Raises:
        ModelError: If the weights are for another model.
        ProgramError: If the file is invalid.
        Damaged: If a weight has another checksum than the published one.
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
        check_bytes(source, placed, found)
        memory.room()[:] = found
        memory.settle()
    return model


def load_weights(model: nn.Module, path: Path) -> None:
    """Load local weights into a model with its own ``load_state_dict``.

    Args:
        model: Constructed model. A tied weight is needed under one of its names only.
        path: A safetensors file of any name, an index of several, or a folder, as for :func:`find`.

    Raises:
        ModelError: If no such weights exist, or they are for another model.
        ProgramError: If a file is invalid.
        Damaged: If a weight has another checksum than the published one.
    """
    try:
        source = _found(path)
        state = {placed.name: _read(source, placed) for placed in source.tensors}
    except Damaged:
        raise
    except (StoreError, ConfigError) as error:
        raise ModelError(f"cannot read weights from {path}: {error}") from None
    if is_pretrained(model) and (matched := match(model, source)).converted:
        with torch.no_grad():
            for placed, targets in zip(matched.source.tensors, matched.targets, strict=True):
                for target in targets:
                    target.copy_(state[placed.name])
        return
    state |= {tie: state[name] for tie, name in source.ties.items()}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from error
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    places = {name: place_of(value) for name, value in tensors.items() if is_dense(value) and value.numel()}
    there = {places[name] for name in state.keys() & places.keys()}
    missing = [name for name in missing if places.get(name) not in there]
    for what, names in (("lacks", missing), ("has, and the model has not,", unexpected)):
        if names:
            raise ModelError(f"{path} {what} {len(names)} tensors, first {sorted(names)[0]!r}")


def _found(path: Path) -> WeightSource:
    store, name = file_at(path)
    is_other = path.is_file() and not name.endswith((ENDING, INDEX_ENDING))
    return find_any(store, name) if is_other else find(store, name)


def _read(source: WeightSource, placed: TensorLocation) -> torch.Tensor:
    """Read one whole tensor and check it against its checksums."""
    tensor = torch.empty(placed.shape, dtype=DTYPES[placed.dtype], device="cpu")
    memory = WeightMemory(placed, (tensor,), {})
    room = memory.room()
    if room.nbytes:
        source.store.read_into(placed.path, placed.start, room, etag=source.etags[placed.path] or None)
    check_bytes(source, placed, room)
    memory.settle()
    return tensor
