"""The tail stays the user's: their modules, parameters, hooks and ``forward``, without the frozen prefix.

A *shadow* of the model is made of shallow clones of the boundary's ancestors in which every child that has
finished before the boundary is replaced by a stub, and the boundary by a module that gives the shipped value.
All else is shared by identity, so the optimizer, ``state_dict`` and hooks see the user's own objects. The
user's own ``forward`` runs on the shadow. Stubs give stride-0 NaN tensors of the right shape: they cost
nothing and poison any answer that should not have read them.

A fresh shadow is made for each call (a few dictionary copies), so calls share no state, and flags that the
user sets on the model between calls are always the current ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from upriver.errors import CaptureError, ConfigError, ModelError
from upriver.program.trace import Shape, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class _Skip:
    """A child that has finished before the boundary: what its first calls returned."""

    results: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ship:
    """The boundary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clone:
    """An ancestor of the boundary, or a container of skipped modules."""

    children: Mapping[str, _Skip | _Ship | _Clone]


class _Stub(nn.Module):
    """Stands for a module's calls before the boundary; later calls go to the module itself.

    It is a shallow clone of the module, of a subclass of its class: whatever the user's code reads from it,
    or asks of its type, is as ever. Only ``forward`` is another.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = next(self.__dict__["_upriver_results"])
        except StopIteration:
            return self.__dict__["_upriver_real"](*args, **kwargs)
        samples, device = self.__dict__["_upriver_form"]
        return pytree.tree_map_only(Shape, lambda s: placeholder(s, samples, device), result)


class _Shipped(nn.Module):
    """The boundary module, likewise: whatever goes in, the shipped value comes out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_upriver_value"]


_STAND_INS: dict[tuple[type, type], type[nn.Module]] = {}


def _stand_in(kind: type[nn.Module], module_class: type[nn.Module]) -> type[nn.Module]:
    """The class of a stand-in: ``kind`` decides what it does, ``module_class`` what it is."""
    key = (kind, module_class)
    if key not in _STAND_INS:
        place = {"__module__": module_class.__module__}
        _STAND_INS[key] = type(module_class.__name__, (kind, module_class), place)
    return _STAND_INS[key]


def _clone(module: nn.Module, clone_class: type[nn.Module], **state: Any) -> nn.Module:
    """A module that shares everything with another one by identity, except what ``state`` says."""
    clone: nn.Module = clone_class.__new__(clone_class)
    clone.__dict__.update(module.__dict__)
    clone.__dict__.update(state)
    clone.__dict__.pop("forward", None)
    return clone


def placeholder(shape: Shape, samples: int, device: torch.device) -> torch.Tensor:
    """A tensor of the right form that costs nothing and poisons what reads it."""
    if shape.dtype.is_floating_point or shape.dtype.is_complex:
        poison = torch.full((), float("nan"), dtype=shape.dtype, device=device)
    elif shape.dtype is torch.bool:
        poison = torch.zeros((), dtype=shape.dtype, device=device)
    else:
        poison = torch.full((), torch.iinfo(shape.dtype).min, dtype=shape.dtype, device=device)
    return poison.expand(shape.at(samples))


