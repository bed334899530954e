"""Fold a BatchNorm in evaluation into the convolution or linear layer before it.

With stored statistics, BatchNorm multiplies each channel by a number and adds another one. Both go into the
weight and the bias of the layer, so the result needs no pass over the features of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from upriver.program.graph.schema import Node, reference
from upriver.program.rewrite.draft import Draft, given, makers, tensor

_CONVOLUTIONS = frozenset(
    f"conv{dims}d.{overload}" for dims in (1, 2, 3) for overload in ("default", "padding")
)

_NORMS = frozenset({"batch_norm.default", "_native_batch_norm_legit_no_training.default"})

_CASTS = frozenset({"to.dtype", "_to_copy.default"})


def fold(draft: Draft) -> int:
    """Fold every BatchNorm whose layer nothing else reads. Return the number of folded ones."""
    return _Folding(draft).run()


class _Folding:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        nodes = [node for stage in draft.stages for node in stage]
        self._makers = makers(nodes)
        self._reads = Counter(name for node in nodes for name in node.reads())
        self._reads.update(draft.outputs)

    def run(self) -> int:
        folded: dict[str, Node] = {}  # new layer by the name of the result that it replaces
        gone: set[str] = set()
        for node in [node for stage in self._draft.stages for node in stage]:
            layer = self._layer_before(node)
            if layer is not None:
                result, norm = layer.made[0].name, node.made[0].name
                folded[result] = self._joined(layer, node)
                gone.add(norm)
        for number, stage in enumerate(self._draft.stages):
            kept = [node for node in stage if not any(value.name in gone for value in node.made)]
            self._draft.stages[number] = [
                folded.get(node.made[0].name, node) if node.made else node for node in kept
            ]
        return len(gone)

    def _layer_before(self, node: Node) -> Node | None:
        """Return the layer that a BatchNorm can be folded into; None for any other node."""
        if node.op not in _NORMS or len(node.made) != 1 or node.outputs[0] is None:
            return None
        norm = given(node)
        layer = self._makers.get(reference(norm["input"]) or "")
        if layer is None or self._reads[reference(norm["input"]) or ""] != 1:
            return None
        is_linear = layer.op == "linear.default" and len(layer.made[0].spec.shape) == 2
        if layer.op not in _CONVOLUTIONS and not is_linear:
            return None
        args = given(layer)
        fixed = [args["weight"], args["bias"], *(norm[name] for name in _STATISTICS)]
        known = [each is None or self._value(each) is not None for each in fixed]
        has_statistics = norm["running_mean"] is not None and norm["running_var"] is not None
        return layer if all(known) and has_statistics else None

    def _value(self, argument: Any) -> torch.Tensor | None:
        """Return the weight that an argument refers to, before any cast. None if it is no weight."""
        name = reference(argument) or ""
        maker = self._makers.get(name)
        if maker is not None and maker.op in _CASTS:
            return self._value(given(maker)["self"])
        held = self._draft.weights.get(name)
        return None if held is None else held.value

    def _joined(self, layer: Node, node: Node) -> Node:
        """Return the layer with the BatchNorm in its weight and bias."""
        args, norm = given(layer), given(node)
        weight, bias = self._value(args["weight"]), self._value(args["bias"])
        assert weight is not None
        shift, scale, mean, variance = (self._value(norm[name]) for name in _STATISTICS)
        assert mean is not None and variance is not None
        factor = (variance.double() + norm["eps"]).rsqrt()
        factor = factor if scale is None else factor * scale.double()
        offset = -mean.double() if bias is None else bias.double() - mean.double()
        offset = offset * factor if shift is None else offset * factor + shift.double()
        wide = weight.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))
        name, dtype = node.made[0].name, self._dtype(args["weight"])
        new_weight = self._draft.add_weight(f"{name}.folded.weight", wide.to(dtype))
        new_bias = self._draft.add_weight(f"{name}.folded.bias", offset.to(dtype))
        return Node(
            op=layer.op,
            args=[layer.args[0], tensor(new_weight), tensor(new_bias), *layer.args[3:]],
            kwargs={key: arg for key, arg in layer.kwargs.items() if key not in ("weight", "bias")},
            outputs=[node.outputs[0]],
        )

    def _dtype(self, argument: Any) -> torch.dtype:
        """Return the type in which a layer reads its weight."""
        name = reference(argument) or ""
        if name in self._draft.weights:
            return self._draft.weights[name].stored.dtype
        dtype: torch.dtype = getattr(torch, self._makers[name].made[0].spec.dtype)
        return dtype


_STATISTICS = ("bias", "weight", "running_mean", "running_var")
