"""Find results that may overwrite an operand that nothing else reads.

Capture turns ``relu_`` into ``relu``: a graph has values, not memory. Run like that, a network allocates new
memory, with page faults, where the user's own code allocates none. So a step writes into its operand where
the effect is invisible: the same kernel, the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from upriver.program.graph.schema import Graph, TensorSpec, reference

_IN_PLACE: dict[str, Any] = {
    "add.Tensor": torch.ops.aten.add_.Tensor,
    "hardswish.default": torch.ops.aten.hardswish_.default,
    "hardtanh.default": torch.ops.aten.hardtanh_.default,
    "mul.Tensor": torch.ops.aten.mul_.Tensor,
    "relu.default": torch.ops.aten.relu_.default,
    "round.default": torch.ops.aten.round_.default,
    "silu.default": torch.ops.aten.silu_.default,
}
"""Element-wise operators, each with its kernel that writes into the first operand."""

_FRESH = {"add.Tensor", "div.Tensor", "mul.Tensor"}.union(
    f"{name}.default"
    for name in (
        *("_native_batch_norm_legit_no_training", "batch_norm", "group_norm", "layer_norm", "cat", "linear"),
        *("conv1d", "conv2d", "conv3d", "convolution", "addmm", "bmm", "matmul", "mm"),
    )
)
"""Operators whose first result always has memory of its own and is never a view of an argument."""


def in_place(operator: str) -> Any:
    """Return the variant of an operator that writes into its first operand.

    Raises:
        KeyError: If there is none.
    """
    return _IN_PLACE[operator]


def overwritable(graph: Graph) -> Mapping[int, str]:
    """Map each node that may write into its first operand to that operand's name.

    The operand has memory of its own and the result's exact type, shape and strides. It is read once in the
    whole graph, so no view of it exists, and no cut after this node ships it. An operand that crossed a cut
    belongs to the caller: the run must not overwrite it.
    """
    reads = Counter(name for node in graph.nodes for name in node.reads())
    reads.update(graph.stages[-1].live)
    fresh: dict[str, TensorSpec] = {}
    found: dict[int, str] = {}
    for index, node in enumerate(graph.nodes):
        result = node.outputs[0] if node.outputs else None
        name = (reference(node.args[0]) or "") if node.args else ""
        if result is None:
            continue
        dense = result.spec.span == result.spec.numel  # no two elements share memory
        if node.op in _IN_PLACE and reads[name] == 1 and fresh.get(name) == result.spec and dense:
            found[index] = name
        if node.op in _FRESH or index in found:
            fresh[result.name] = result.spec
    return found
