"""Record which attributes of modules, and of the objects that modules hold, a forward pass reads.

During a pass, attribute reads go through a wrapper of ``__getattribute__``. `nn.Module` has one, and so do
the classes of objects found in attributes, such as configurations. Types stay the same, so a forward that
inspects types behaves as usual. Global variables are found in the code of each function called.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import enum
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from upriver.program.compiled_code import uncompiled

ALL = "*"
"""Stands for every attribute of an object: code read its `__dict__`."""

Place = tuple[int, int]
"""Index of the module call that read a value, and index of the event before the read."""

_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""Bits of ``type.__flags__``: the class was made by Python code; its attributes cannot be set."""

_LOOKS_THROUGH = ("torch.nn.modules.module", "functools")
"""Modules whose code reads ``__dict__`` to get one attribute. That attribute is recorded anyway."""

_OPAQUE = ("_dynamo", "_inductor", "fx", "jit", "cuda", "autograd", "utils", "distributed")
"""Parts of torch whose objects are handles, not settings."""

_MACHINERY = ("_modules", "training", "_call_impl", "_compiled_call_impl")
"""Attributes of a module that do not affect results. Compilation changes where a module computes, not the
result."""

_NO_SETTINGS = frozenset({"torch", "numpy", "upriver"}) | (sys.stdlib_module_names - {"__main__"})
"""Packages whose global variables are not settings of a model."""

BY_CONTENT = (types.SimpleNamespace, argparse.Namespace)
"""Classes of the standard library whose objects count with all their attributes."""

_MOST = 1000
"""Maximum number of elements inspected in a container."""


def is_machinery(name: str) -> bool:
    """Return whether a module's attribute has no effect on the result of its forward."""
    return name in _MACHINERY or "hook" in name


class AttributeReads:
    """Attributes that a pass has read.

    Attributes:
        owners: Objects by identity, including modules, Python modules and classes.
        names: Attributes read of each object, with the places of the reads.
        written: Owner and name of each attribute that the pass itself writes, as messages name them.
    """

    def __init__(self) -> None:
        self.owners: dict[int, Any] = {}
        self.names: dict[int, dict[str, list[Place]]] = {}
        self.written: frozenset[tuple[str, str]] = frozenset()
        self._where: Callable[[], Place] = lambda: (0, 0)
        self._codes: dict[tuple[types.CodeType, type], list[list[Place]]] = {}
        self._without_settings: set[types.CodeType] = set()
        self._before: list[tuple[Any, str, Any, dict[Any, int]]] = []

    @contextlib.contextmanager
    def noting(self, where: Callable[[], Place] | None = None) -> Iterator[None]:
        """Record the reads of this thread. Compiled functions run uncompiled meanwhile."""
        if where is not None:
            self._where = where
        thread, self._patched, profiler = threading.get_ident(), list[type](), sys.getprofile()
        try:
            self._patch(nn.Module)
            with uncompiled():
                _ACTIVE[thread] = self
                sys.setprofile(self._note_call)
                try:
                    yield
                finally:
                    sys.setprofile(profiler)
                    del _ACTIVE[thread]
                    self._forget_changed()
        finally:
            for each in self._patched:
                _unpatch(each)

    def note(self, owner: Any, name: str, value: Any) -> None:
        """Record that an attribute was read.

        Args:
            value: The attribute's value. None if the attribute is absent.
        """
        reader = sys._getframe(2).f_globals.get("__name__", "")
        if reader.startswith("upriver.program."):  # upriver's own hooks
            return
        if name == "__dict__":
            if reader in _LOOKS_THROUGH:
                return
            name = ALL
        elif name.startswith("__") or (isinstance(owner, nn.Module) and is_machinery(name)):
            return
        mine = self.names.setdefault(id(owner), {})
        self.owners[id(owner)] = owner
        if name not in mine:
            state = _state(owner)
            self._reach(state if name == ALL else value)
            mine[name] = []
            if value is not None and name not in state and not hasattr(type(owner), name):
                # A class may translate names, as configurations of transformers do.
                mine |= {each: mine.get(each, mine[name]) for each, held in state.items() if held is value}
        self._mark(mine[name])

    def _mark(self, places: list[Place]) -> None:
        place = self._where()
        if not places or places[-1][0] != place[0]:
            places.append(place)

    def _note_call(self, frame: types.FrameType, event: str, _argument: Any) -> None:
        if event != "call" or frame.f_code in self._without_settings:
            return
        first = frame.f_locals.get(*frame.f_code.co_varnames[:1]) if frame.f_code.co_argcount else None
        kind = type(first) if isinstance(first, nn.Module) else type(None)
        if (read := self._codes.get((frame.f_code, kind))) is None:
            if (module := _module_of(frame)) is None:
                self._without_settings.add(frame.f_code)
                return
            found = _settings_of(frame.f_code, module, kind, _state(first))
            read = self._codes[frame.f_code, kind] = [self._place_of(*each) for each in found]
        for places in read:
            self._mark(places)

    def _place_of(self, owner: Any, name: str, value: Any) -> list[Place]:
        mine = self.names.setdefault(id(owner), {})
        self.owners[id(owner)] = owner
        if name not in mine:
            mine[name] = []
            self._reach(value)
            self._before.append((owner, name, value, _items(value)))
        return mine[name]

    def _forget_changed(self) -> None:
        """Drop the reads of values that the pass itself sets, such as counts and collected results."""
        for owner, name, value, before in self._before:
            if vars(owner).get(name, self) is not value:
                self.names[id(owner)].pop(name, None)
            elif (now := _items(value)) != before and has_settings(value):
                for changed in [
                    key for key in {**before, **now} if before.get(key, self) != now.get(key, self)
                ]:
                    self.names.get(id(value), {}).pop(changed, None)
            elif now != before:
                self.names[id(owner)].pop(name, None)
        self._before.clear()

    def _reach(self, value: Any, depth: int = 4) -> None:
        """Record reads of the objects inside an attribute as well."""
        if not depth:
            return
        inside = parts(value)
        if inside is not None:
            for each in itertools.islice(inside, _MOST):
                self._reach(each, depth - 1)
        elif has_settings(value):
            self._patch(type(value))

    def _patch(self, kind: type) -> None:
        if kind in self._patched:
            return
        with _LOCK:
            current: Any = kind.__getattribute__
            holder = next((each for each in kind.__mro__ if each in _PATCHED), kind)
            if holder not in _PATCHED or _PATCHED[holder].wrapper is not current:
                holder = kind
                wrapper = _wrapper(current)
                try:
                    type.__setattr__(kind, "__getattribute__", wrapper)
                except TypeError:  # a class of C
                    return
                _PATCHED[kind] = _Patch(wrapper, current, "__getattribute__" in vars(kind))
            _PATCHED[holder].readers += 1
        self._patched.append(holder)


