"""Hold a model's inputs: positional and keyword arguments of any nesting, and names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from upriver.errors import ConfigError

Inputs: TypeAlias = "torch.Tensor | Example | tuple[Any, ...] | Mapping[str, Any]"
"""Inputs from a caller: one tensor, positional inputs as a tuple, keyword inputs as a mapping, or both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One call of a model, samples in dimension 0.

    Attributes:
        args: Positional inputs: tensors, None, numbers, and tuples, lists and dicts of them.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Inputs) -> Example:
        """Return an example from one tensor, a tuple of positional inputs, or a mapping of keyword inputs.

        Raises:
            ConfigError: If it is something else, or holds no tensor with samples.
        """
        match given:
            case Example():
                example = given
            case torch.Tensor():
                example = cls(args=(given,))
            case tuple():
                example = cls(args=given)
            case Mapping() if all(isinstance(name, str) for name in given):
                example = cls(kwargs=dict(given))
            case _:
                raise ConfigError(
                    "a model's inputs are a tensor, a tuple of positional inputs or a mapping of keyword "
                    f"inputs, got {type(given).__name__}"
                )
        if not example.tensors or example.tensors[0].dim() == 0:
            raise ConfigError("a model's inputs must begin with a tensor that has samples in dimension 0")
        if example.samples == 0:
            raise ConfigError(f"a model's inputs must hold at least one sample, got {example.describe()}")
        return example

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors in the order of a program's inputs: positional first, nested in place."""
        return [leaf for leaf in self._leaves()[0] if isinstance(leaf, torch.Tensor)]

    @property
    def samples(self) -> int:
        """Number of samples: the first tensor's first dimension."""
        return int(self.tensors[0].shape[0])

    def holds_samples(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has one row for each sample, as opposed to the same value for all."""
        return tensor.dim() > 0 and tensor.shape[0] == self.samples

    def resized(self, count: int) -> Example:
        """Return the example with ``count`` samples, repeated or cut.

        Tensors without samples stay the same.
        """
        # Copy unchanged tensors too: a model may write into its inputs.
        return self._map(
            lambda tensor: _resize(tensor, count) if self.holds_samples(tensor) else tensor.clone()
        )

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Example:
        """Return the same call on other tensors, in the order of :attr:`tensors`."""
        rest = iter(tensors)
        return self._map(lambda _tensor: next(rest))

    def describe(self) -> str:
        """Return types and shapes, for messages."""
        return ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in self.tensors
        )

    def _leaves(self) -> tuple[list[Any], pytree.TreeSpec]:
        return pytree.tree_flatten((self.args, dict(self.kwargs)))

    def _map(self, change: Any) -> Example:
        leaves, spec = self._leaves()
        changed = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(changed, spec)
        return Example(args=args, kwargs=kwargs)


def _resize(tensor: torch.Tensor, count: int) -> torch.Tensor:
    repeats = -(-count // tensor.shape[0])
    return torch.cat([tensor] * repeats)[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """Name of a tensor by its origin: a leaf of the result of a module call, or of the inputs.

    Attributes:
        path: Module in ``named_modules()``. Empty for the model itself, None for the model's inputs.
        number: Number of the call of that module: 0 for the first.
        leaf: Index among the tensors of the result (or of the inputs), in order.
    """

    path: str | None
    number: int = 0
    leaf: int = 0

    def __str__(self) -> str:
        if self.path is None:
            return f"input {self.leaf}"
        call = f", call {self.number + 1}" if self.number else ""
        part = f"[{self.leaf}]" if self.leaf else ""
        return f"{self.path or 'output'}{part}{call}"


def tensors_in(value: Any, _within: frozenset[int] = frozenset()) -> list[torch.Tensor]:
    """Return the tensors of a nested value, in order. Includes fields of dataclasses, without cycles."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type) and id(leaf) not in _within:
            parts = [getattr(leaf, part.name, None) for part in fields(leaf)]  # some may be unset
            found += tensors_in(parts, _within | {id(leaf)})
    return found


def random_like(example: Example, generator: torch.Generator) -> Example:
    """Return random values of the same form: normal numbers, and integers drawn from the example's."""
    return example.with_tensors([_random(tensor, generator) for tensor in example.tensors])


def _random(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        made = (
            torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
            .to(tensor.dtype)
            .to(tensor.device)
        )
        return torch.empty_like(tensor).copy_(made)  # strides decide low bits
    if tensor.numel() == 0:
        return tensor
    flat = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    chosen = torch.randint(0, flat.shape[0], (flat.shape[0],), generator=generator, device="cpu").to(
        tensor.device
    )
    # Choose whole rows: they keep a sample valid (a mask that ends, an index that grows).
    return flat.index_select(0, chosen).reshape(tensor.shape)
