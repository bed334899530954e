"""Describe one operator call by the forms of its operands and results: all that its seconds can depend on."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from upriver.program.graph.buffer_reuse import overwritable
from upriver.program.graph.operators import resolve
from upriver.program.graph.schema import (
    Graph,
    Node,
    TensorSpec,
    Value,
    Weight,
    constants,
    reference,
    references,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCall:
    """A node and the tensors around it, without their data.

    Attributes:
        specs: Form of each tensor that the node reads or makes, by name.
        fixed: Names among them that are weights or constants.
        in_place: Whether the result overwrites the first operand.
    """

    node: Node
    specs: Mapping[str, TensorSpec]
    fixed: Collection[str] = frozenset()
    in_place: bool = False

    @property
    def name(self) -> str:
        """Name of the operator without its overload."""
        return self.node.op.partition(".")[0]

    @property
    def arguments(self) -> dict[str, Any]:
        """Each argument by name as in the graph, with the defaults of omitted ones."""
        names, defaults = _signature(self.node.op)
        return defaults | dict(zip(names, self.node.args, strict=False)) | self.node.kwargs

    @property
    def read(self) -> tuple[str, ...]:
        """Names of the tensors that the call reads, each once."""
        return tuple(dict.fromkeys(references([self.node.args, self.node.kwargs])))

    @property
    def made(self) -> list[TensorSpec]:
        """Forms of the results that are used."""
        return [output.spec for output in self.node.outputs if output is not None]

    def spec(self, argument: Any) -> TensorSpec | None:
        """Return the form of an argument that is a tensor, else None."""
        name = reference(argument)
        return self.specs[name] if name is not None else None

    @property
    def signature(self) -> str:
        """SHA-256 of all that the call's seconds depend on, equal in every graph with such a call."""
        names = {name: f"%{number}" for number, name in enumerate(self.read)}
        weights = [names[name] for name in self.read if name in self.fixed]
        forms = [self.specs[name] for name in self.read]
        arguments = _renamed([self.node.args, self.node.kwargs], names)
        facts = [self.node.op, arguments, forms, self.made, weights, self.in_place]
        return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def calls(graph: Graph) -> Iterator[OpCall | None]:
    """Yield each node as a call; None for a node that runs once, when a program is bound."""
    given: list[Value | Weight] = [*graph.inputs, *graph.weights]
    specs = {value.name: value.spec for value in given}
    weights = frozenset(weight.name for weight in graph.weights)
    computed = constants(graph.inputs, graph.nodes)
    fixed, over = weights | computed, overwritable(graph)
    for index, node in enumerate(graph.nodes):
        made = {output.name: output.spec for output in node.outputs if output is not None}
        specs |= made
        if computed.issuperset(made):
            yield None
            continue
        around = {*made, *references([node.args, node.kwargs])}
        yield OpCall(
            node=node,
            specs={name: specs[name] for name in around},
            fixed=around & fixed,
            in_place=index in over and over[index] not in fixed,
        )


@functools.cache
def _signature(op: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments, and their default values."""
    arguments = resolve(op)._schema.arguments
    return tuple(each.name for each in arguments), {
        each.name: each.default_value if each.has_default_value() else None for each in arguments
    }


def _renamed(argument: Any, names: Mapping[str, str]) -> Any:
    name = reference(argument)
    if name is not None:
        return {"tensor": names[name]}
    if isinstance(argument, dict):
        return {key: _renamed(value, names) for key, value in sorted(argument.items())}
    if isinstance(argument, list):
        return [_renamed(item, names) for item in argument]
    return argument


# ------------------------------------------------------------------------------------------- forms


def in_order(spec: TensorSpec) -> TensorSpec:
    """Return the contiguous spec of the same shape and type."""
    shape = spec.shape
    return TensorSpec(
        dtype=spec.dtype, shape=shape, stride=[math.prod(shape[d + 1 :]) for d in range(len(shape))]
    )


def is_contiguous(spec: TensorSpec) -> bool:
    """Return whether the elements are contiguous."""
    return spec.numel == 0 or is_same_layout(spec, in_order(spec))


def is_same_layout(one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether two tensors of one shape have the same layout in memory."""
    steps = zip(one.shape, one.stride, other.stride, strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in steps)


def is_view(spec: TensorSpec, shape: Sequence[int]) -> bool:
    """Return whether a tensor can take another shape without a copy, by torch's rule."""
    if spec.numel == 0:
        return True
    stretches: list[list[int]] = []  # runs of dimensions walked as one, innermost first
    for size, step in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if stretches and step == math.prod(stretches[-1]):
            stretches[-1][0] *= size
        elif size != 1:
            stretches.append([size, step])
    wanted = [size for size in shape if size != 1]
    for elements, _ in stretches:
        reached = 1
        while reached < elements and wanted:
            reached *= wanted.pop()
        if reached != elements:
            return False
    return True


def run_length(made: TensorSpec, read: Sequence[TensorSpec]) -> int:
    """Return the number of elements that a loop passes without a jump, in the result and each operand.

    A broadcast operand may stand still meanwhile.
    """
    steps = [_steps_along(spec, len(made.shape)) for spec in read]
    still: list[bool] = []
    run = 1
    for d in sorted(range(len(made.shape)), key=lambda d: made.stride[d]):
        if made.shape[d] == 1:
            continue
        here = [of_one[d] for of_one in steps]
        if run == 1:
            still = [step == 0 for step in here]
        wanted = [0 if stands else run for stands in still]
        if made.stride[d] != run or here != wanted:
            break
        run *= made.shape[d]
    return run


def _steps_along(spec: TensorSpec, dimensions: int) -> list[int]:
    """Return a tensor's strides along the dimensions of a result that it is broadcast to."""
    steps = [step if size != 1 else 0 for size, step in zip(spec.shape, spec.stride, strict=True)]
    return [0] * (dimensions - len(steps)) + steps


def image(spec: TensorSpec, dimensions: int) -> tuple[int, int, list[int]]:
    """Return samples, channels and spatial sizes of a tensor; samples may be missing."""
    ahead = spec.shape[: len(spec.shape) - dimensions]
    return math.prod(ahead[:-1]), ahead[-1], spec.shape[len(ahead) :]


def each_of(value: Any, count: int) -> list[int]:
    """Return a number for each dimension, where one may stand for all."""
    numbers = value if isinstance(value, list) else [value]
    return [int(number) for number in numbers] if len(numbers) == count else [int(numbers[0])] * count
