"""Rewrite two-dimensional convolutions so that they read and write features with the channels last.

The fast kernels hold channels together. From features in the usual order they copy each time, in and out.
A weight in the other order suffices: the convolution then writes its result so, and the next one reads it so.
Features leave the program in their usual order.
"""

from __future__ import annotations

import torch

from upriver.program.graph.schema import Node, reference
from upriver.program.rewrite.draft import Draft, Inference, call, given, tensor

_CONVOLUTIONS = frozenset({"conv2d.default", "conv2d.padding"})


def to_channels_last(draft: Draft) -> None:
    """Store the weights of convolutions with the channels last, and put the outputs back in order."""
    moved: dict[str, str] = {}
    for nodes in draft.stages:
        nodes[:] = [_moved(draft, node, moved) for node in nodes]
    if moved:
        _restore_outputs(draft)


def _moved(draft: Draft, node: Node, moved: dict[str, str]) -> Node:
    if node.op == "view.default":  # needs a certain order of elements, which reshape makes
        return Node(op="reshape.default", args=node.args, kwargs=node.kwargs, outputs=node.outputs)
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


def _restore_outputs(draft: Draft) -> None:
    """Give each output the strides that it has in the program that the draft began as."""
    forms = Inference(draft)
    for node in [node for nodes in draft.stages for node in nodes]:
        forms.add(node)
    before = {value.name: value.spec for value in draft.program.live(draft.program.num_stages)}
    for place, (name, spec) in enumerate(zip(draft.outputs, before.values(), strict=True)):
        usual = spec.empty("meta").is_contiguous()
        if usual and not forms.is_contiguous(name):
            draft.outputs[place] = draft.new_name(f"{name}_contiguous")
            draft.stages[-1] = [
                *draft.stages[-1],
                call("contiguous.default", draft.outputs[place], tensor(name)),
            ]
