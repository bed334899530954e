"""Draw configurations for a calibration, and make calls from the drawn numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from upriver.profile.latency.op_calls import OpCall
from upriver.program.graph.schedule import ScheduledNode, Values
from upriver.program.graph.schema import Node, TensorSpec, Value

MOST_MACS = 2.5e9
"""Largest number of operations of one call: VGG's largest convolution has 1.85e9."""

MOST_ELEMENTS = 4 << 20
"""Largest number of elements of a tensor other than a weight: VGG's largest has 3.2 million."""

MOST_WEIGHTS = 104 << 20
"""Largest number of elements of a weight: VGG's first linear layer has 103 million."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from low to high, multiples of a step, drawn uniformly in their logarithm."""

    low: int
    high: int
    step: int = 1

    def draw(self, chance: random.Random) -> int:
        """Draw one number."""
        drawn = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        return min(max(round(drawn / self.step) * self.step, self.low), self.high)


Choices: TypeAlias = Mapping[str, Sequence[Any]]
"""Values and spans to draw from, by name."""

Draw: TypeAlias = Mapping[str, Any]
"""Drawn values, by name."""

Make: TypeAlias = Callable[[Draw], OpCall | None]
"""Function that makes the call of a draw; None where no network makes such a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Configurations of one kind.

    Attributes:
        count: Number of measured configurations.
    """

    count: int
    choices: Choices
    make: Make

    def draw(self, chance: random.Random) -> OpCall | None:
        """Draw one configuration; None where no network makes such a call."""
        drawn = {}
        for name, among in self.choices.items():
            chosen = chance.choice(among)
            drawn[name] = chosen.draw(chance) if isinstance(chosen, Span) else chosen
        return self.make(drawn)


def tensor(shape: Sequence[int], order: Sequence[int] | None = None, dtype: str = "float32") -> TensorSpec:
    """Return the spec of a tensor whose dimensions lie in memory in this order, outermost first."""
    stride, step = [0] * len(shape), 1
    for dimension in reversed(order or range(len(shape))):
        stride[dimension] = step
        step *= shape[dimension]
    return TensorSpec(dtype=dtype, shape=list(shape), stride=stride)


def call_on(
    op: str,
    args: Sequence[Any],
    given: Mapping[str, TensorSpec],
    weights: Mapping[str, TensorSpec] | None = None,
    *,
    in_place: bool = False,
) -> OpCall | None:
    """Make a call on these tensors, with the operator's own results; None if one is too large or empty.

    Args:
        op: Operator and overload.
        args: Arguments as in a graph; a string stands for the tensor of that name.
        given: Specs of the operands that are not weights, by name.
    """
    weights = weights or {}
    fits = all(0 < spec.numel <= MOST_ELEMENTS for spec in given.values())
    if not fits or any(spec.numel > MOST_WEIGHTS for spec in weights.values()):
        return None
    read = {**given, **weights}
    encoded = [_encoded(each, read) for each in args]
    values: Values = {name: spec.empty("cpu") for name, spec in read.items()}
    step = ScheduledNode(0, Node(op=op, args=encoded, kwargs={}, outputs=[None]), {}, torch.device("cpu"))
    made = [
        Value(name=f"made{place}", spec=TensorSpec.of(result))
        for place, result in enumerate(step.call(values))
    ]
    if not all(0 < value.spec.numel <= MOST_ELEMENTS for value in made):
        return None
    return OpCall(
        node=Node(op=op, args=encoded, kwargs={}, outputs=list(made)),
        specs={**read, **{value.name: value.spec for value in made}},
        fixed=frozenset(weights),
        in_place=in_place,
    )


def _encoded(argument: Any, names: Mapping[str, TensorSpec]) -> Any:
    if isinstance(argument, str) and argument in names:
        return {"tensor": argument}
    return [_encoded(each, names) for each in argument] if isinstance(argument, list) else argument
