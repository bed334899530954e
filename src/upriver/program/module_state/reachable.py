"""Find every object reachable from a model that can change in place, by walking its attributes."""

from __future__ import annotations

import copy
import copyreg
import functools
import itertools
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 4
"""Limit on nested objects that are neither modules nor containers along a walk."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

_WITHOUT_PARTS = (*_PLAIN, itertools.count)

_CODE: tuple[type, ...] = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CODE = (*_CODE, types.ModuleType, functools.partial, torch.jit.ScriptModule)

_NOT_FOLLOWED = frozenset({"_io", "_thread", "asyncio", "concurrent", "ctypes", "logging", "multiprocessing"})
_NOT_FOLLOWED |= {"queue", "socket", "threading", "weakref"}
"""Packages whose objects belong to the process or to other threads."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Attribute of a module through which the walk reached an object."""

    path: str
    attribute: str

    @property
    def is_machinery(self) -> bool:
        """True if torch, not the user, keeps objects there: tensors, modules, hooks."""
        return self.attribute in ("", "_parameters", "_buffers", "_modules") or "hook" in self.attribute


@dataclass(frozen=True, slots=True, eq=False)
class MutableObject:
    """Object that can change in place and be restored: a list, a module's attributes, a generator.

    Attributes:
        owner: Attribute through which the walk reached the object.
        kind: Functions that read and write its state.
    """

    owner: Owner
    value: Any
    kind: ObjectKind
    before: Any

    def now(self) -> Any:
        """Return the current state."""
        return self.kind.read(self.value)

    def changed(self) -> bool:
        """Return whether the current state differs from `before`."""
        return not self.kind.same(self.before, self.now())

    def tensors_gone(self) -> set[int]:
        """Return identities of the tensors that the object held before and no longer holds."""
        now = self.now()
        pairs: Iterable[tuple[Any, Any]] = ()
        if self.kind is _LIST:
            pairs = itertools.zip_longest(self.before, now)
        elif self.kind.inner is _in_mapping:
            pairs = ((item, now.get(key)) for key, item in self.before.items())
        return {id(item) for item, other in pairs if isinstance(item, torch.Tensor) and item is not other}

    def counted(self) -> str:
        """Return the attribute that counts, or an empty string.

        An attribute counts if its number changed, its list grew, or its generator drew.
        """
        if isinstance(self.value, nn.Module):
            names = (name for name, value in self.now().items() if self._is_other_number(name, value))
            return next(names, "")
        return self.owner.attribute if not self.owner.is_machinery and self._counted() else ""

    def _is_other_number(self, name: str, value: Any) -> bool:
        before = self.before.get(name)
        other = isinstance(value, int | float | str) and before is not value and before != value
        return other and name != "training" and not Owner("", name).is_machinery

    def _counted(self) -> bool:
        now = self.now()
        if self.kind.random:
            return not self.kind.same(self.before, now)
        if self.kind is _LIST:
            return len(now) != len(self.before) or any(map(_other_number, self.before, now))
        # A mapping may gain items: a cache by shape counts nothing.
        return self.kind.inner is _in_mapping and any(
            key in now and _other_number(item, now[key]) for key, item in self.before.items()
        )

    def put_back(self) -> None:
        """Restore the state that the object had before."""
        if self.changed():
            self.kind.write(self.value, self.before)

    def as_now(self) -> MutableObject | None:
        """Return a copy whose `before` is the current state. None if a new item would need a walk."""
        now = self.now()
        if self.kind.inner is _in_mapping:
            new = [(key, item) for key, item in now.items() if self.before.get(key, self) is not item]
            items: Iterable[Any] = itertools.chain.from_iterable(new)
        else:
            known = set(map(id, self.kind.inner(self.before)))
            items = (item for item in self.kind.inner(now) if id(item) not in known)
        return replace(self, before=now) if all(isinstance(each, _WITHOUT_PARTS) for each in items) else None


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """Functions that read, write and compare the state of one kind of object, and list its items."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool]
    inner: Callable[[Any], Iterator[Any]] = lambda state: iter(())
    random: bool = False


def _other_number(before: Any, now: Any) -> bool:
    numbers = isinstance(before, int | float | str) and isinstance(now, int | float | str)
    return numbers and before is not now and bool(before != now)


def _same_items(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _same_mapping(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return _same_items(a, b) and _same_items(a.values(), b.values())


def _in_mapping(state: dict[Any, Any]) -> Iterator[Any]:
    return itertools.chain(state, state.values())


def _write_list(value: Any, items: Any) -> None:
    value.clear()
    value.extend(items)


def _write_items(value: Any, items: Any) -> None:
    value.clear()
    value.update(items)


def _read_attributes(value: Any) -> dict[str, Any]:
    # An iterator cannot be rewound, so keep a copy.
    return {n: copy.copy(v) if isinstance(v, itertools.count) else v for n, v in vars(value).items()}


def _write_attributes(value: Any, state: dict[str, Any]) -> None:
    _write_items(vars(value), state)


def _read_slots(value: Any) -> dict[str, Any]:
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _write_slots(value: Any, state: dict[str, Any]) -> None:
    for name in _read_slots(value).keys() - state.keys():
        object.__delattr__(value, name)
    for name, item in state.items():
        object.__setattr__(value, name, item)


def _same_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def same_state(a: Any, b: Any) -> bool:
    """Return whether two states of a generator are equal. Compare arrays by value."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray | torch.Tensor):
        return bool((a == b).all())
    return bool(a == b)


