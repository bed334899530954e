"""Run the tail: the user's modules, parameters, hooks and ``forward`` without the frozen prefix.

A *shadow* is a copy of the model in which a stub replaces each skipped module. The ancestors of skipped
modules are shallow clones. Everything else is shared by identity, so the optimizer, ``state_dict`` and hooks
see the user's own objects. The user's own ``forward`` runs on the shadow. A stub returns the tensors that
crossed the cut where the tail reads them. Elsewhere it returns stride-0 NaN tensors of the right shape. These
need no memory, and they poison any answer that reads them by mistake.

Each thread has its own shadow, updated before each call. So calls share no state, and flags that the user
sets on the model take effect.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from upriver.errors import CaptureError
from upriver.program.example_inputs import Example
from upriver.program.freeze import InEval
from upriver.program.graph.autocast import autocasting
from upriver.program.module_state.structure import HARMLESS
from upriver.program.split.crossing_values import CrossingValues
from upriver.program.split.forward_pass import ForwardPass
from upriver.program.split.freeze_point import FreezePoint
from upriver.program.split.module_trace import ModuleCall, Shape, Trace

Features: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""Tensors that cross the cut: one tensor, or a tuple of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """Placeholder in a stub's result for crossing tensor number ``index``."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Poison:
    """Placeholder in a stub's result for a tensor that the tail must not read.

    Attributes:
        dense: True if an operator outside skipped calls writes into it, which needs memory.
    """

    shape: Shape
    dense: bool = False

    def make(self, samples: int, device: torch.device) -> torch.Tensor:
        """Return a tensor of the right shape. It needs no memory unless an operator writes into it."""
        dtype = self.shape.dtype
        if dtype.is_floating_point or dtype.is_complex:
            value = torch.full((), float("nan"), dtype=dtype, device=device)
        elif dtype is torch.bool:
            value = torch.zeros((), dtype=dtype, device=device)
        else:
            value = torch.full((), torch.iinfo(dtype).min, dtype=dtype, device=device)
        expanded = value.expand(self.shape.at(samples))
        return expanded.clone() if self.dense else expanded


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stubbed:
    """Module with skipped calls. Hold the result of each call, None for calls that run."""

    path: str
    results: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cloned:
    """Ancestor of skipped modules."""

    children: Mapping[str, _Stubbed | _Cloned]


class _Feed:
    """Tensors that crossed the cut for the current call. The stubs of one shadow share them.

    Args:
        keeps: True to keep poison tensors for the next call with as many samples.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.values: tuple[torch.Tensor, ...] | None = None
        self.samples = 0
        self.results: list[_Results] = []
        self._keeps = keeps
        self._device = torch.device("cpu")
        self._poison: dict[int, torch.Tensor] = {}

    def begin(self, values: tuple[torch.Tensor, ...], samples: int) -> None:
        """Begin a call: stubs start again at their first result."""
        if self._poison and (self.samples != samples or self._device != values[0].device):
            self._poison.clear()
        self.values, self.samples, self._device = values, samples, values[0].device
        for each in self.results:
            each.next = 0

    def take(self, item: Any) -> Any:
        """Return a stub's result, or an input, for this call."""
        values = self.values
        assert values is not None  # otherwise the call was refused
        if isinstance(item, _Given):
            return values[item.index]
        if not isinstance(item, _Poison):
            return item
        if item.dense or not self._keeps:
            return item.make(self.samples, values[0].device)
        if (made := self._poison.get(id(item))) is None:
            self._poison[id(item)] = made = item.make(self.samples, values[0].device)
        return made.detach()  # a new object each time, as code may request its gradient