def parts(value: Any) -> Iterable[Any] | None:
    """Return a container's items, the parts of a method or partial, or a reference's target; else None."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, ChainMap):
        return value.maps
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    return (value(),) if isinstance(value, weakref.ref) else None


def has_settings(value: Any) -> bool:
    """Return whether the class of `value` is written in Python. A forward may read such attributes."""
    kind = type(value)
    if not kind.__flags__ & _HEAP or kind.__flags__ & _IMMUTABLE:
        return False
    if isinstance(value, torch.Tensor | nn.Module | enum.Enum | type | types.ModuleType | BaseException):
        return False
    root, _, rest = kind.__module__.partition(".")
    if root == "torch":
        return rest.partition(".")[0] not in _OPAQUE and not rest.startswith("_")
    return root not in sys.stdlib_module_names or root == "__main__"


def _module_of(frame: types.FrameType) -> types.ModuleType | None:
    """Return the Python module that defines a function. None if its global variables are not settings."""
    name = frame.f_globals.get("__name__", "")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not frame.f_globals or _root(name) in _NO_SETTINGS:
        return None
    return module


def _settings_of(
    function: types.CodeType, module: types.ModuleType, kind: type, own: Mapping[str, Any]
) -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of the global variables and class attributes that a function names.

    Args:
        kind: Class of the `nn.Module` whose method the function is.
    """
    named: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "STORE_GLOBAL": set(), "LOAD_ATTR": set()}
    for code in dis.get_instructions(function):
        named.setdefault(code.opname.replace("METHOD", "ATTR"), set()).add(code.argval)
    kinds, attributes = [kind], sorted(named["LOAD_ATTR"])
    for variable in sorted((named["LOAD_GLOBAL"] - named["STORE_GLOBAL"]) & vars(module).keys()):
        value = vars(module)[variable]
        if isinstance(value, types.ModuleType):
            yield from _settings_in(value, attributes)
        else:
            yield module, variable, value
        if isinstance(value, type):
            kinds.append(value)
    for each in kinds:
        for attribute in (name for name in attributes if each is not kind or name not in own):
            holder = next((base for base in each.__mro__[:-1] if attribute in vars(base)), None)
            if holder is None or _root(holder.__module__) in _NO_SETTINGS:
                continue
            value = vars(holder)[attribute]
            if each is not kind or not (callable(value) or hasattr(value, "__get__")):
                yield holder, attribute, value


def _settings_in(module: types.ModuleType, attributes: Sequence[str]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the variables that a function names in a Python module, and in modules reached through it."""
    todo, seen = [module], set[int]()
    while todo:
        module = todo.pop()
        if id(module) in seen or _root(module.__name__) in _NO_SETTINGS:
            continue
        seen.add(id(module))
        for name in attributes:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType):
                todo.append(value)
            elif name in vars(module):
                yield module, name, value


def _root(name: str) -> str:
    return name.partition(".")[0]


def _items(value: Any) -> dict[Any, int]:
    """Return the identity of each item in an object that may change in place, by key."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | set | deque):
        items = enumerate(value)
    else:
        items = _state(value).items() if has_settings(value) or isinstance(value, BY_CONTENT) else ()
    return {key: id(item) for key, item in itertools.islice(items, _MOST)}


def _state(owner: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(owner, "__dict__"))
    except AttributeError:  # the object has slots
        return {}


class _Patch:
    """Replacement of one class's `__getattribute__`, and the number of active readers."""

    def __init__(self, wrapper: Any, original: Any, own: bool) -> None:
        self.wrapper, self.original, self.own, self.readers = wrapper, original, own, 0


_PATCHED: dict[type, _Patch] = {}
_ACTIVE: dict[int, AttributeReads] = {}
_LOCK = threading.Lock()


def _wrapper(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:
        reads = _ACTIVE.get(threading.get_ident())
        if reads is None:
            return original(self, name)
        try:
            value = original(self, name)
        except AttributeError:
            reads.note(self, name, None)
            raise
        reads.note(self, name, value)
        return value

    return __getattribute__


def _unpatch(kind: type) -> None:
    with _LOCK:
        patch = _PATCHED[kind]
        patch.readers -= 1
        if patch.readers:
            return
        del _PATCHED[kind]
        if patch.own:
            type.__setattr__(kind, "__getattribute__", patch.original)
        else:
            type.__delattr__(kind, "__getattribute__")
