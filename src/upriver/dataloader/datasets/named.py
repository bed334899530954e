"""Refer to datasets and functions by name, so that a worker elsewhere can use the same installed code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, default_collate

from upriver.dataloader.datasets.digests import DatasetSnapshot
from upriver.errors import ConfigError
from upriver.protocol import BY_DEFAULT
from upriver.protocol.messages import CODE_PATTERN, MAX_ARGUMENT_BYTES
from upriver.text import printable


class NamedDataset(TorchDataset[Any]):
    """A map-style dataset that any machine with its code can make again.

    Every other attribute is the dataset's own, to be read, set and deleted.

    Attributes:
        name: Name, ``package.module:callable``.
        arguments: Keyword arguments of the callable.
        dataset: Dataset that it made here.
        as_made: Contents of the dataset at that time, as workers have them.
    """

    name: str
    arguments: dict[str, Any]
    dataset: Any
    as_made: DatasetSnapshot

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        made = vars(self)
        made["name"], made["arguments"] = name, arguments
        made["dataset"] = _found(name)(**arguments)
        made["as_made"] = DatasetSnapshot(self.dataset)
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__"):
            kind = type(self.dataset).__name__
            raise ConfigError(f"{name} must make a map-style dataset; {kind} has no samples by index")

    def __getitem__(self, index: Any) -> Any:
        with self.as_made.making():
            return self.dataset[index]

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "dataset" not in vars(self):  # such as during a copy
            raise AttributeError(f"{type(self).__name__} has no {attribute}")
        return getattr(self.dataset, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self._has(attribute), attribute, value)

    def __delattr__(self, attribute: str) -> None:
        delattr(self._has(attribute), attribute)

    def _has(self, attribute: str) -> Any:
        """Return the dataset, to be changed.

        Raises:
            ConfigError: If workers need the attribute to make the dataset.
        """
        if attribute in NamedDataset.__annotations__:
            raise ConfigError(
                f"{attribute} is how workers make the dataset: make another one with upriver.dataset(); "
                f"an attribute of that name of the dataset's own is dataset.{attribute} of this one"
            )
        return self.dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"NamedDataset({self.name!r}, {self.arguments})"


def dataset(name: str, /, **arguments: Any) -> NamedDataset:
    """Make a map-style dataset that workers can make, too.

    Args:
        name: Class or function that makes it, as ``package.module:callable``. Workers must have it installed
            and must allow it.
        arguments: Its keyword arguments, which are sent as JSON: numbers, strings, true, false, None, and
            lists and mappings of them.

    Raises:
        ConfigError: If the callable does not exist here, an argument cannot be sent, or the result is no
            map-style dataset.
    """
    if not isinstance(name, str) or not re.fullmatch(CODE_PATTERN, name):
        raise ConfigError(f"a dataset is named package.module:callable, got {printable(repr(name), 80)}")
    for argument, value in arguments.items():
        _check_argument(argument, value)
    if len(msgspec.json.encode(arguments)) > MAX_ARGUMENT_BYTES:
        raise ConfigError(f"the arguments of a dataset have at most {MAX_ARGUMENT_BYTES} bytes as JSON")
    return NamedDataset(name, arguments)


def _check_argument(name: str, value: Any) -> None:
    """Check that an argument survives JSON unchanged; a tuple would become a list, a path a string."""
    try:
        same = _equal(msgspec.json.decode(msgspec.json.encode(value)), value)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        same = False
    if not same:
        raise ConfigError(
            f"argument {name!r} must be what JSON can say (numbers, strings, true, false, None, lists, "
            f"mappings), got {printable(repr(value), 80)} of type {type(value).__name__}; name a function of "
            "your own module that makes it together with the dataset"
        )


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _found(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"there is no {name} here: {error}") from None
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, and must be callable")
    result: Callable[..., Any] = found
    return result


def name_of(function: Callable[..., Any]) -> str | None:
    """Return the name by which another process finds a function; None if it has none, as a lambda."""
    if function is default_collate:
        return BY_DEFAULT
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    if not re.fullmatch(CODE_PATTERN, name) or name.startswith("__main__:"):
        return None
    try:
        return name if _found(name) is function else None
    except ConfigError:
        return None