_LIST = ObjectKind(read=list, write=_write_list, same=_same_items, inner=iter)
_DICT = ObjectKind(read=dict, write=_write_items, same=_same_mapping, inner=_in_mapping)
_SET = ObjectKind(read=set, write=_write_items, same=operator.eq, inner=iter)
_BYTES = ObjectKind(read=bytes, write=_write_list, same=operator.eq)
_ARRAY = ObjectKind(read=np.copy, write=np.copyto, same=_same_arrays)
_ATTRIBUTES = ObjectKind(
    read=_read_attributes, write=_write_attributes, same=_same_mapping, inner=_in_mapping
)
_SLOTS = ObjectKind(read=_read_slots, write=_write_slots, same=_same_mapping, inner=_in_mapping)


def _generator(
    read: Callable[[Any], Any],
    write: Callable[[Any, Any], None],
    same: Callable[[Any, Any], bool] = same_state,
) -> ObjectKind:
    return ObjectKind(read=read, write=write, same=same, random=True)


def _write_bits(value: Any, state: Any) -> None:
    value.state = state


_KINDS: tuple[tuple[type | tuple[type, ...], ObjectKind], ...] = (
    (random.Random, _generator(lambda g: g.getstate(), lambda g, state: g.setstate(state), operator.eq)),
    (np.random.RandomState, _generator(lambda g: g.get_state(legacy=False), lambda g, s: g.set_state(s))),
    (
        np.random.Generator,
        _generator(lambda g: g.bit_generator.state, lambda g, state: _write_bits(g.bit_generator, state)),
    ),
    (np.random.BitGenerator, _generator(lambda g: g.state, _write_bits)),
    (torch.Generator, _generator(lambda g: g.get_state(), lambda g, state: g.set_state(state))),
    (dict, _DICT),
    ((list, deque), _LIST),
    (set, _SET),
    (bytearray, _BYTES),
    (np.ndarray, _ARRAY),
)


def shared_generators() -> list[MutableObject]:
    """Return the generators that Python and NumPy share across the process."""
    shared = {"Python's": random.getstate, "NumPy's": np.random.get_state}
    values = {whose: getattr(read, "__self__", None) for whose, read in shared.items()}
    kinds = {whose: _kind_of(value) for whose, value in values.items()}
    return [
        MutableObject(Owner("", f"{whose} random numbers"), value, kind, kind.read(value))
        for whose, value in values.items()
        if (kind := kinds[whose]) is not None
    ]


