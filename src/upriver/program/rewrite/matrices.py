"""Rewrite linear layers over several dimensions as one product of two matrices.

Where the input does not lie in memory row after row, as in attention with the batch second, the operator
copies the weight for each part of the input. Copying the input once takes less time.
"""

from __future__ import annotations

from upriver.program.graph.schema import Node, TensorSpec, Value, reference
from upriver.program.rewrite.draft import Draft, call, given, tensor


def to_matrices(draft: Draft) -> None:
    """Let linear layers read and write two dimensions. Let views copy where the order of elements differs."""
    for number, nodes in enumerate(draft.stages):
        draft.stages[number] = [each for node in nodes for each in _flat(draft, node)]


def _flat(draft: Draft, node: Node) -> list[Node]:
    if node.op == "view.default":
        return [Node(op="reshape.default", args=node.args, kwargs=node.kwargs, outputs=node.outputs)]
    shape = node.made[0].spec.shape if node.op == "linear.default" and node.made else []
    weight = draft.weights.get(reference(given(node)["weight"]) or "") if len(shape) > 2 else None
    if weight is None or weight.value.dim() != 2:
        return [node]
    args, made = given(node), node.made[0]
    rows, product = (draft.new_name(f"{made.name}_{part}") for part in ("rows", "product"))
    outputs, inputs = weight.value.shape
    spec = TensorSpec(dtype=made.spec.dtype, shape=[made.spec.numel // outputs, outputs], stride=[outputs, 1])
    return [
        call("reshape.default", rows, args["input"], [-1, inputs]),
        Node(
            op=node.op,
            args=[tensor(rows), args["weight"], args["bias"]],
            kwargs={},
            outputs=[Value(name=product, spec=spec)],
        ),
        Node(op="reshape.default", args=[tensor(product), list(shape)], kwargs={}, outputs=[made]),
    ]
