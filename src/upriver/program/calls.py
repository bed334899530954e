"""Which calls of allowed operators are refused: some arguments make a harmless operator harmful."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from upriver.errors import ProgramError

_MUST_BE: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention.default": {"dropout_p": 0},  # else random
    "batch_norm.default": {"training": False},  # else it writes into its running statistics
    "index_put.default": {"accumulate": False},  # else the order of additions is open
}
"""Arguments that would make an allowed operator random, mutating or irreproducible, and what they must be."""

_INDEX_TYPES = (torch.int64, torch.int32)


def operator_of(name: str) -> Any:
    """The ATen operator called ``<operator>.<overload>``, allowed or not.

    Raises:
        AttributeError: If this version of torch has none.
    """
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload)


@functools.cache
def _signature(name: str) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Names of an operator's arguments in order, and the defaults of those that have one."""
    arguments = operator_of(name)._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return tuple(each.name for each in arguments), defaults


def check_call(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, num_results: int | None = None
) -> None:
    """Refuse a call that makes an allowed operator do what no program may.

    Args:
        args: As the operator gets them, tensors with or without data; or as a graph file has them, and then
            what depends on the tensors themselves is not looked at.
        num_results: How many the caller expects, once there are tensors.

    Raises:
        ProgramError: If it is random, writes into its arguments, has results whose size depends on data, or
            has more or fewer results than expected.
    """
    names, defaults = _signature(name)
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    for argument, wanted in _MUST_BE.get(name, {}).items():
        if given.get(argument) != wanted:
            raise ProgramError(
                f"{argument} of {name} must be {wanted!r}, got {given.get(argument)!r}: a program holds "
                "nothing random and nothing that writes into its arguments"
            )
    if given.get("pin_memory"):
        raise ProgramError(f"{name} with pin_memory: a program does not choose where its memory lies")
    if (
        name == "instance_norm.default"
        and given.get("use_input_stats")
        and given.get("running_mean") is not None
    ):
        raise ProgramError(f"{name} writes into its running statistics")
    if name == "index.Tensor":
        _check_indices(name, given.get("indices"), _INDEX_TYPES)
    if name == "index_put.default":
        _check_indices(name, given.get("indices"), (torch.bool,))
    if num_results is None or name not in _RESULTS:
        return
    if (results := _RESULTS[name](given)) != num_results:
        raise ProgramError(f"{name} gives {results} results, not {num_results}")


def _check_indices(name: str, indices: Any, allowed: Sequence[torch.dtype]) -> None:
    """A mask picks as many elements as it has ones; integers that write may write twice to one place."""
    for index in indices if isinstance(indices, list | tuple) else ():
        if isinstance(index, torch.Tensor) and index.dtype not in allowed:
            raise ProgramError(
                f"{name} with an index of {index.dtype}; allowed are {', '.join(map(str, allowed))}"
            )


def _pieces(given: Mapping[str, Any]) -> int:
    size = _size(given)
    return max(1, -(-size // _integer(given.get("split_size"), at_least=1)))


def _chunks(given: Mapping[str, Any]) -> int:
    size, chunks = _size(given), _integer(given.get("chunks"), at_least=1)
    return max(1, -(-size // max(1, -(-size // chunks)))) if size else chunks


def _size(given: Mapping[str, Any]) -> int:
    """Of the dimension that an operator takes apart."""
    tensor = given.get("self")
    dimension = _integer(given.get("dim"))
    if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dimension < tensor.dim():
        raise ProgramError(f"there is no dimension {dimension} to take apart")
    return int(tensor.shape[dimension])


def _integer(value: Any, *, at_least: int | None = None) -> int:
    if type(value) is not int or (at_least is not None and value < at_least):
        raise ProgramError(f"{value!r} stands where a number of pieces or a dimension is needed")
    return value


_RESULTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "split.Tensor": _pieces,
    "unsafe_split.Tensor": _pieces,
    "chunk.default": _chunks,
    "unbind.int": _size,
    "tensor_split.sections": lambda given: _integer(given.get("sections"), at_least=1),
}
"""How many results there will be, asked before as many are made."""
