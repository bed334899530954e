"""Refuse calls of allowed operators whose arguments make a harmless operator harmful."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeAlias

import torch

from upriver.errors import ProgramError
from upriver.program.graph.kernel_validator import check_kernel

_MUST_BE: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention.default": {"dropout_p": 0},  # else random
    "batch_norm.default": {"training": False},  # else it writes into its running statistics
    "index_put.default": {"accumulate": False},  # else the order of additions is undefined
}
"""Required values of arguments that could make an allowed operator random, mutating or irreproducible."""

_INDICES: dict[str, tuple[torch.dtype, ...]] = {
    "index.Tensor": (torch.int64, torch.int32),
    "index_put.default": (torch.bool,),
}
"""Types of index allowed for an operator. A mask selects as many elements as it has ones, so the result's
size depends on data. Integers may name one element twice, and then the order of writes is undefined."""


MAX_INTEGER = (1 << 31) - 1
"""Maximum of a size, padding or stride. Two of them times the largest tensor's size fit 64 bits."""

_TO_THE_END = frozenset({"slice.Tensor", "slice_scatter.default"})
"""Operators for which the largest integer means the end of a dimension."""


@functools.cache
def operator_of(name: str) -> Any:
    """Return the ATen operator called ``<operator>.<overload>``, allowed or not.

    Raises:
        AttributeError: If this version of torch has none.
    """
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload)


Check: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Argument:
    """One argument of an operator.

    Attributes:
        kind: Its type as signatures write it.
    """

    name: str
    kind: str
    fits: Check
    default: Any


@functools.cache
def _signature(name: str) -> tuple[_Argument, ...]:
    return tuple(
        _Argument(
            name=each.name,
            kind=str(each.real_type),
            fits=_checker(str(each.real_type), fixed_size=each.N is not None),
            default=each.default_value if each.has_default_value() else None,
        )
        for each in operator_of(name)._schema.arguments
    )


_TYPES: dict[str, type | UnionType] = {
    "Tensor": torch.Tensor | int | float,  # a number becomes a tensor of no dimensions
    "int": int,
    "float": int | float,
    "number": int | float,
    "bool": bool,
    "str": str,
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}


def _checker(kind: str, *, fixed_size: bool = False) -> Check:
    """Return a strict check of whether a value is of a type.

    Torch accepts an integer as a type, a layout or a memory format. An integer without a meaning ends the
    process.
    """
    if kind.startswith("Optional["):
        inner = _checker(kind.removeprefix("Optional[")[:-1], fixed_size=fixed_size)
        return lambda value: value is None or inner(value)
    if kind.startswith("List["):
        each = _checker(kind.removeprefix("List[")[:-1])
        # Where a signature gives a list's length, one number stands for the whole list.
        return lambda value: all(map(each, value)) if isinstance(value, list) else fixed_size and each(value)
    wanted = _TYPES.get(kind)
    return lambda value: wanted is not None and isinstance(value, wanted)


def check_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call that makes an allowed operator random, or lets it write into its arguments.

    Args:
        args: Arguments as the operator receives them, or as a graph file holds them.

    Raises:
        ProgramError: Naming the argument.
    """
    given = arguments_by_name(name, args, kwargs)
    for argument, wanted in _MUST_BE.get(name, {}).items():
        if given.get(argument) != wanted:
            raise ProgramError(
                f"{argument} of {name} must be {wanted!r}, got {given.get(argument)!r}: a program holds "
                "nothing random and nothing that writes into its arguments"
            )
    if given.get("pin_memory"):
        raise ProgramError(f"{name} with pin_memory: a program does not choose where its memory lies")
    if name == "instance_norm.default" and given["use_input_stats"] and given["running_mean"] is not None:
        raise ProgramError(f"{name} writes into its running statistics")


def check_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, num_results: int) -> None:
    """Check the arguments of a call, tensors included, against the operator's signature.

    Raises:
        ProgramError: If an argument is of another type, a result's size depends on data, or the number of
            results differs.
    """
    signature = _signature(name)
    by_name = {argument.name: argument for argument in signature}
    if len(args) > len(signature) or not by_name.keys() >= kwargs.keys():
        raise ProgramError(f"{name} takes the arguments {', '.join(by_name)}")
    for argument, value in [
        *zip(signature, args, strict=False),
        *((by_name[k], v) for k, v in kwargs.items()),
    ]:
        if not argument.fits(value):
            raise ProgramError(f"{argument.name} of {name} is a {argument.kind}, got {type(value).__name__}")
    given = arguments_by_name(name, args, kwargs)
    if name not in _TO_THE_END:
        _check_integers(name, given)
    check_kernel(name, given)
    if name in _INDICES:
        _check_indices(name, given["indices"], _INDICES[name])
    if name in _RESULTS and (results := _RESULTS[name](given)) != num_results:
        raise ProgramError(f"{name} gives {results} results, not {num_results}")


def _check_integers(name: str, given: Mapping[str, Any]) -> None:
    """Raise if an integer is too large. Some kernels multiply integers without noticing an overflow."""
    for argument in _signature(name):
        if "int" in argument.kind:
            value = given[argument.name]
            for number in value if isinstance(value, list) else [value]:
                if number is not None and abs(number) > MAX_INTEGER:
                    raise ProgramError(
                        f"{argument.name} of {name} is {number}, at most {MAX_INTEGER} is allowed"
                    )


def arguments_by_name(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of an operator by name, with defaults for missing ones."""
    signature = _signature(name)
    given = {argument.name: value for argument, value in zip(signature, args, strict=False)}
    return {argument.name: argument.default for argument in signature} | given | dict(kwargs)


def _check_indices(name: str, indices: Sequence[torch.Tensor | None], allowed: Sequence[torch.dtype]) -> None:
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype not in allowed:
            raise ProgramError(
                f"{name} with an index of {index.dtype}; allowed are {', '.join(map(str, allowed))}"
            )


def _pieces(given: Mapping[str, Any]) -> int:
    return max(1, -(-_size(given) // _positive(given["split_size"])))


def _chunks(given: Mapping[str, Any]) -> int:
    size, chunks = _size(given), _positive(given["chunks"])
    return -(-size // -(-size // chunks)) if size else chunks


def _size(given: Mapping[str, Any]) -> int:
    """Return the size of the dimension that an operator splits."""
    tensor, dimension = given["self"], given["dim"]
    if not isinstance(tensor, torch.Tensor) or not -tensor.dim() <= dimension < tensor.dim():
        raise ProgramError(f"there is no dimension {dimension} to take apart")
    return int(tensor.shape[dimension])


def _positive(value: int) -> int:
    if value < 1:
        raise ProgramError(f"{value} is no number of pieces")
    return value


_RESULTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "split.Tensor": _pieces,
    "unsafe_split.Tensor": _pieces,
    "chunk.default": _chunks,
    "unbind.int": _size,
    "tensor_split.sections": lambda given: _positive(given["sections"]),
}
"""Functions that return the number of results before any is made."""
