"""Rewrite a program so that it computes in bfloat16, and its features cross cuts in bfloat16.

Convolutions and matrix products take bfloat16, and their weights are stored so. Other operators take what
they get, and compute in float32 where they do not take a mixture. Features that cross a cut are cast, so they
take half as many bytes. A value that no layer made, such as a mask, keeps its type.
"""

from __future__ import annotations

from typing import Any

import torch

from upriver.errors import ProgramError
from upriver.program.graph.schema import Node, constants, reference
from upriver.program.rewrite.draft import Draft, Inference, call, given, reading, tensor

_LAYERS = frozenset(
    name if "." in name else f"{name}.default"
    for name in (
        *("conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding"),
        *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linear", "matmul", "mm"),
        *("bmm", "addmm", "baddbmm", "addmv", "mv", "einsum", "linalg_matmul", "inner"),
        "scaled_dot_product_attention",
    )
)
"""Operators that compute in bfloat16, as under autocast."""

_NORMS = frozenset({"layer_norm.default", "group_norm.default", "rms_norm.default"})
"""Operators whose weights must have the input's type on an accelerator."""

_LOW, _HIGH = torch.bfloat16, torch.float32


def to_bfloat16(draft: Draft) -> None:
    """Let the draft compute in bfloat16."""
    _Casting(draft).run()


class _Casting:
    def __init__(self, draft: Draft) -> None:
        self._draft, self._forms = draft, Inference(draft)
        nodes = [node for stage in draft.stages for node in stage]
        self._fixed = constants(draft.program.graph.inputs, nodes) | draft.weights.keys()
        self._now: dict[str, str] = {}  # present name of each value that was cast
        self._by_layers: set[str] = set()
        self._low_weights: dict[str, str] = {}
        self._casts: dict[tuple[str, torch.dtype], str] = {}  # in the present stage
        self._nodes: list[Node] = []

    def run(self) -> None:
        stages = self._draft.stages
        read = [{name for node in nodes for name in node.reads()} for nodes in stages]
        later = set(self._draft.outputs)
        alive: list[set[str]] = []
        for names in reversed(read):
            alive.append(set(later))
            later |= names
        made: dict[str, None] = {}
        for number, (nodes, needed) in enumerate(zip(stages, reversed(alive), strict=True)):
            self._nodes, self._casts = [], {}
            for node in nodes:
                self._add(node)
                made |= dict.fromkeys(value.name for value in node.made)
            for name in [name for name in made if name in needed]:
                self._cross(name)
            stages[number] = self._nodes
        self._draft.outputs = [self._now.get(name, name) for name in self._draft.outputs]

    def _add(self, node: Node) -> None:
        """Add a node, with casts of what it reads."""
        moved = reading(node, self._now)
        if node.op in _LAYERS:
            self._append(self._with(moved, _HIGH, _LOW))
        else:
            if node.op in _NORMS and self._type(moved.args[0]) is _LOW:
                moved = self._with(moved, _HIGH, _LOW)
            try:
                self._append(moved)
            except ProgramError:  # it does not take a mixture of types
                self._append(self._with(moved, _LOW, _HIGH))
        if node.op in _LAYERS or self._by_layers.intersection(node.reads()):
            self._by_layers.update(value.name for value in node.made)

    def _append(self, node: Node) -> None:
        self._nodes.append(self._forms.add(node))

    def _type(self, argument: Any) -> torch.dtype | None:
        name = reference(argument)
        return None if name is None else self._forms.dtype(name)

    def _with(self, node: Node, old: torch.dtype, new: torch.dtype) -> Node:
        """Return the node with its values of one type cast to another."""
        names = {name: self._cast(name, new) for name in node.reads() if self._forms.dtype(name) is old}
        mask = given(node).get("attn_mask") if new is _LOW else None
        if mask is not None and (name := reference(mask) or "") in names:
            names[name] = self._cast(self._bounded(name), new)
        return reading(node, names)

    def _cast(self, name: str, dtype: torch.dtype) -> str:
        """Return the name of a value in another type."""
        if name in self._draft.weights and dtype is _LOW:
            return self._cast_weight(name)
        known = self._casts.get((name, dtype))
        if known is None:
            word = str(dtype).removeprefix("torch.")
            known = self._casts[name, dtype] = self._draft.new_name(f"{name}_{word}")
            self._append(call("to.dtype", known, tensor(name), {"dtype": word}))
        return known

    def _cast_weight(self, name: str) -> str:
        """Return the name of a weight that is stored in bfloat16."""
        held = self._draft.weights[name]
        if name not in self._low_weights:
            key = f"{held.weight.key}.bfloat16"
            self._low_weights[name] = self._draft.add_weight(key, held.value.to(_LOW))
        return self._low_weights[name]

    def _bounded(self, mask: str) -> str:
        """Return the name of a mask whose least value bfloat16 can hold: minus infinity gives NaNs."""
        name = self._draft.new_name(f"{mask}_bounded")
        self._append(call("clamp_min.default", name, tensor(mask), torch.finfo(_LOW).min))
        return name

    def _cross(self, name: str) -> None:
        """Let a value cross the cut in bfloat16 if layers made it."""
        now = self._now.get(name, name)
        if name in self._by_layers and name not in self._fixed and self._forms.dtype(now) is _HIGH:
            self._now[name] = self._cast(now, _LOW)
