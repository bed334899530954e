"""Whether two models are the same, and what of torch is global."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules


def forms(model: nn.Module) -> list[tuple[Any, ...]]:
    """Each tensor of the state, without what is in it."""
    return [
        (name, type(value), value.shape, value.dtype, value.stride(), value.device, value.storage_offset())
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    ]


def ties(model: nn.Module) -> list[list[str]]:
    """Which names share memory."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.numel():
            found[value.untyped_storage().data_ptr()].append(name)
    return sorted(names for names in found.values() if len(names) > 1)


def attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules have as plain attributes."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def assert_same_tensors(made: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]) -> None:
    assert list(made) == list(plain)
    for name, value in made.items():
        assert value.dtype == plain[name].dtype, name
        assert torch.equal(value.nan_to_num(7.0), plain[name].nan_to_num(7.0)), name


def assert_same_but_unread(made: nn.Module, plain: nn.Module) -> None:
    """All but the contents of parameters is the same."""
    assert forms(made) == forms(plain)
    assert ties(made) == ties(plain)
    wanted = {name: value.requires_grad for name, value in plain.named_parameters(remove_duplicate=False)}
    assert {n: p.requires_grad for n, p in made.named_parameters(remove_duplicate=False)} == wanted
    types = {name: type(value) for name, value in plain.named_parameters(remove_duplicate=False)}
    assert {n: type(p) for n, p in made.named_parameters(remove_duplicate=False)} == types
    assert_same_tensors(dict(made.named_buffers()), dict(plain.named_buffers()))
    assert_same_tensors(attributes(made), attributes(plain))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a model's answer, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def assert_same_outputs(
    made: nn.Module, plain: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """With the other one's state it gives the same bits."""
    made.load_state_dict(plain.state_dict())
    answers = []
    for model in (made.eval(), plain.eval()):
        torch.manual_seed(0)
        with torch.no_grad():
            answers.append(tensors_of(model(*args, **kwargs)))
    assert answers[0]
    for one, other in zip(*answers, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def globals_now() -> tuple[Any, ...]:
    """What a construction must leave as it was, but for torch's random state."""
    hooks = [value for name, value in vars(modules).items() if name.startswith("_global") and "hooks" in name]
    return (
        nn.init._no_grad_trunc_normal_,  # type: ignore[attr-defined]
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        [len(hook) for hook in hooks if isinstance(hook, dict)],
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
    )
