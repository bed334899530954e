"""The tail stays the user's: their modules, parameters, hooks and ``forward``, without the frozen prefix.

A *shadow* of the model is made of shallow clones of the ancestors of skipped modules, in which each of those
is replaced by a stub. All else is shared by identity, so the optimizer, ``state_dict`` and hooks see the
user's own objects, and the user's own ``forward`` runs on the shadow. A stub gives what has crossed the cut
where the tail reads it, and otherwise stride-0 NaN tensors of the right shape: they cost nothing and poison
any answer that should not have read them.

Each thread has a shadow of its own, brought up to date before each call, so that calls share no state and
flags that the user sets on the model are always the current ones.
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
from upriver.program.example import Example
from upriver.program.freeze import keep_in_eval
from upriver.program.passes import Pass
from upriver.program.point import FreezePoint
from upriver.program.precision import autocasting
from upriver.program.trace import Call, Shape, Trace
from upriver.program.values import Values

Features: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""What crosses: one tensor, or a tuple of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """Stands in a stub's result where value ``index`` of those that crossed belongs."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Poison:
    """Stands in a stub's result for a tensor that nobody should read."""

    shape: Shape
    dense: bool = False

    def make(self, samples: int, device: torch.device) -> torch.Tensor:
        """A tensor of the right form that costs nothing, unless something writes into it."""
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
    """A module of which calls are skipped: what each of them gives, None for those that run."""

    path: str
    results: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cloned:
    """An ancestor of skipped modules."""

    children: Mapping[str, _Stubbed | _Cloned]


class _Feed:
    """What has crossed the cut in the call that is running; the stubs of one shadow share it."""

    def __init__(self) -> None:
        self.values: tuple[torch.Tensor, ...] | None = None
        self.samples = 0

    def open(self, path: str) -> None:
        """Refuse a call of a module from outside of the tail's forward.

        Raises:
            CaptureError: If nothing has crossed the cut.
        """
        if self.values is None:
            raise CaptureError(
                "a skipped module was called outside of the tail's forward: the cut lies in a region that "
                "activation checkpointing runs again",
                module=path,
            )

    def take(self, item: Any) -> Any:
        """A stub's result, or an input, for this call."""
        values = self.values
        assert values is not None  # open() was asked
        if isinstance(item, _Given):
            return values[item.index]
        if isinstance(item, _Poison):
            return item.make(self.samples, values[0].device)
        return item


class _Stub(nn.Module):
    """Stands for a module whose calls are skipped.

    It is a shallow clone of the module, of a subclass of its class: whatever the user's code reads from it,
    or asks of its type, is as ever. Only calling it is another thing.
    """

    __call__ = nn.Module._wrapped_call_impl  # a class may have wrapped its own, as transformers' layers do

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._upriver_feed.open(self._upriver_path)
        number = self._upriver_next
        self._upriver_next = number + 1
        leaves, spec = self._upriver_results[number] if number < len(self._upriver_results) else (None, None)
        if leaves is None or spec is None:
            return self._upriver_real[0](*args, **kwargs)
        return pytree.tree_unflatten([self._upriver_feed.take(leaf) for leaf in leaves], spec)

    _upriver_next: int
    _upriver_path: str
    _upriver_results: tuple[tuple[list[Any], Any] | tuple[None, None], ...]
    _upriver_real: tuple[nn.Module]
    _upriver_feed: _Feed


_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {}


