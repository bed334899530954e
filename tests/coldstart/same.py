"""Compare two models, count filled elements, and snapshot torch's global state."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.coldstart.model.construction import construct


def forms(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return the form of each tensor of the state, without its values."""
    return [
        (name, type(value), value.shape, value.dtype, value.stride(), value.device, value.storage_offset())
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    ]


def ties(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share memory."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.numel():
            found[value.untyped_storage().data_ptr()].append(name)
    return sorted(names for names in found.values() if len(names) > 1)


def attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that modules hold as plain attributes."""
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
    """Check that both models are the same, except for the values of parameters."""
    assert forms(made) == forms(plain)
    assert ties(made) == ties(plain)
    wanted = {name: value.requires_grad for name, value in plain.named_parameters(remove_duplicate=False)}
    assert {n: p.requires_grad for n, p in made.named_parameters(remove_duplicate=False)} == wanted
    types = {name: type(value) for name, value in plain.named_parameters(remove_duplicate=False)}
    assert {n: type(p) for n, p in made.named_parameters(remove_duplicate=False)} == types
    assert_same_tensors(dict(made.named_buffers()), dict(plain.named_buffers()))
    assert_same_tensors(attributes(made), attributes(plain))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's answer, in order."""
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
    """Check that both models give the same bits with the same state."""
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
    """Return the state that a construction must leave unchanged, except torch's random state."""
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


class Ran(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the elements that fills really write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::normal_", "aten::uniform_", "aten::erfinv_"):
            self.filled += args[0].numel()
        return func(*args, **(kwargs or {}))


def filled(build: Callable[[], nn.Module]) -> int:
    """Return how many elements are filled at random when a model is constructed."""
    with Ran() as ran:
        construct(build)
    return ran.filled


def checked(build: Callable[[], nn.Module], *inputs: torch.Tensor) -> nn.Module:
    """Construct a model, compare it with the plain one, and give it the plain one's weights."""
    torch.manual_seed(5)
    plain = build()
    torch.manual_seed(5)
    made = construct(build)
    assert_same_but_unread(made, plain)
    if inputs:
        assert_same_outputs(made, plain, inputs, {})
    return made
