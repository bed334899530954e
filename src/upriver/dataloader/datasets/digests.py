"""What a dataset holds, attribute by attribute, as digests: whether it has changed since others copied it.

Workers elsewhere make a dataset by its name, as its constructor leaves it. Loader processes that persist have
it as it was when they began. Training loops move datasets on between epochs (``set_epoch``, a curriculum).
Then samples made here and there would be of two states.

Digests are of what pickle would say, in this process alone: nothing of it is sent, or read again. Of what
pickle cannot say (an open file, a lock) only the type counts. Attributes that making a sample has changed (a
cache, a file that is opened then) are left out: those are no choice of the loop's.
"""

from __future__ import annotations

import copyreg
import ctypes
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pickle import Pickler
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

Digests: TypeAlias = Mapping[str, str]

WHOLE = "its items"
"""Stands for what a list or mapping holds, which has no name."""

MOST_LOOKED_AT, MOST_DEEP = 100, 20
"""Items of a list of transforms, and not of one of samples; attributes of attributes."""

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_SHARED = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_VALUES = (*_SHARED, np.ndarray, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
"""What is one value, though it has attributes."""


class Contents:
    """A dataset's attributes as they were when this was made.

    Args:
        dataset: The user's.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._then = digests(dataset)
        self._moving = set[str]()
        self._learned = False

    def changed(self) -> list[str]:
        """Name what is otherwise now, and was not changed by making samples."""
        return sorted(_different(self._then, digests(self._dataset)) - self._moving)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make the first sample in this process inside: what that changes is no choice of the loop's."""
        if self._learned:
            yield
            return
        self._learned, before = True, digests(self._dataset)
        try:
            yield
        finally:
            self._moving |= _different(before, digests(self._dataset))

    def learn(self, make: Callable[[], object]) -> None:
        """Make a sample for that, where none has been; it may fail."""
        if not self._learned:
            with suppress(Exception), self.making():
                make()


def digests(dataset: Any) -> dict[str, str]:
    """Digest each attribute, by its path from the dataset; those of the dataset's classes too."""
    found: dict[str, Any] = {}
    for kind in reversed(type(dataset).__mro__):
        found |= {name: value for name, value in vars(kind).items() if _is_state(name, value)}
    each: dict[str, str] = {name: _digest(value) for name, value in found.items()}
    _walk(dataset, "", each, set())
    return each


def _walk(value: Any, path: str, found: dict[str, str], seen: set[int]) -> None:
    """Digest what an object holds, or the object itself where it is one value.

    Objects are walked by attribute, as one that making samples changes says nothing of its neighbours.
    """
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, _VALUES):
        found[path or WHOLE] = _digest(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, held in list(attributes.items()):
        _walk(held, f"{path}.{name}" if path else str(name), found, seen)
    if isinstance(value, list | tuple | dict | set):
        found[f"{path} items".strip()] = _digest(list(value.items() if isinstance(value, dict) else value))
    slots = {name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))}
    for name in sorted(slots - {"__dict__", "__weakref__"}):
        if hasattr(value, name):
            _walk(getattr(value, name), f"{path}.{name}" if path else name, found, seen)


def generators_in(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """Name the generators of its own that a dataset holds, by their paths from it.

    Attributes are looked at, `MOST_DEEP` steps from it, and containers of at most `MOST_LOOKED_AT` items.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or path.count(".") >= MOST_DEEP:
        return
    seen.add(id(value))
    if isinstance(value, _GENERATORS):
        yield path
        return
    held = getattr(value, "__dict__", None)
    parts = list(held.items()) if isinstance(held, dict) and not isinstance(value, _VALUES) else []
    if isinstance(value, list | tuple | dict) and len(value) <= MOST_LOOKED_AT:
        parts += list(value.items() if isinstance(value, dict) else enumerate(value))
    for name, each in parts:
        yield from generators_in(each, f"{path}.{name}" if path else str(name), seen)


def _names(slots: Any) -> Sequence[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _different(one: Digests, other: Digests) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _is_state(name: str, value: Any) -> bool:
    """Whether an attribute of a class is a value rather than code."""
    return not name.startswith(("__", "_abc_")) and isinstance(
        value, bool | int | float | str | bytes | list | tuple | dict | set | np.ndarray | torch.Tensor | None
    )


def _digest(value: Any) -> str:
    """In hexadecimal digits."""
    hashed = _Hashed()
    try:
        _Pickler(hashed, protocol=4).dump(value)
    except Exception:  # such as one that is nested too deep
        return type(value).__qualname__
    return hashed.digest.hexdigest()


class _Hashed:
    """A file of which only the digest is kept."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> None:
        self.digest.update(data)


class _Pickler(Pickler):
    """Says arrays by their digests, and what stays in this process by its identity."""

    def reducer_override(self, value: Any) -> Any:
        match value:
            case np.memmap():
                return str, (f"{value.filename} {value.offset} {value.dtype} {value.shape}",)
            case np.ndarray() if not value.dtype.hasobject:
                return str, (f"{type(value)} {value.dtype} {value.shape} {_digest_of_bytes(value)}",)
            case torch.Tensor() if value.layout is torch.strided and not value.is_nested:
                return str, (f"{type(value)} {value.dtype} {value.shape} {_digest_of_tensor(value)}",)
            case type() if value.__module__ != "builtins":
                return str, (f"{value.__module__}.{value.__qualname__} {id(value)}",)
            case types.FunctionType():
                cells = [each.cell_contents for each in value.__closure__ or () if _is_filled(each)]
                return tuple, ([value.__qualname__, id(value.__code__), value.__defaults__, cells],)
        if isinstance(value, type):
            return NotImplemented
        if isinstance(value, _SHARED):
            return str, (bytes(value).hex(),)
        known = copyreg.dispatch_table.get(type(value))
        try:
            reduced = value.__reduce_ex__(4) if known is None else known(value)
        except Exception:  # a file, a lock: the user's own code runs in it, too
            return str, (type(value).__qualname__,)
        return (str, (reduced,)) if isinstance(reduced, str) else reduced


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _digest_of_tensor(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _digest_of_bytes(plain.view(torch.uint8).numpy()) if plain.numel() else ""


def _digest_of_bytes(array: np.ndarray[Any, Any]) -> str:
    plain = np.ascontiguousarray(array.T if array.flags.f_contiguous else array)
    return str(xxhash.xxh3_128(plain.reshape(-1).view(np.uint8).data).hexdigest()) if plain.size else ""