def _stand_in(module_class: type[nn.Module]) -> type[nn.Module]:
    """The class of a stub for modules of that class."""
    if module_class not in _STAND_INS:
        place = {"__module__": module_class.__module__}
        _STAND_INS[module_class] = type(module_class.__name__, (_Stub, module_class), place)
    return _STAND_INS[module_class]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Twin:
    """A clone, whose it is, and in what they differ."""

    module: nn.Module
    clone: nn.Module
    own: Mapping[str, Any]

    def update(self) -> None:
        """Make the clone what the module is now, but for their differences."""
        state = self.clone.__dict__
        for name in [name for name in state if name not in self.module.__dict__ and name not in self.own]:
            del state[name]
        state.update(self.module.__dict__)
        state.update(self.own)
        state.pop("forward", None)
        state.pop("_compiled_call_impl", None)  # of module.compile(): it would run the module itself

    def hand_back(self) -> None:
        """Make what the user's forward has set on the clone the module's."""
        if isinstance(self.clone, _Stub):
            return
        theirs = self.module.__dict__
        for name, value in self.clone.__dict__.items():
            if name not in self.own and theirs.get(name, self) is not value:
                theirs[name] = value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shadow:
    """A shadow of the model and what goes with it."""

    root: nn.Module
    feed: _Feed
    twins: list[_Twin] = field(default_factory=list)