def _kind_of(value: Any) -> ObjectKind | None:
    return next((kind for types_, kind in _KINDS if isinstance(value, types_)), None)


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """Tensor reachable from a model.

    Attributes:
        kind: ``parameter``, ``buffer``, or ``tensor`` for one among other attributes.
        name: Name along one path from the model.
    """

    kind: str
    name: str
    tensor: torch.Tensor


class ReachableObjects:
    """Objects reachable from a model, each once.

    Attributes:
        things: Every object that is not a tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.things: list[MutableObject] = []
        self.tensors: list[HeldTensor] = []
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._seen: dict[int, Any] = {}  # kept alive, so that no identity is reused
        self._todo: list[tuple[Any, Owner, int]] = [(model, Owner("", ""), _DEPTH)]
        for name, parameter in model.named_parameters():
            self._add_tensor("parameter", name, parameter)
        for name, buffer in model.named_buffers():
            self._add_tensor("buffer", name, buffer)
        while self._todo:
            self._visit(*self._todo.pop())
        self._composed = any(hasattr(each.tensor, "__tensor_flatten__") for each in self.tensors)

    def changed(self) -> list[MutableObject]:
        """Return the objects whose state differs now."""
        return [thing for thing in self.things if thing.changed()]

    def as_now(self) -> ReachableObjects | None:
        """Return the result of a new walk without walking. None if only a walk would find it."""
        changed = {id(thing): thing.as_now() for thing in self.changed()}
        if self._composed or None in changed.values():
            return None
        if not changed:
            return self
        held = copy.copy(self)
        held.things = [changed.get(id(thing)) or thing for thing in self.things]
        return held

    def _visit(self, value: Any, owner: Owner, depth: int) -> None:
        if isinstance(value, (*_PLAIN, *_CODE)) or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._add_tensor("tensor", f"{owner.path}.{owner.attribute}".lstrip("."), value)
            return
        self._seen[id(value)] = value
        if isinstance(value, tuple | frozenset):
            self._todo += [(item, owner, depth) for item in value]
        elif isinstance(value, nn.Module):
            self._add_module(value, owner)
        else:
            self._add_thing(value, owner, depth)

    def _add_module(self, module: nn.Module, owner: Owner) -> None:
        path = self._paths.get(id(module), owner.path)
        self._add(module, Owner(path, ""), _ATTRIBUTES)
        self._todo += [(value, Owner(path, name), _DEPTH) for name, value in vars(module).items()]

    def _add_thing(self, value: Any, owner: Owner, depth: int) -> None:
        kind = _kind_of(value)
        if kind is _ARRAY and not (value.flags.writeable and value.dtype != object):
            return
        if kind is not None:
            state = self._add(value, owner, kind)
            self._todo += [(item, owner, depth) for item in kind.inner(state)]
        elif depth and type(value).__module__.partition(".")[0] not in _NOT_FOLLOWED:
            for kind in self._kinds_of_object(value):
                state = self._add(value, owner, kind)
                self._todo += [(item, owner, depth - 1) for item in kind.inner(state)]

    def _kinds_of_object(self, value: Any) -> Iterator[ObjectKind]:
        if isinstance(getattr(value, "__dict__", None), dict):
            yield _ATTRIBUTES
        if "__slots__" in type(value).__dict__ and type(value).__module__ != "builtins":
            yield _SLOTS

    def _add(self, value: Any, owner: Owner, kind: ObjectKind) -> Any:
        state = kind.read(value)
        self.things.append(MutableObject(owner, value, kind, state))
        return state

    def _add_tensor(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen[id(tensor)] = tensor
        self.tensors.append(HeldTensor(kind, name, tensor))
        if (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:  # it wraps other tensors
            for attribute in flatten()[0]:
                self._add_tensor(kind, name, getattr(tensor, attribute))
