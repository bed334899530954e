"""Digest a dataset's attributes, to see whether it has changed since others copied it.

Workers make a dataset by its name, as its constructor leaves it. Persistent loader processes hold it as it
was when they began. Training loops change datasets between epochs (``set_epoch``, a curriculum). Samples made
here and there would then be of two states.

Digests are of the attributes' pickles, in this process alone: none is sent or read again. For values that
pickle refuses (an open file, a lock) only the type counts. Attributes that making a sample changes (a cache,
a file opened on demand) are left out, as they are not the training loop's choice.
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
"""Name for the items of a list or mapping, which have none."""

MOST_LOOKED_AT, MOST_DEEP = 100, 20
"""Limits of the search for generators: items of a container, and depth of attributes.

The first admits a list of transforms, and not one of samples.
"""

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_SHARED = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_VALUES = (*_SHARED, np.ndarray, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)
"""Types that count as one value although they have attributes."""


class DatasetSnapshot:
    """Snapshot of a dataset's attributes."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._then = digests(dataset)
        self._moving = set[str]()
        self._learned = False

    def changed(self) -> list[str]:
        """Return the names of attributes that differ now, except those that making samples has changed."""
        return sorted(_different(self._then, digests(self._dataset)) - self._moving)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Watch the first sample being made in the context: its changes are not the training loop's."""
        if self._learned:
            yield
            return
        self._learned, before = True, digests(self._dataset)
        try:
            yield
        finally:
            self._moving |= _different(before, digests(self._dataset))

    def learn(self, make: Callable[[], object]) -> None:
        """Make a sample to see what it changes, if none has been made; it may fail."""
        if not self._learned:
            with suppress(Exception), self.making():
                make()


def digests(dataset: Any) -> dict[str, str]:
    """Return a digest of each attribute, by its path from the dataset; class attributes are included."""
    found: dict[str, Any] = {}
    for kind in reversed(type(dataset).__mro__):
        found |= {name: value for name, value in vars(kind).items() if _is_state(name, value)}
    each: dict[str, str] = {name: _digest(value) for name, value in found.items()}
    _walk(dataset, "", each, set())
    return each


def _walk(value: Any, path: str, found: dict[str, str], seen: set[int]) -> None:
    """Digest an object's attributes, or the object itself if it is one value.

    Objects are walked by attribute, as making samples may change one attribute and not its neighbours.
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
    """Yield the paths of the dataset's own generators.

    The search goes `MOST_DEEP` attributes deep, and into containers of at most `MOST_LOOKED_AT` items.
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
    """Return whether an attribute of a class is a value rather than code."""
    return not name.startswith(("__", "_abc_")) and isinstance(
        value, bool | int | float | str | bytes | list | tuple | dict | set | np.ndarray | torch.Tensor | None
    )


def _digest(value: Any) -> str:
    """Return the digest in hexadecimal digits."""
    hashed = _Hashed()
    try:
        _Pickler(hashed, protocol=4).dump(value)
    except Exception:  # such as a value that is nested too deep
        return type(value).__qualname__
    return hashed.digest.hexdigest()


class _Hashed:
    """File that keeps only a digest."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> None:
        self.digest.update(data)


class _Pickler(Pickler):
    """Pickler that writes arrays as digests, and objects of this process as their identity."""

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
        except Exception:  # a file or a lock; it also runs the user's code
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