class Tail(nn.Module):
    """What is left of a model after its frozen prefix.

    Calling it with the features at the boundary, of any number of samples, gives what the whole model would
    have given. It owns no parameters: they stay the model's.
    """

    def __init__(self, model: nn.Module, boundary: str, calls: Trace) -> None:
        """Work out which modules are skipped.

        Raises:
            CaptureError: If the boundary was not called exactly once, or an ancestor has a ``forward`` of
                its own instance.
            ModelError: If a module that will be skipped has hooks.
        """
        super().__init__()
        found = calls.of(boundary)
        if len(found) != 1 or not isinstance(found[0].result, Shape):
            raise CaptureError(
                f"module {boundary!r} was not called exactly once with a single tensor as its answer"
            )
        self.boundary = boundary
        self._model = (model,)  # in a tuple: the parameters stay the model's, not the tail's
        self._features = found[0].result
        self._overwritten = found[0].overwritten
        self._inputs = calls.inputs
        self._recipe = self._plan(model, calls, found[0].exit)
        _refuse_hooks(model, self._recipe)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._model[0]

    def forward(self, features: torch.Tensor) -> Any:
        """The model's answer, from the value at the boundary.

        Args:
            features: What the boundary module gives, samples in the dimension in which the model has them.

        Raises:
            ConfigError: If they have another shape.
        """
        samples = self._samples(features)
        shadow = self._build(self.model, self._recipe, features, samples)
        inputs = [placeholder(shape, samples, features.device) for shape in self._inputs]
        return shadow(*inputs)

    def _samples(self, features: torch.Tensor) -> int:
        """How many samples these features are of.

        Raises:
            ConfigError: If they are none of this boundary's, the model's own input for example.
        """
        form = self._features
        if isinstance(features, torch.Tensor) and features.dim() == len(form.base):
            samples = form.samples_of(features.shape)
            if tuple(features.shape) == form.at(samples):
                return samples
        got = tuple(features.shape) if isinstance(features, torch.Tensor) else type(features).__name__
        wanted = ", ".join(
            "n" if slope else str(size) for size, slope in zip(form.base, form.slope, strict=True)
        )
        raise ConfigError(f"call the job with the features it yields, of shape ({wanted}), got {got}")

    def _plan(self, model: nn.Module, calls: Trace, end: int) -> _Clone:
        names = {module: path for path, module in model.named_modules()}
        finished: dict[str, list[Any]] = {}
        for call in calls.calls:
            if call.exit < end:
                finished.setdefault(call.path, []).append(call.result)

        def plan(module: nn.Module) -> _Skip | _Ship | _Clone | None:
            path = names[module]
            if path == self.boundary:
                return _Ship()
            if path in finished:
                return _Skip(results=tuple(finished[path]))
            planned = {name: plan(child) for name, child in module.named_children()}
            children = {name: item for name, item in planned.items() if item is not None}
            if children and "forward" in module.__dict__:
                raise CaptureError(f"module {path or 'the model itself'!r} has a forward of its own instance")
            return _Clone(children=children) if children else None

        recipe = plan(model)
        if not isinstance(recipe, _Clone):
            raise CaptureError(f"module {self.boundary!r} lies in no module that could run the rest")
        return recipe

    def _build(self, module: nn.Module, recipe: _Clone, features: torch.Tensor, samples: int) -> nn.Module:
        children = dict(module._modules)
        for name, item in recipe.children.items():
            child = children[name]
            assert child is not None  # the recipe names only modules that are there
            children[name] = self._replace(child, item, features, samples)
        return _clone(module, module.__class__, _modules=children)

    def _replace(
        self, child: nn.Module, item: _Skip | _Ship | _Clone, features: torch.Tensor, samples: int
    ) -> nn.Module:
        match item:
            case _Ship():
                # In-place code after the boundary must not reach the caller's tensor.
                value = features.clone() if self._overwritten else features
                return _clone(child, _stand_in(_Shipped, type(child)), _upriver_value=value)
            case _Skip(results=results):
                return _clone(
                    child,
                    _stand_in(_Stub, type(child)),
                    _upriver_results=iter(results),
                    _upriver_form=(samples, features.device),
                    _upriver_real=child,
                )
            case _Clone():
                return self._build(child, item, features, samples)


def _refuse_hooks(model: nn.Module, recipe: _Clone, path: str = "") -> None:
    for name, item in recipe.children.items():
        here = f"{path}.{name}" if path else name
        if isinstance(item, _Clone):
            _refuse_hooks(model, item, here)
            continue
        for inner, module in model.get_submodule(here).named_modules():
            if _hooks(module):
                full = f"{here}.{inner}" if inner else here
                raise ModelError(f"module {full!r} has hooks, but it will not run on this tier; remove them")


def _hooks(module: nn.Module) -> bool:
    return any(
        getattr(module, name)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )
