"""Rewrite linear layers so that they multiply 8-bit integers.

The weight is stored as integers with a scale for each output. Each row of the input is scaled by its own
largest value when it comes, and rounded. Products of integers are exact, so rounding is the only error.
"""

from __future__ import annotations

from typing import Any

import torch

from upriver.program.graph.schema import Node, reference
from upriver.program.rewrite.draft import Draft, call, given, tensor

LARGEST = 127.0
"""Largest 8-bit integer in use, with either sign."""

LEAST = 1e-30
"""Least scale of a row: a row of zeros must not divide by zero."""


def to_int8(draft: Draft) -> int:
    """Let linear layers multiply integers. Return their number."""
    count = 0
    for number, nodes in enumerate(draft.stages):
        made: list[Node] = []
        for node in nodes:
            layer = _LinearLayer.of(draft, node)
            made += [node] if layer is None else layer.in_int8()
            count += layer is not None
        draft.stages[number] = made
    return count


class _LinearLayer:
    """A linear layer that multiplies two float32 matrices."""

    def __init__(self, draft: Draft, node: Node, source: Any, weight: torch.Tensor, bias: Any) -> None:
        self._draft, self._source = draft, source
        self._weight, self._bias = weight, bias
        self._name = node.made[0].name
        self._nodes: list[Node] = []

    @classmethod
    def of(cls, draft: Draft, node: Node) -> _LinearLayer | None:
        """Return the layer that a node computes. None if it is no such layer."""
        if node.op == "linear.default":
            args = given(node)
            held = draft.weights.get(reference(args["weight"]) or "")
            source, bias, turned = args["input"], args["bias"], False
        elif node.op == "addmm.default":
            args = given(node)
            held = draft.weights.get(reference(args["mat2"]) or "")
            source, bias, turned = args["mat1"], args["self"], True
            if (args["beta"], args["alpha"]) != (1, 1):
                return None
        else:
            return None
        if held is None or held.stored.dtype is not torch.float32 or held.value.dim() != 2:
            return None
        if not node.made or node.made[0].spec.dtype != "float32" or len(node.made[0].spec.shape) != 2:
            return None
        return cls(draft, node, source, held.value.t() if turned else held.value, bias)

    def in_int8(self) -> list[Node]:
        """Return nodes that give nearly the layer's result."""
        scales = (self._weight.abs().amax(1) / LARGEST).clamp_min(LEAST)
        whole = (self._weight / scales.unsqueeze(1)).round().to(torch.int8)
        weight = tensor(self._draft.add_weight(f"{self._name}.int8.weight", whole))
        scale = tensor(self._draft.add_weight(f"{self._name}.int8.scale", scales))
        top = self._add("amax.default", "top", self._add("abs.default", "size", self._source), [1], True)
        unit = self._add("clamp_min.default", "unit", self._add("div.Scalar", "step", top, LARGEST), LEAST)
        ratio = self._add("div.Tensor", "ratio", self._source, unit)
        narrow = self._add("to.dtype", "int8", self._add("round.default", "whole", ratio), {"dtype": "int8"})
        product = self._add("_int_mm.default", "product", narrow, self._add("t.default", "turned", weight))
        by_row = self._add("mul.Tensor", "by_row", product, unit)
        if self._bias is None:
            return [*self._nodes, call("mul.Tensor", self._name, by_row, scale)]
        sized = self._add("mul.Tensor", "sized", by_row, scale)
        return [*self._nodes, call("add.Tensor", self._name, sized, self._bias)]

    def _add(self, op: str, hint: str, *args: Any) -> dict[str, str]:
        name = self._draft.new_name(f"{self._name}_{hint}")
        self._nodes.append(call(op, name, *args))
        return tensor(name)