class Tail(nn.Module):
    """What is left of a model after its frozen prefix.

    Calling it with what crosses the freeze point, of any number of samples, gives what the whole model would
    have given. Its parameters are the model's own.

    Attributes:
        boundary: The last module of the prefix.
        values: The tensors that cross.
        with_gradient: Which of them ask for a gradient in the whole model, by its mode (training or not).
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
        """Work out which modules are skipped.

        Args:
            in_eval: Modules that stay in eval whatever ``train()`` says.
            autocast: Run under autocast to this type.

        Raises:
            CaptureError: If an ancestor of a skipped module has a ``forward`` of its own instance, or a
                module that will be skipped has hooks; names that module.
        """
        super().__init__()
        self.boundary = point.name
        self.values = Values(point.ships)
        self._model = (model,)  # in a tuple: registered is the shadow
        self._in_eval = list(in_eval)
        self._autocast = autocast
        self._example = _inputs(point, calls)
        self._recipe = _Recipe(model, point, calls).make()
        _refuse_hooks(model, self._recipe)
        self.with_gradient: dict[bool, tuple[bool, ...]] = {}
        self._shadows = _PerThread(model, self._recipe)
        self._compiled = _build(model, self._recipe)
        self.shadow = self._compiled.root

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._model[0]

    def forward(self, features: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """The model's answer, from what crosses the freeze point.

        Args:
            features: One tensor where one crosses, else a tuple of them; samples in the dimension in which
                the model has them.

        Raises:
            ConfigError: If they are others.
        """
        values = self.values.check(features)
        if torch.compiler.is_compiling():
            shadow = self._compiled
            for twin in shadow.twins:
                twin.clone.training = twin.module.training
        else:
            values = self._asking(values)
            shadow = self._shadows.get()
            keep_in_eval(self.model, self._in_eval)
            for twin in shadow.twins:
                twin.update()
        return self._run(shadow, values)

    def asking(
        self, features: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What crosses as the whole model has it: asking for a gradient where a hook sees to that.

        For a compiled tail, which cannot do so itself.
        """
        return self.values.one_or_all(self._asking(self.values.check(features)))

    def _asking(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not torch.is_grad_enabled():
            return values
        asks = self.with_gradient.get(self.model.training, (False,) * len(values))
        # Detached: what the caller holds gathers no gradient, also where a hook of the tail asks for one.
        return tuple(
            value if value.requires_grad else value.detach().requires_grad_(asked)
            for value, asked in zip(values, asks, strict=True)
        )

    def _run(self, shadow: _Shadow, values: tuple[torch.Tensor, ...]) -> Any:
        feed = shadow.feed
        feed.values, feed.samples = self.values.unshared(values), self.values.samples_of(values)
        for twin in shadow.twins:
            if isinstance(twin.clone, _Stub):
                twin.clone._upriver_next = 0
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


class _PerThread(threading.local):
    """One shadow a thread."""

    def __init__(self, model: nn.Module, recipe: _Cloned) -> None:
        self._shadow: _Shadow | None = None
        self._make = (model, recipe)

    def get(self) -> _Shadow:
        """This thread's shadow."""
        if self._shadow is None:
            self._shadow = _build(*self._make)
        return self._shadow


class _Recipe:
    """How to make a shadow: which modules are cloned, which stubbed, and what the stubs give."""

    def __init__(self, model: nn.Module, point: FreezePoint, calls: Trace) -> None:
        self.model = model
        self.given = {ship.value: index for index, ship in enumerate(point.ships)}
        self.skipped = set(point.skipped)
        self.paths = {module: path for path, module in model.named_modules()}
        self.results: dict[str, list[Any]] = {}
        owner = Pass(calls.calls, calls.flow).enclosing(self.skipped)
        for call in sorted(calls.calls, key=lambda call: call.index):
            if owner[call.parent] < 0:  # what runs inside a skipped call does not run at all
                result = self._result(call) if call.index in self.skipped else None
                self.results.setdefault(call.path, []).append(result)

    def _result(self, call: Call) -> tuple[list[Any], Any]:
        """A call's result as its stub gives it, flattened."""
        values = iter(call.values)
        made: list[Any] = []
        for leaf in call.leaves:
            if not isinstance(leaf, Shape):
                made.append(leaf)
                continue
            index = self.given.get(next(values))
            made.append(_Poison(shape=leaf, dense=call.overwritten) if index is None else _Given(index=index))
        return made, call.form

    def make(self) -> _Cloned:
        """The recipe.

        Raises:
            CaptureError: If there is none that runs the user's own forward.
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
            raise CaptureError(f"module {path or 'the model itself'!r} has a forward of its own instance")
        return _Cloned(children=children) if children else None


def _inputs(point: FreezePoint, calls: Trace) -> tuple[list[Any], Any]:
    """What the user's forward is called with: inputs that the tail reads have crossed, others are poison."""
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


def _build(model: nn.Module, recipe: _Cloned) -> _Shadow:
    feed = _Feed()
    twins: list[_Twin] = []
    made: dict[int, nn.Module] = {}

    def twin(module: nn.Module, clone_class: type[nn.Module], own: dict[str, Any]) -> nn.Module:
        clone: nn.Module = clone_class.__new__(clone_class)
        twins.append(_Twin(module=module, clone=clone, own=own))
        twins[-1].update()
        return clone

    def build(module: nn.Module, item: _Stubbed | _Cloned) -> nn.Module:
        if id(module) not in made:  # a module with two names has one stand-in
            made[id(module)] = stub(module, item) if isinstance(item, _Stubbed) else clone(module, item)
        return made[id(module)]

    def stub(module: nn.Module, item: _Stubbed) -> nn.Module:
        own = {"_upriver_results": item.results, "_upriver_real": (module,), "_upriver_feed": feed}
        own |= {"_upriver_next": 0, "_upriver_path": item.path}
        return twin(module, _stand_in(type(module)), own)

    def clone(module: nn.Module, item: _Cloned) -> nn.Module:
        children = dict(module._modules)
        for name, inner in item.children.items():
            child = children[name]
            assert child is not None  # the recipe names only modules that are there
            children[name] = build(child, inner)
        return twin(module, type(module), {"_modules": children})

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
                    "remove them to have it run elsewhere",
                    module=full,
                )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_HARMLESS = ("make_inputs_require_grads", "make_inputs_require_grad", "output_capturing_hook")
"""Of transformers and peft: those for activation checkpointing mark an embedding's answer as in need of a
gradient, which changes no value and no parameter's gradient; the one that collects hidden states does nothing
until they are asked for (and then the proof fails where skipped layers' are missing)."""


def _hooks(module: nn.Module) -> bool:
    hooks = [hook for name in _HOOKS for hook in (getattr(module, name) or {}).values()]
    return any(getattr(hook, "__name__", "") not in _HARMLESS for hook in hooks)
