"""Cache the captured networks of a model, one for each form of call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from upriver._threads.forks import ForkSafeLock
from upriver.errors import CaptureError, ConfigError
from upriver.program.capture.whole_model import CapturedModel
from upriver.program.example_inputs import Example
from upriver.program.graph.alignment import as_shipped
from upriver.text import printable

log = logging.getLogger("upriver")

MOST_FORMS = 8
"""Forms captured per model: each takes seconds, and a program of its own on every server."""

MOST_REFUSED = 64
"""Refused forms whose reason is remembered."""

Leaf: TypeAlias = "tuple[Any, ...]"
"""The part of one input that a program depends on: a tensor's type, shape and strides, or any other value
whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A model captured for one form of call, with the seconds of each stage and of all on the device.

    Attributes:
        threads: Number of torch threads at the capture.
    """

    captured: CapturedModel
    device_s: tuple[float, ...]
    total_s: float
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def other_threads(self) -> str:
        """The reason that no server gives equal bits now: the check compared those of other threads."""
        now = torch.get_num_threads()
        if now == self.threads:
            return ""
        return (
            f"torch computes with {now} threads here and did with {self.threads} when the model was "
            "captured, which changes the bits of some networks"
        )


@dataclass(frozen=True, slots=True)
class _Known:
    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec
    network: Network | None
    why_not: str = ""


class CaptureCache:
    """Find the captured network of a call, and capture further forms. Thread-safe."""

    def __init__(self, example: Example, make: Callable[[Example], Network]) -> None:
        keys = tuple(_leaf(leaf, f"{name} of example_inputs") for name, leaf in _named_leaves(example))
        example = _copied(example)
        self._example, self._make = example, make
        self._lock = ForkSafeLock()
        self._order = tuple(example.kwargs)
        _, spec = _flat(example.args, dict(example.kwargs))
        self.first = make(example)
        self._known: tuple[_Known, ...] = (_Known(keys, spec, self.first),)
        self._refused: tuple[_Known, ...] = ()

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks captured so far, one for each form."""
        return tuple(known.network for known in self._known if known.network is not None)

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Network, list[torch.Tensor]]:
        """Return the network for a call and the call's tensors.

        Raises:
            ConfigError: If the call has another form than the example and cannot be captured; the message
                names the argument.
        """
        named = {name: kwargs[name] for name in self._order if name in kwargs}
        named |= {name: kwargs[name] for name in sorted(kwargs.keys() - named.keys())}
        leaves, spec = _flat(args, named)
        keys = tuple(_key(leaf) for leaf in leaves)
        found = self._look(keys, spec)
        if found is None:
            with self._lock:
                found = self._look(keys, spec) or self._take_in(Example(args=args, kwargs=named), keys, spec)
        if found.network is None:
            raise ConfigError(found.why_not)
        return found.network, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _look(self, keys: tuple[Leaf, ...], spec: pytree.TreeSpec) -> _Known | None:
        for known in (*self._known, *self._refused):
            if known.leaves == keys and known.spec == spec:
                return known
        return None

    def _take_in(self, given: Example, keys: tuple[Leaf, ...], spec: pytree.TreeSpec) -> _Known:
        difference = self._difference(given)
        try:
            for name, leaf in _named_leaves(given):
                _leaf(leaf, name)
            self._check(given)
            log.info("capturing the model anew: %s", difference)
            known = _Known(keys, spec, self._make(_copied(Example.of(given))))
        except (CaptureError, ConfigError) as error:
            known = _Known(keys, spec, None, f"{difference}: {error}")
            self._refused = (*self._refused, known)[-MOST_REFUSED:]
            return known
        self._known = (*self._known, known)
        return known

    def _check(self, given: Example) -> None:
        if len(self._known) >= MOST_FORMS:
            raise ConfigError(f"{MOST_FORMS} forms of input have been captured, and no more are")
        device = self._example.tensors[0].device
        if elsewhere := {str(tensor.device) for tensor in given.tensors if tensor.device != device}:
            raise ConfigError(f"inputs lie on {device}, where the model is, and not on {min(elsewhere)}")

    def _difference(self, given: Example) -> str:
        """Describe the first argument that differs from the example."""
        wanted, got = _named_leaves(self._example), _named_leaves(given)
        for (name, theirs), (other, ours) in zip(wanted, got, strict=False):
            if name != other:
                break
            if _key(theirs) != _key(ours):
                return f"{name} must be {_described(theirs)} as in example_inputs, got {_described(ours)}"
        names = ", ".join(name for name, _ in wanted)
        return (
            f"a call must have the arguments of example_inputs ({names}), got "
            f"({', '.join(name for name, _ in got)})"
        )


def _flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    return pytree.tree_flatten((args, kwargs))


def _copied(example: Example) -> Example:
    """Copy a call's tensors: later writes by the caller must not change the example."""
    return example.with_tensors([_copy(tensor) for tensor in example.tensors])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return copy if copy.stride() == tensor.stride() else as_shipped([tensor])[0].to(tensor.device)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape and strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _key(leaf: object) -> Leaf:
    """Return what distinguishes an input from others; for an unsupported value, its type."""
    if isinstance(leaf, torch.Tensor):
        if not _is_dense(leaf):
            return leaf.dtype, leaf.layout, leaf.device
        # The stride of a dimension of size 1 is never used.
        steps = tuple(step for size, step in zip(leaf.shape, leaf.stride(), strict=True) if size != 1)
        return leaf.dtype, leaf.shape, steps, leaf.device
    if isinstance(leaf, float):  # 0.0 == -0.0 but they differ; NaN != NaN but it is the same
        return type(leaf), leaf.hex()
    return type(leaf), leaf if isinstance(leaf, bool | int | str) else None


def _leaf(leaf: object, name: str) -> Leaf:
    """Return the key of an input.

    Raises:
        ConfigError: If the value cannot be an input; the message names it.
    """
    if not isinstance(leaf, torch.Tensor | bool | int | float | str | None):
        raise ConfigError(f"{name} must be a tensor, a number, a word or None, got a {type(leaf).__name__}")
    if isinstance(leaf, torch.Tensor) and not _is_dense(leaf):
        raise ConfigError(f"{name} must be a dense tensor, got {_described(leaf)}")
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise ConfigError(f"{name} must be a tensor with values, got {_described(leaf)}")
    return _key(leaf)


def _named_leaves(example: Example) -> list[tuple[str, Any]]:
    """Return every input with its argument's name and its path within the argument."""
    leaves, _ = pytree.tree_flatten_with_path((example.args, dict(example.kwargs)))
    named = []
    for (_, argument, *inside), leaf in leaves:
        where = (
            argument.idx if isinstance(argument, pytree.SequenceKey) else repr(getattr(argument, "key", ""))
        )
        named.append((f"argument {where}{pytree.keystr(tuple(inside))}", leaf))
    return named


def _described(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return printable(repr(leaf), 40)
    dtype = str(leaf.dtype).removeprefix("torch.")
    if not _is_dense(leaf):
        return f"{dtype} of layout {str(leaf.layout).removeprefix('torch.')}{', nested' * leaf.is_nested}"
    text = f"{dtype} of shape {tuple(leaf.shape)}"
    text += f" on {leaf.device}" if leaf.device.type != "cpu" else ""
    return text if leaf.is_contiguous() else f"{text} with strides {leaf.stride()}"
