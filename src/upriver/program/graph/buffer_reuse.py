"""Which results may be written over an operand that nothing else reads.

Capture turns ``relu_`` into ``relu``: a graph has values, not memory. Run like that, a network takes new
memory, and the page faults that come with it, where the user's own code takes none. So a step writes into its
operand again where nobody can tell: the same kernel, the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from upriver.program.graph.schema import Graph, TensorSpec, reference, references

_IN_PLACE: dict[str, Any] = {
    "add.Tensor": torch.ops.aten.add_.Tensor,
    "hardswish.default": torch.ops.aten.hardswish_.default,
    "hardtanh.default": torch.ops.aten.hardtanh_.default,
    "mul.Tensor": torch.ops.aten.mul_.Tensor,
    "relu.default": torch.ops.aten.relu_.default,
    "silu.default": torch.ops.aten.silu_.default,
}
"""Element-wise operators to the same kernel that writes into its first operand."""

_FRESH = frozenset(
    {
        "_native_batch_norm_legit_no_training.default",
        "add.Tensor",
        "addmm.default",
        "batch_norm.default",
        "bmm.default",
        "cat.default",
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "convolution.default",
        "group_norm.default",
        "layer_norm.default",
        "linear.default",
        "matmul.default",
        "mm.default",
        "mul.Tensor",
    }
)
"""Operators whose first result is memory of its own on every path, never a view of an argument."""


def in_place(operator: str) -> Any:
    """The operator that writes into its first operand instead.

    Raises:
        KeyError: If there is none.
    """
    return _IN_PLACE[operator]


def overwritable(graph: Graph) -> Mapping[int, str]:
    """Index of each node that may write into its first operand, to that operand's name.

    The operand is memory of its own, of the result's very form, and read once in the whole graph: no view of
    it exists, and no cut after this node ships it. Where it crossed a cut to get here, it belongs to the
    caller: a run has to see to that.
    """
    reads = Counter(name for node in graph.nodes for name in references([node.args, node.kwargs]))
    reads.update(graph.stages[-1].live)
    fresh: dict[str, TensorSpec] = {}
    found: dict[int, str] = {}
    for index, node in enumerate(graph.nodes):
        result, name = node.outputs[0] if node.outputs else None, _first_operand(node.args)
        if result is None:
            continue
        if (
            node.op in _IN_PLACE
            and reads[name] == 1
            and fresh.get(name) == result.spec
            and _dense(result.spec)
        ):
            found[index] = name
        if node.op in _FRESH or index in found:
            fresh[result.name] = result.spec
    return found


def _first_operand(args: Sequence[Any]) -> str:
    """Its name; empty where it is no tensor of the graph."""
    return (reference(args[0]) or "") if args else ""


def _dense(spec: TensorSpec) -> bool:
    """No two elements share memory."""
    return spec.span == spec.numel
