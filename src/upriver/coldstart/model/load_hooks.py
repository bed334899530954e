"""Check the code that a model runs when it is loaded: its hooks, and overrides of torch's methods.

``load_state_dict`` may rename, change or replace weights on their way into the model, or change the model
after them. Weights that arrive one by one skip that code. So a model with such code is loaded once without
data: tensors on the meta device replace its parameters and buffers, and the weights. If the code copies each
weight unchanged and writes nothing else, weights may arrive one by one.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from upriver.coldstart.format.checkpoint import WeightSource
from upriver.coldstart.model.assignment import MOST_NAMED
from upriver.errors import ModelError
from upriver.program.graph.schema import DTYPES
from upriver.text import error_text

_OF_TORCH = (
    nn.Module._load_from_state_dict,
    nn.modules.batchnorm._NormBase._load_from_state_dict,
    nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
)
"""Methods that are known to copy only."""


def check_loading_code(model: nn.Module, source: WeightSource, *, converted: bool = False) -> None:
    """Check that loading a model copies each stored weight unchanged.

    Args:
        model: Constructed model. Its code runs as in a load, and changes that it makes to attributes stay.
        converted: True if the names are those that transformers saves, which it converts before it loads.

    Raises:
        ModelError: If loading changes anything; the message names the part that changes, or the error of the
            model's code.
    """
    if not _has_code(model):
        return
    stored = {placed.name: _meta(placed.shape, DTYPES[placed.dtype]) for placed in source.tensors}
    stored |= {tie: stored[name] for tie, name in source.ties.items()}
    if converted:
        stored = {name: _meta(each.shape, each.dtype) for name, each in model.state_dict().items()}
    before, has = _attributes(model), f"{type(model).__name__} has code of its own"
    try:
        changed = _changed(model, stored)
    except Exception as error:
        raise ModelError(
            f"{has} that runs when it is loaded (a load_state_dict hook, or such a method) and needs the "
            f"weights' values, or raises: {error_text(error)}. Load it with load_state_dict"
        ) from error
    if changed or _attributes(model) != before:
        what = f"changes {', '.join(changed[:MOST_NAMED])}" if changed else "computes something from them"
        raise ModelError(
            f"{has} that {what} when it is loaded (a load_state_dict hook, or such a method), which weights "
            "that arrive by themselves do not pass. Load it with load_state_dict"
        )


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _changed(model: nn.Module, stored: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the parts of a model that differ from their stored weights, or are written without one.

    A safetensors file does not record the versions of a model's modules. Some modules cannot load weights
    without one. The weights are then assumed to be of the current versions.
    """
    try:
        return _changed_by(model, stored, None)
    except Exception:
        return _changed_by(model, stored, getattr(model.state_dict(), "_metadata", None))


def _changed_by(model: nn.Module, stored: Mapping[str, torch.Tensor], versions: object) -> list[str]:
    given = OrderedDict((name, _meta(each.shape, each.dtype)) for name, each in stored.items())
    if versions is not None:
        given._metadata = versions  # type: ignore[attr-defined]
    with _stood_in(model), torch.no_grad(), _Copies() as copies:
        own = _state(model)
        model.load_state_dict(given, strict=False)
        now = _state(model)
    return [
        name
        for name, part in own.items()
        if now.get(name) is not part or not copies.plain(given.get(name), part)
    ]


def _has_code(model: nn.Module) -> bool:
    """Return True if any code besides torch's own copying takes part."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return True
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module)._load_from_state_dict not in _OF_TORCH
        for module in model.modules()
    )


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def _attributes(model: nn.Module) -> set[tuple[str, str, int]]:
    """Return the tensors that modules hold as plain attributes, by identity."""
    return {
        (path, name, id(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def _stood_in(model: nn.Module) -> Iterator[None]:
    """Replace all parameters and buffers by tensors without data.

    Afterwards the modules have exactly their own again, whatever the model's code assigned.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    parts: dict[int, torch.Tensor] = {}

    def part(value: torch.Tensor | None) -> Any:
        if value is None:
            return None
        if id(value) not in parts:
            there: torch.Tensor = torch.empty_like(value, device="meta")
            if isinstance(value, nn.Parameter):
                there = nn.Parameter(there, requires_grad=value.requires_grad)
            parts[id(value)] = there
        return parts[id(value)]

    try:
        for module, parameters, buffers in before:
            module._parameters.update({name: part(value) for name, value in parameters.items()})
            module._buffers.update({name: part(value) for name, value in buffers.items()})
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record which tensors were copied into which. Copies by unseen code do not count."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled during the check, or the compiler would never compile it again."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._into.setdefault(id(args[0]), []).append(args[1])
        return func(*args, **(kwargs or {}))

    def plain(self, given: torch.Tensor | None, part: torch.Tensor) -> bool:
        """Return True if only copies wrote a part, one of them from the unchanged given tensor."""
        copied = self._into.get(id(part), [])
        if part._version != len(copied):
            return False
        return given is None or (given._version == 0 and any(each is given for each in copied))