class _Results:
    """Results of the calls of one stub, in order."""

    def __init__(self, item: _Stubbed, module: nn.Module, feed: _Feed) -> None:
        self._path, self._module, self._feed = item.path, module, feed
        self._results, self.next = item.results, 0
        feed.results.append(self)

    def give(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next result. Run a call that is not skipped."""
        feed = self._feed
        if feed.values is None:
            raise CaptureError(
                "a skipped module was called outside of the tail's forward: the cut lies in a region that "
                "activation checkpointing runs again",
                module=self._path,
            )
        number = self.next
        self.next = number + 1
        leaves, spec = self._results[number] if number < len(self._results) else (None, None)
        if leaves is None or spec is None:
            return self._module(*args, **kwargs)
        if len(leaves) == 1 and spec.is_leaf():
            return feed.take(leaves[0])
        return pytree.tree_unflatten([feed.take(leaf) for leaf in leaves], spec)


class _Stub(nn.Module):
    """Stand in for a module whose calls are skipped.

    A stub has the module's own ``__dict__`` and a subclass of the module's class. So attribute reads and type
    checks in the user's code work as before. Only a call differs.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_pre_hooks or self._forward_hooks:
            return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._upriver_results.give(*args, **kwargs)

    @property  # a property takes precedence over an instance attribute
    def forward(self) -> Any:  # type: ignore[override]
        """Function that a call with hooks runs."""
        return self._upriver_results.give

    _upriver_results: _Results


_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {}


def _stand_in(module_class: type[nn.Module]) -> type[nn.Module]:
    if module_class not in _STAND_INS:
        place = {"__module__": module_class.__module__, "__slots__": ("_upriver_results",)}
        made = type(module_class.__name__, (_Stub, module_class), place)
        for name in (
            "forward",
            "__call__",
        ):  # a class may wrap these methods of its subclasses, as layers of transformers do
            type.__setattr__(made, name, vars(_Stub)[name])
        _STAND_INS[module_class] = made
    return _STAND_INS[module_class]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Twin:
    """Ancestor, its clone, and the submodules in which they differ."""

    module: nn.Module
    clone: nn.Module
    children: Mapping[str, nn.Module]

    def update(self) -> None:
        """Copy the module's current state to the clone, except for the differing submodules."""
        state, theirs = self.clone.__dict__, self.module.__dict__
        for name in state.keys() - theirs.keys():
            del state[name]
        state.update(theirs)
        state["_modules"] = theirs["_modules"] | self.children
        state.pop("forward", None)
        state.pop("_compiled_call_impl", None)  # of module.compile(): would run the module itself

    def hand_back(self) -> None:
        """Copy the attributes that the user's forward set on the clone back to the module."""
        theirs = self.module.__dict__
        for name, value in self.clone.__dict__.items():
            if name != "_modules" and theirs.get(name, self) is not value:
                theirs[name] = value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shadow:
    """Shadow of the model, with its feed and its twins."""

    root: nn.Module
    feed: _Feed
    twins: list[_Twin] = field(default_factory=list)


class Tail(nn.Module):
    """Run the rest of a model after its frozen prefix.

    A call with the tensors that cross the freeze point, for any number of samples, returns the whole model's
    result. The parameters are the model's own.

    Attributes:
        with_gradient: For each crossing tensor, whether it requires a gradient in the whole model. Keyed by
            mode: True for training.
    """

    def __init__(
        self,
        model: nn.Module,
        point: FreezePoint,
        calls: Trace,
        *,
        in_eval: Sequence[str] = (),
        autocast: torch.dtype | None = None,
    ) -> None:
        """Decide which modules to skip.

        Raises:
            CaptureError: If an ancestor of a skipped module has a ``forward`` of its own instance, or a
                module to be skipped has hooks. Names that module.
        """
        super().__init__()
        self.boundary = point.name
        self.values = CrossingValues(point.ships)
        self._model = (model,)  # in a tuple, so that only the shadow is registered
        self._in_eval = InEval(model, in_eval)
        self._autocast = autocast
        self._example = _inputs(point, calls)
        self._recipe = _Recipe(model, point, calls).make()
        _refuse_hooks(model, self._recipe)
        self.with_gradient: dict[bool, tuple[bool, ...]] = {}
        self._of_thread = threading.local()
        self._compiled = _build(model, self._recipe, compiled=True)
        self.shadow = self._compiled.root

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._model[0]

    def same_as(self, other: Tail) -> bool:
        """Return whether another tail of the same model skips the same calls with the same replacements."""
        ours, theirs = ((each.values.ships, each._recipe, each._example) for each in (self, other))
        try:
            return bool(ours == theirs)
        except Exception:  # raised by non-tensor values in a skipped call's result
            return False

    def forward(self, features: Features) -> Any:
        """Return the model's result, computed from the tensors that cross the freeze point.

        Args:
            features: One tensor if one crosses, else a tuple of tensors. Samples are in the model's own
                sample dimension.

        Raises:
            ConfigError: If the number, the shapes or the types of the tensors differ.
        """
        values = self.values.check(features)
        if torch.compiler.is_compiling():
            shadow = self._compiled
            for twin in shadow.twins:
                twin.clone.training = twin.module.training
        else:
            values = self._asking(values)
            shadow = self._own_shadow()
            self._in_eval()
            for twin in shadow.twins:
                twin.update()
        return self._run(shadow, values)

    def _own_shadow(self) -> _Shadow:
        """Return this thread's shadow."""
        if not hasattr(self._of_thread, "shadow"):
            self._of_thread.shadow = _build(self.model, self._recipe)
        shadow: _Shadow = self._of_thread.shadow
        return shadow

    def asking(self, features: Features) -> Features:
        """Return the crossing tensors, requiring gradients where a hook of the whole model does so.

        Use this for a compiled tail, which cannot do it itself.
        """
        return self.values.one_or_all(self._asking(self.values.check(features)))

    def _asking(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not torch.is_grad_enabled():
            return values
        asks = self.with_gradient.get(self.model.training, (False,) * len(values))
        # Detach, so that the caller's tensors gather no gradient even if a hook of the tail requests one.
        return tuple(
            value if value.requires_grad else value.detach().requires_grad_(asked)
            for value, asked in zip(values, asks, strict=True)
        )

    def _run(self, shadow: _Shadow, values: tuple[torch.Tensor, ...]) -> Any:
        feed = shadow.feed
        feed.begin(self.values.unshared(values), self.values.samples_of(values))
        leaves, spec = self._example
        args, kwargs = pytree.tree_unflatten([feed.take(leaf) for leaf in leaves], spec)
        try:
            with autocasting(values[0].device, self._autocast):
                return shadow.root(*args, **kwargs)
        finally:
            feed.values = None
            if not torch.compiler.is_compiling():
                for twin in shadow.twins:
                    twin.hand_back()


class _Recipe:
    """Decide which modules to clone, which to stub, and what the stubs return."""

    def __init__(self, model: nn.Module, point: FreezePoint, calls: Trace) -> None:
        self.model = model
        self.given = {ship.value: index for index, ship in enumerate(point.ships)}
        self.skipped = set(point.skipped)
        self.paths = {module: path for path, module in model.named_modules()}
        self.results: dict[str, list[Any]] = {}
        self._owner = owner = ForwardPass(calls.calls, calls.flow).enclosing(self.skipped)
        for call in sorted(calls.calls, key=lambda call: call.index):
            if owner[call.parent] < 0:  # calls inside a skipped call do not run
                result = self._result(call) if call.index in self.skipped else None
                self.results.setdefault(call.path, []).append(result)

    def _result(self, call: ModuleCall) -> tuple[list[Any], Any]:
        """Return a call's result as its stub returns it, flattened."""
        values = iter(call.values)
        made: list[Any] = []
        for leaf in call.leaves:
            if not isinstance(leaf, Shape):
                made.append(leaf)
                continue
            index = self.given.get(next(values))
            dense = any(self._owner[writer] < 0 for writer in call.overwritten_in)
            made.append(_Poison(shape=leaf, dense=dense) if index is None else _Given(index=index))
        return made, call.form

    def make(self) -> _Cloned:
        """Return the recipe.

        Raises:
            CaptureError: If no recipe runs the user's own forward.
        """
        recipe = self._plan(self.model)
        if not isinstance(recipe, _Cloned):
            raise CaptureError("no module is left that could run the rest")
        return recipe

    def _plan(self, module: nn.Module) -> _Stubbed | _Cloned | None:
        path = self.paths[module]
        results = self.results.get(path, [])
        if any(result is not None for result in results):
            given = tuple((None, None) if result is None else result for result in results)
            return _Stubbed(path=path, results=given)
        planned = {name: self._plan(child) for name, child in module.named_children()}
        children = {name: item for name, item in planned.items() if item is not None}
        if children and "forward" in module.__dict__:
            raise CaptureError(f"module {path or 'the model itself'!r} has a forward set on the instance")
        return _Cloned(children=children) if children else None


def _inputs(point: FreezePoint, calls: Trace) -> tuple[list[Any], Any]:
    """Return the inputs of the user's forward: crossing tensors where the tail reads them, else poison."""
    crossing = {ship.source.leaf: index for index, ship in enumerate(point.ships) if ship.source.path is None}
    example: Example = calls.example
    leaves, spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
    shapes = iter(enumerate(calls.inputs))
    made: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            made.append(leaf)
            continue
        index, shape = next(shapes)
        dense = calls.flow.writes_into_input(index)
        made.append(_Given(index=crossing[index]) if index in crossing else _Poison(shape=shape, dense=dense))
    return made, spec


def _build(model: nn.Module, recipe: _Cloned, *, compiled: bool = False) -> _Shadow:
    feed = _Feed(keeps=not compiled)
    twins: list[_Twin] = []
    made: dict[int, nn.Module] = {}

    def build(module: nn.Module, item: _Stubbed | _Cloned) -> nn.Module:
        if id(module) not in made:  # a module with two names gets one stand-in
            made[id(module)] = stub(module, item) if isinstance(item, _Stubbed) else clone(module, item)
        return made[id(module)]

    def stub(module: nn.Module, item: _Stubbed) -> nn.Module:
        kind: Any = _stand_in(type(module))
        made: nn.Module = kind.__new__(kind)
        made.__dict__ = module.__dict__
        kind._upriver_results.__set__(made, _Results(item, module, feed))
        return made

    def clone(module: nn.Module, item: _Cloned) -> nn.Module:
        children = {}
        for name, inner in item.children.items():
            child = module._modules[name]
            assert child is not None  # the recipe names only existing modules
            children[name] = build(child, inner)
        made: nn.Module = type(module).__new__(type(module))
        twins.append(_Twin(module=module, clone=made, children=children))
        twins[-1].update()
        return made

    root = build(model, recipe)
    return _Shadow(root=root, feed=feed, twins=twins)


def _refuse_hooks(model: nn.Module, recipe: _Cloned, path: str = "") -> None:
    for name, item in recipe.children.items():
        here = f"{path}.{name}" if path else name
        if isinstance(item, _Cloned):
            _refuse_hooks(model, item, here)
            continue
        for inner, module in model.get_submodule(here).named_modules():
            if _hooks(module):
                full = f"{here}.{inner}" if inner else here
                raise CaptureError(
                    f"module {full!r} has hooks, which run on this tier only, so it stays here; "
                    "remove them to let it run on another tier",
                    module=full,
                )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooks(module: nn.Module) -> bool:
    hooks = [hook for name in _HOOKS for hook in (getattr(module, name) or {}).values()]
    return any(getattr(hook, "__name__", "") not in HARMLESS for hook in hooks)
