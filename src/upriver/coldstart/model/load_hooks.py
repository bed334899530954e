"""What a model itself does when it is loaded: its hooks, and methods that it has in the place of torch's.

``load_state_dict`` may rename, change or replace weights on their way into the model, or change the model
behind them. Weights that arrive in their place pass none of that. So a model with such code is loaded once
without data: tensors on the meta device stand in for its parameters and buffers, and for the weights. Where
each of these is copied as it is, and nothing else is written, weights may arrive by themselves.
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
"""What these do is known: they copy."""


def check_loading_code(model: nn.Module, source: WeightSource, *, converted: bool = False) -> None:
    """Whether loading a model puts each weight into its place as it is stored.

    Args:
        model: As it was constructed. Its code runs as when it is loaded: what it notes on the model stays.
        source: Of its weights.
        converted: Whether the names are those that transformers saves, which it undoes before it loads.

    Raises:
        ModelError: If not; names what of the model's is changed, or what its code raises.
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
    """What of a model is not written as it is stored, or is written where nothing is stored.

    A safetensors file does not say of which versions of its modules weights are. Some modules cannot load
    such; weights are taken to be of those that there are.
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
    """Whether anything but torch's own copying takes part."""
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
    """Tensors that modules keep as neither parameter nor buffer, by their identity."""
    return {
        (path, name, id(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def _stood_in(model: nn.Module) -> Iterator[None]:
    """Inside, all parameters and buffers are tensors without data.

    Modules have exactly their own again afterwards, whatever was put in their place.
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
    """Notes which tensors were copied into which; what code copies that it does not see is none."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled meanwhile, or the compiler marks it never to be compiled again."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._into.setdefault(id(args[0]), []).append(args[1])
        return func(*args, **(kwargs or {}))

    def plain(self, given: torch.Tensor | None, part: torch.Tensor) -> bool:
        """Whether a part was written by copies alone, one of them of what was given for it, as that was."""
        copied = self._into.get(id(part), [])
        if part._version != len(copied):
            return False
        return given is None or (given._version == 0 and any(each is given for each in copied))
