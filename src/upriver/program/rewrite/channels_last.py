"""Rewrite two-dimensional convolutions so that they read and write features with the channels last.

The fast kernels hold channels together. From features in the usual order they copy each time, in and out.
A weight in the other order suffices: the convolution then writes its result so, and the next one reads it so.
"""

from __future__ import annotations

import torch

from upriver.program.graph.schema import Node, reference
from upriver.program.rewrite.draft import Draft, given, tensor

_CONVOLUTIONS = frozenset({"conv2d.default", "conv2d.padding"})


def to_channels_last(draft: Draft) -> None:
    """Store the weights of convolutions with the channels last."""
    moved: dict[str, str] = {}
    for nodes in draft.stages:
        nodes[:] = [_moved(draft, node, moved) for node in nodes]


def _moved(draft: Draft, node: Node, moved: dict[str, str]) -> Node:
    name = reference(given(node)["weight"]) if node.op in _CONVOLUTIONS else None
    held = draft.weights.get(name or "")
    if held is None or name is None or held.value.dim() != 4:
        return node
    if name not in moved:
        value = held.value.contiguous(memory_format=torch.channels_last)
        moved[name] = draft.add_weight(f"{held.weight.key}.channels_last", value)
    return Node(
        op=node.op,
        args=[node.args[0], tensor(moved[name]), *node.args[2:]],
        kwargs=node.kwargs,
        outputs=node.outputs,
    )
