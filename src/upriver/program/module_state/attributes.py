"""Detect changes in the attributes that a captured forward pass has read.

Each check compares identities: of every value read, of the items of lists and dictionaries, and of classes.
Where an identity differs, the check compares values. An equal value is no change.
"""

from __future__ import annotations

import array
import ctypes
import dis
import enum
import functools
import itertools
import mmap
import operator
import types
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch import nn

from upriver.program.compiled_code import closure_of
from upriver.program.freeze import fold
from upriver.program.module_state.attribute_reads import ALL, BY_CONTENT, AttributeReads, is_machinery

Form: TypeAlias = "tuple[Any, ...]"
"""Comparable description of a value. Equal forms mean equal values."""

Entry: TypeAlias = "tuple[str, str, Form]"
"""Owner of an attribute, the attribute's name, and the form of its value."""

_ABSENT: Form = ("absent",)

_MEMBERS = ("_parameters", "_buffers")

_DICTS = ("_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
"""Dictionaries of a module compared by identity only. Other classes watch their contents."""

_UNUSED_IN_EVAL: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.dropout._DropoutNd, "p"),
    (nn.modules.batchnorm._NormBase, "momentum"),
)
"""Attributes of torch modules that `forward` reads in eval mode without effect. Schedules set them."""

_BUFFERS: tuple[type, ...] = (bytearray, array.array, memoryview, mmap.mmap)
_BUFFERS = (*_BUFFERS, ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
"""Types whose bytes may change in place."""

_KNOWN_BY_VALUE = (bool, int, float, str, bytes, torch.Tensor, types.FunctionType)
"""Types compared among the objects that a function holds. Lists are left out: hooks collect results in
them."""


class AttributeSnapshot:
    """Remember attributes of objects as they were at construction.

    Args:
        modules: `nn.Module` objects, Python modules and classes, each with its name in messages and the
            attribute names read.
        kinds: Attribute names read of other objects, by class.
    """

    def __init__(
        self, modules: Sequence[tuple[Any, str, frozenset[str]]], kinds: Mapping[type, frozenset[str]]
    ) -> None:
        self._modules, self._kinds = modules, kinds
        self._first = self._seen = _Look(modules, kinds)
        self._judged: list[tuple[_Look, bool]] = []

    @property
    def changed(self) -> str:
        """Return the first attribute whose value differs now, in words. Empty if none differs."""
        return self.changed_for(lambda _what: None)

    def changed_for(self, again: Callable[[str], AttributeSnapshot | None], *, values: bool = False) -> str:
        """Return the first changed attribute, in words, unless the new values give an equivalent result.

        Args:
            again: Called with a description of the change. Returns the attributes that the forward pass reads
                with the current values if the result is equivalent, else None. Called once for each set of
                values.
            values: True to compare tensor values also where no version counter has moved.
        """
        if self._seen.lasts and not values:
            return ""
        now = _Look(self._modules, self._kinds)
        found = self._first.differs_in_words(now)
        known = [same for look, same in self._judged if not look.differs_in_words(now)] if found else [True]
        if not known:
            read = again(found)
            known.append(read is not None)
            self._judged.append((now, known[0]))
            if read is not None and not read._is_part_of(self):
                vars(self).update(vars(self.joined(read)))
                return ""
        if not known[0]:
            return found
        self._seen = now
        return ""

    def _is_part_of(self, other: AttributeSnapshot) -> bool:
        """Return whether `other` covers every attribute that this object covers."""
        there = {id(module): names for module, _, names in other._modules}
        modules = all(names <= there.get(id(module), frozenset()) for module, _, names in self._modules)
        return modules and all(
            names <= other._kinds.get(kind, frozenset()) for kind, names in self._kinds.items()
        )

    def moved(self) -> frozenset[tuple[str, str]]:
        """Return owner and name of each attribute whose value differs now."""
        return frozenset(self._first.differs(_Look(self._modules, self._kinds)))

    def joined(self, other: AttributeSnapshot | None) -> AttributeSnapshot:
        """Return the attributes of both, with their current values."""
        if other is None:
            return self
        modules = {id(module): (module, place, names) for module, place, names in self._modules}
        for module, place, names in other._modules:
            before = modules[id(module)][2] if id(module) in modules else frozenset()
            modules[id(module)] = (module, place, before | names)
        kinds = dict(self._kinds)
        for kind, names in other._kinds.items():
            kinds[kind] = kinds.get(kind, frozenset()) | names
        return AttributeSnapshot(list(modules.values()), kinds)


def attributes_of(
    reads: AttributeReads,
    model: nn.Module,
    *,
    among: Iterable[nn.Module] | None = None,
    within: Callable[[int, int], bool] = lambda call, event: True,
) -> AttributeSnapshot:
    """Return the attributes that a pass has read.

    Args:
        among: Submodules that count. None for all.
        within: Predicate over the module call and the event of a read. Reads for which it is false do not
            count.
    """
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    left = set() if among is None else paths.keys() - set(map(id, among))
    modules: list[tuple[Any, str, frozenset[str]]] = []
    kinds: dict[type, frozenset[str]] = {}
    for identity, owner in reads.owners.items():
        places = reads.names[identity]
        names = frozenset(name for name in places if any(within(*place) for place in places[name]))
        if not names or identity in left:
            continue
        if isinstance(owner, nn.Module):
            place = _where(owner, paths.get(identity))
            written = {name for where, name in reads.written if where == place}
            written |= {name for kind, name in _UNUSED_IN_EVAL if isinstance(owner, kind)}
            modules.append((owner, place, _less(names, written)))
        elif isinstance(owner, types.ModuleType):
            modules.append((owner, f"Python's module {owner.__name__!r}", names))
        elif isinstance(owner, type):
            modules.append((owner, f"{_what(owner)} itself", names))
        else:
            what = _what(kind := type(owner))
            written = {
                name for where, name in reads.written if where == what or where.startswith(f"{what} in ")
            }
            kinds[kind] = kinds.get(kind, frozenset()) | _less(names, written)
    return AttributeSnapshot(modules, kinds)


_BUT = "!"
"""Prefix of an attribute name that is excluded where all other attributes count."""


def _less(names: frozenset[str], written: Collection[str]) -> frozenset[str]:
    but = {_BUT + name for name in written} if ALL in names else set()
    return names.difference(written) | but


_HIDDEN = "that is no submodule"


def _where(module: nn.Module, path: str | None) -> str:
    """Return the name of a module for messages."""
    if path is None:
        return f"a {type(module).__name__} {_HIDDEN}"
    return f"module {path!r}" if path else "the model"


class _Look:
    """Snapshot of all attributes that are watched."""

    def __init__(
        self, modules: Sequence[tuple[Any, str, frozenset[str]]], kinds: Mapping[type, frozenset[str]]
    ) -> None:
        self.entries: list[Entry] = []
        self._kinds = kinds
        self._places: dict[int, Form] = {}  # forms of visited objects
        self._forms: dict[int, Form] = {}
        self._classes: set[tuple[type, str]] = set()
        self._of_classes: set[tuple[str, str]] = set()
        self._kinds_seen: set[type] = set()
        self._owners: dict[type, list[str]] = {}
        self._objects: list[Any] = []
        self._getters: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self._held: list[Iterable[Any]] = []
        self._sized: list[Sized] = []
        self._sets: list[tuple[Any, frozenset[Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[Any] = []
        for module, place, names in modules:
            self._look_at(module, place, names)
        for owner, names_there in self._owners.items():
            self._getters.append((_getter(names_there), vars(owner)))
        self._values = self._now()
        self._lengths = list(map(len, self._sized))
        self._versions = [tensor._version for tensor in self._tensors]
        self._digests = list(map(_digest, self._arrays))

    @property
    def lasts(self) -> bool:
        """True if everything is unchanged. Versions stand in for the values of tensors."""
        try:
            now = self._now()
        except (KeyError, AttributeError, RuntimeError):  # RuntimeError: another thread writes
            return False
        return (
            len(now) == len(self._values)
            and all(map(operator.is_, now, self._values))
            and list(map(len, self._sized)) == self._lengths
            and [tensor._version for tensor in self._tensors] == self._versions
            and all(now == before for now, before in self._sets)
            and list(map(_digest, self._arrays)) == self._digests
        )

    def differs(self, other: _Look) -> Iterator[tuple[str, str]]:
        """Yield owner and name of each attribute whose value differs in `other`."""
        mine, others = self._by_name(), other._by_name()
        # A class attribute counts only where the object has no value. The object's own entry compares it.
        of_classes = self._of_classes | other._of_classes
        alone = of_classes - (mine.keys() & others.keys())
        order = sorted(
            dict.fromkeys((*mine, *others)), key=lambda key: (key not in of_classes, key[1] == "__dict__")
        )
        for key in order:
            if key not in alone and mine.get(key) != others.get(key):
                yield key

    def differs_in_words(self, other: _Look) -> str:
        """Return the first difference in words, with both values where they are short.

        Empty if none differs.
        """
        for place, name in self.differs(other):
            was, now = (_in_words(look._by_name().get((place, name), [])) for look in (self, other))
            values = f" (was {was}, is {now})" if was and now and was != now else ""
            return f"attribute {name!r} of {place}{values}"
        return ""

    def _by_name(self) -> dict[tuple[str, str], list[Form]]:
        found: dict[tuple[str, str], list[Form]] = {}
        for place, name, form in self.entries:
            found.setdefault((place, name), []).append(form)
        return found

    def _now(self) -> list[Any]:
        gotten = [get(source) for get, source in self._getters]
        return [*map(type, self._objects), *itertools.chain(*gotten), *itertools.chain(*self._held)]

    def _look_at(self, owner: Any, place: str, names: frozenset[str]) -> Form:
        if id(owner) in self._places:
            return self._places[id(owner)]
        self._places[id(owner)] = form = ("object", place)
        kind, state = type(owner), getattr(owner, "__dict__", {})
        self._objects.append(owner)
        self.entries.append((place, "__class__", ("is", id(kind))))
        if ALL in names:
            machinery = filter(is_machinery, state) if isinstance(owner, nn.Module) else ()
            but = {name.removeprefix(_BUT) for name in names if name.startswith(_BUT)}.union(machinery)
            names = names.union(state).difference(but, {ALL}, (_BUT + name for name in but))
            self._sized.append(state)
            self.entries.append((place, "__dict__", tuple(name for name in state if name not in but)))
        members = isinstance(owner, nn.Module) and all(isinstance(state.get(n), dict) for n in _MEMBERS)
        if members:
            for member in (state[name] for name in _MEMBERS):
                self._held.append(member.keys())
                if read := [name for name in member if name in names]:
                    self._getters.append((_getter(read), member))
            listed = [name for name in _MEMBERS if name in names]
            self.entries += [(place, name, ("names", *state[name])) for name in listed]
            names = names.difference(_MEMBERS)
        there = [name for name in sorted(names) if name in state]
        absent = [name for name in sorted(names) if name not in state]
        fixed = [name for name in _DICTS if name in state] if isinstance(owner, nn.Module) else []
        if there or fixed:
            self._getters.append((_getter([*there, *fixed]), state))
        self.entries += [(place, name, ("is", id(state[name]))) for name in fixed]
        if absent:
            self._sized.append(state)
        for name in there:
            self.entries.append((place, name, self._form(state[name], place, name)))
        for name in absent:
            slot = isinstance(_of_class(kind, name)[1], types.MemberDescriptorType)
            if slot and hasattr(owner, name):
                self._getters.append((operator.attrgetter(name, name), owner))
                self.entries.append((place, name, self._form(getattr(owner, name), place, name)))
            else:
                form = self._form_in_class(owner, place, name)
                if members and form == _ABSENT:
                    form = self._form_as_member(state, name, hidden=place.endswith(_HIDDEN))
                self.entries.append((place, name, form))
            self._look_at_class(kind, name)
        if isinstance(owner, nn.Module):
            self._look_at_class(kind, "forward")
            self._look_at_class(kind, "__call__")
        return form

    def _look_at_class(self, kind: type, name: str) -> None:
        """Add an entry for a name that a class holds and its objects do not."""
        if (kind, name) in self._classes:
            return
        if kind not in self._kinds_seen:
            self._kinds_seen.add(kind)
            self._sized += [vars(each) for each in kind.__mro__[:-1]]
        self._classes.add((kind, name))
        owner, value = _of_class(kind, name)
        if owner is not None and name not in self._owners.setdefault(owner, []):
            self._owners[owner].append(name)
        form = _ABSENT if owner is None else (id(owner), self._form(value, _what(kind), name))
        self.entries.append((_what(kind), name, form))
        self._of_classes.add((_what(kind), name))

    def _form_in_class(self, owner: Any, place: str, name: str) -> Form:
        """Return the form that the object's own value would have if it were the value held by its class."""
        where, value = _of_class(type(owner), name)
        if isinstance(value, types.FunctionType):
            return "method", id(value), self._form(owner, place, name)
        return _ABSENT if where is None or hasattr(value, "__get__") else self._form(value, place, name)

    def _form_as_member(self, state: Mapping[str, Any], name: str, *, hidden: bool) -> Form:
        """Return the form of a parameter or buffer, or `_ABSENT` if the module has neither by that name.

        Args:
            hidden: True if no other class watches the tensor's values.
        """
        for member in _MEMBERS:
            if name in state[member]:
                tensor = state[member][name]
                return ("none",) if tensor is None else self._tensor(tensor) if hidden else ("tensor",)
        return _ABSENT

    def _form(self, value: Any, place: str, name: str) -> Form:
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes):
            return kind, value
        if kind is float:
            return kind, value.hex()  # 0.0 and -0.0 are equal but differ in bits
        if id(value) not in self._forms:
            self._forms[id(value)] = ("cycle",)
            self._forms[id(value)] = self._form_of(value, place, name)
        return self._forms[id(value)]

    def _form_of(self, value: Any, place: str, name: str) -> Form:
        kind = type(value)

        def inside(values: Iterable[Any]) -> Form:
            return tuple(self._form(each, place, name) for each in values)

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            self._arrays.append(value)
            return kind, value.dtype.str, value.shape, value.strides, _digest(value)
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, enum.Enum | nn.Module):
            return "is", id(value)
        if isinstance(value, dict):
            self._held += [value.keys(), value.values()]
            return kind, inside(value.keys()), inside(value.values())
        if isinstance(value, list | tuple | deque):
            self._held.append(value)
            return kind, inside(value)
        if isinstance(value, ChainMap):
            self._held.append(value.maps)
            return kind, inside(value.maps)
        if isinstance(value, weakref.ref):
            self._getters.append((_referent, value))
            return kind, inside(_referent(value))
        if isinstance(value, set | frozenset):
            self._sets.append((value, frozenset(value)))
            return kind, frozenset(inside(value))
        if isinstance(value, functools.partial):
            return kind, *inside((value.func, value.args, value.keywords))
        if isinstance(value, types.FunctionType):
            self._getters.append((_held_by, value))
            held = (each for each in _held_by(value) if isinstance(each, _KNOWN_BY_VALUE))
            return "is", id(value), *inside(held)
        if isinstance(value, types.MethodType):
            return "method", id(value.__func__), self._form(value.__self__, place, name)
        if isinstance(value, complex | slice | range | torch.Size | torch.device):
            return kind, repr(value)
        if kind in self._kinds or kind in BY_CONTENT:
            names = self._kinds.get(kind, frozenset((ALL,)))
            return self._look_at(value, f"{_what(kind)} in {name!r} of {place}", names)
        if isinstance(value, _BUFFERS):
            self._arrays.append(value)
            return kind, id(value), _digest(value)
        return "is", id(value)

    def _tensor(self, value: torch.Tensor) -> Form:
        dense = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        if not dense or type(value) not in (torch.Tensor, nn.Parameter):
            return "is", id(value)
        if not value.is_inference():  # inference tensors have no version
            self._tensors.append(value)
        return "tensor", value.dtype, value.shape, value.stride(), value.device, fold(value)


def _in_words(forms: Sequence[Form]) -> str:
    """Return a value in words, read from its form. Empty if the value is not short."""
    match forms:
        case [] | [("absent",)]:
            return "absent"
        case [("none",)]:
            return "None"
        case [("tensor",)]:
            return "a tensor"
        case [("names", *names)]:
            return ", ".join(map(str, names))[:80] or "empty"
        case [(type() as kind, value)] if kind in (bool, int, type(None)):
            return repr(value)
        case [(type() as kind, str() as value)] if kind in (str, float):
            return repr(float.fromhex(value) if kind is float else value[:80])
    return ""


def _what(kind: type) -> str:
    return f"class {kind.__qualname__}"


def _of_class(kind: type, name: str) -> tuple[type | None, Any]:
    """Return the first base class that holds a name, and the value held."""
    owner = next((each for each in kind.__mro__[:-1] if name in vars(each)), None)
    return owner, None if owner is None else vars(owner)[name]


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    # With a single name `itemgetter` would return the value, not a tuple.
    return operator.itemgetter(*names, names[0])


def _referent(reference: weakref.ref[Any]) -> tuple[Any, ...]:
    return (reference(),)


def _held_by(function: types.FunctionType) -> tuple[Any, ...]:
    """Return a function's defaults, and the closure variables that the function does not set."""
    own = _set_by(function.__code__)
    captured = [value for name, value in closure_of(function) if name not in own]
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *captured


@functools.lru_cache(maxsize=1000)
def _set_by(code: types.CodeType) -> frozenset[str]:
    """Return the names of an enclosing scope that a function sets."""
    return frozenset(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")


def _digest(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return xxhash.xxh3_64_intdigest(memoryview(values).tobytes())
    return (
        tuple(map(id, values.flat)) if values.dtype.hasobject else xxhash.xxh3_64_intdigest(values.tobytes())
    )
