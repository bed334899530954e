"""Map a model's tensors to the names under which transformers saves them, if it renames them.

Since version 5, ``save_pretrained`` undoes the changes that ``from_pretrained`` makes to a file. It renames
weights and splits those that the model stores as one, such as the experts of a layer. Its function runs here
on tensors without data. If each result is a part of one tensor, each stored tensor has its own place in the
model's memory.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

HINT = (
    "transformers' from_pretrained reads files of other names: publish the model that it gives, with "
    "coldstart.publish_model or upriver push --weights-to, and load that"
)


def is_pretrained(model: nn.Module) -> bool:
    """Return True if a model is one of transformers'."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return isinstance(kind, type) and isinstance(model, kind)


def as_saved(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None] | None:
    """Return a model's own memory under the names that ``save_pretrained`` writes.

    Returns:
        For each name the part of the model that is stored under it; None for a computed value, or if nothing
        is stored. None for the whole mapping if names and forms are those of the state dict.
    """
    if not is_pretrained(model):
        return None
    twins = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        for name, tensor in state.items()
    }
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        with torch.no_grad(), _Uncopied():
            saved: Mapping[str, torch.Tensor] = loading.revert_weight_conversion(model, dict(twins))
    except Exception:  # before version 5 there is no such module, and operations raise any error
        return None
    own = {twin.untyped_storage()._cdata: name for name, twin in twins.items()}
    parts = {name: own.get(part.untyped_storage()._cdata) for name, part in saved.items()}
    if all(name == part and saved[name].stride() == twins[name].stride() for name, part in parts.items()):
        return None
    num_elements: Counter[str | None] = Counter()
    for name, part in parts.items():
        num_elements[part] += saved[name].numel()
    found = {
        name: _part_of(state[part], saved[name])
        if part is not None and num_elements[part] == state[part].numel()
        else None
        for name, part in parts.items()
    }
    return found if None in found.values() else found | dict.fromkeys(state.keys() - num_elements.keys())


def _part_of(tensor: torch.Tensor, twin: torch.Tensor) -> torch.Tensor | None:
    """Return the part of a tensor that a view of its twin covers, or None if the types differ."""
    if twin.dtype != tensor.dtype:
        return None
    return tensor.as_strided(twin.shape, twin.stride(), tensor.storage_offset() + twin.storage_offset())


class _Uncopied(TorchFunctionMode):
    """Return the tensor itself instead of a contiguous copy, so that it is recognized as a part."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
