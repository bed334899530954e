"""Convert a ``torch.export`` recording to nodes, weights, module calls and problems.

No operator is refused here. An operator that no program may hold stays in its place, with the reason. So the
cuts before it can be listed and used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from upriver.errors import CaptureError, ProgramError
from upriver.program.capture.export import ROOT, export
from upriver.program.capture.nodes import flops_of, is_operator, merge_parts, node_of, place_of, where
from upriver.program.example_inputs import Example, TensorSource
from upriver.program.freeze import check_initialized
from upriver.program.graph.liveness import Chain
from upriver.program.graph.schema import Node, TensorSpec, Value, Weight, constants
from upriver.program.tensor_layouts import refusing, unusual


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A recorded pass.

    Attributes:
        first: Number of operators that lead to the tensors requested as ``first``.
        weights: Weights that the operators read, in the order of the first read.
        tensors: Tensors by key in the weights file.
        sizes: Bytes of each value.
        flops: Floating-point operations of each node, for the whole micro-batch.
        problems: Maps the index of a node to the reason why no program may hold it.
        mutated: Maps the index of a node to the module whose buffer it changes.
        answers: Names of the tensors of the model's result, in order, if the whole model was recorded. A
            repeated tensor stands here twice, unlike among the outputs of ``chain``.
    """

    micro_batch: int
    chain: Chain
    first: int
    weights: Sequence[Weight]
    tensors: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    flops: Sequence[float]
    problems: Mapping[int, str]
    mutated: Mapping[int, str]
    answers: Sequence[str] = ()


def record(
    model: nn.Module,
    example: Example,
    *,
    outputs: Sequence[TensorSource] | None = None,
    first: Sequence[TensorSource] = (),
    autocast: torch.dtype | None = None,
) -> Recording:
    """Record a model in eval up to ``outputs``. Without them, record the whole model.

    Args:
        first: Tensors whose operators run before all others.

    Raises:
        CaptureError: If torch cannot record it.
        ModelError: If a parameter is not initialized yet.
    """
    check_initialized(model)
    sources = [*first, *(outputs or ())]
    with refusing("the model cannot be captured"):
        exported, notes = export(model, example, sources, whole=outputs is None, autocast=autocast)
        counts = {"num_first": len(first), "num_sources": len(sources), "num_answers": notes.num_answers}
        return _Reader(exported, **counts).read(example.samples)


class _Reader:
    def __init__(
        self, exported: torch.export.ExportedProgram, *, num_first: int, num_sources: int, num_answers: int
    ) -> None:
        merge_parts(exported.graph)
        self._exported = exported
        self._by_name = {fx.name: fx for fx in exported.graph.nodes}
        self._fixed = _targets(exported)
        self._mutations = _mutations(exported)
        given = [name for name in exported.graph_signature.user_outputs if isinstance(name, str)]
        self._first = [self._original(name, copies=2) for name in given[:num_first]]
        self._outputs: list[str] = []
        for name in given[num_first:num_sources]:
            forms = (self._original(name, copies=2), self._original(name, copies=1), name)
            taken = {*self._outputs, *self._fixed}
            self._outputs.append(next(form for form in forms if form not in taken))
        answers = given[num_sources : num_sources + num_answers]
        originals = [self._original(name, copies=1) for name in answers]
        self._answers = [
            name if original in self._fixed else original
            for name, original in zip(answers, originals, strict=True)
        ]
        self._outputs += self._answers
        self._outputs = list(dict.fromkeys(self._outputs))
        self._cached = [self._original(name, copies=1) for name in given[num_sources + num_answers :]]
        if not num_answers:
            self._forget_mutations_beside()

    def _forget_mutations_beside(self) -> None:
        """Drop the changes of buffers that the prefix does not read. The tail makes these changes."""
        needed = self._needed([*self._first, *self._outputs])
        read = {self._fixed[fx.name][1] for fx in needed if fx.name in self._fixed}
        self._mutations = {name: target for name, target in self._mutations.items() if target in read}

    def read(self, micro_batch: int) -> Recording:
        early = self._needed(self._first)
        needed = self._needed([*self._first, *self._outputs, *self._mutations, *self._cached])
        ordered = [fx for fx in self._exported.graph.nodes if fx in needed and is_operator(fx)]
        ordered.sort(key=lambda fx: fx not in early)  # stable: each part stays in execution order
        problems: dict[int, str] = {}
        nodes: list[Node] = []
        for index, fx in enumerate(ordered):
            node, why_not = node_of(fx, needed)
            nodes.append(node)
            if why_not:
                problems[index] = f"{where(place_of(fx))} {why_not}"
        mutated = self._note_mutations(ordered, problems)
        self._note_caches(nodes, problems)
        weights, tensors = self._weights(dict.fromkeys(name for node in nodes for name in node.reads()))
        inputs = self._inputs()
        chain = Chain(
            inputs=inputs,
            nodes=nodes,
            places=[place_of(fx) for fx in ordered],
            outputs=self._outputs,
            weights=frozenset(self._fixed),
        )
        return Recording(
            micro_batch=micro_batch,
            chain=chain,
            first=sum(fx in early for fx in ordered),
            weights=weights,
            tensors=tensors,
            sizes={
                value.name: value.spec.nbytes
                for value in [*inputs, *(v for node in nodes for v in node.made)]
            },
            flops=self._all_flops(ordered, nodes, problems),
            problems=problems,
            mutated=mutated,
            answers=tuple(self._answers),
        )

    def _original(self, name: str, *, copies: int) -> str:
        """Return the name that the wrapper copied. One copy stays if an output is a weight or repeats."""
        for _ in range(copies):
            fx = self._by_name[name]
            if fx.target is torch.ops.aten.clone.default and isinstance(fx.args[0], torch.fx.Node):
                name = fx.args[0].name
        return name

    def _needed(self, names: Iterable[str]) -> set[torch.fx.Node]:
        found: set[torch.fx.Node] = set()
        todo = [self._by_name[name] for name in names if name in self._by_name]
        while todo:
            fx = todo.pop()
            if fx not in found:
                found.add(fx)
                todo += fx.all_input_nodes
        return found

    def _inputs(self) -> list[Value]:
        wanted = set(self._exported.graph_signature.user_inputs)
        found = [fx for fx in self._exported.graph.nodes if fx.op == "placeholder" and fx.name in wanted]
        try:
            return [Value(name=fx.name, spec=TensorSpec.of(fx.meta["val"])) for fx in found]
        except ProgramError as error:
            raise CaptureError(f"the model's input: {error}") from error

    def _note_mutations(self, ordered: Sequence[torch.fx.Node], problems: dict[int, str]) -> dict[int, str]:
        """Mark the first operator that may take part in changing a buffer as a problem.

        The graph shows only the buffer's last value. So every operator of its module counts, and every
        operator that reads it.
        """
        mutated: dict[int, str] = {}
        for name, target in self._mutations.items():
            module, _, buffer = target.removeprefix(f"{ROOT}.").rpartition(".")
            names = {weight for weight, (_, each) in self._fixed.items() if each == target}
            touching = {self._by_name[name]}
            touching |= {
                fx for fx in self._needed([name]) if any(read.name in names for read in fx.all_input_nodes)
            }
            where = [
                index
                for index, fx in enumerate(ordered)
                if fx in touching or module in {path for _, path in place_of(fx)}
            ]
            index = min(where, default=0)
            mutated[index] = module
            owner = f"of module {module!r}" if module else "of the model"
            problems[index] = f"the model changes buffer {buffer!r} {owner} while it runs"
        return mutated

    def _note_caches(self, nodes: Sequence[Node], problems: dict[int, str]) -> None:
        made = {value.name: index for index, node in enumerate(nodes) for value in node.made}
        for index in sorted(made[name] for name in self._cached if name in made)[:1]:
            problems.setdefault(
                index,
                "the model keeps a cache of keys and values that modules on both sides of a cut write into; "
                "switch it off (use_cache=False)",
            )

    def _all_flops(
        self, ordered: Sequence[torch.fx.Node], nodes: Sequence[Node], problems: Mapping[int, str]
    ) -> list[float]:
        """Return the operations of each node. A node computed once, when a program is bound, counts zero."""
        fixed = constants(self._inputs(), nodes)
        varies = [not fixed.issuperset(value.name for value in node.made) for node in nodes]
        return [
            flops_of(fx) if varies[index] and index not in problems else 0.0
            for index, fx in enumerate(ordered)
        ]

    def _weights(self, order: Iterable[str]) -> tuple[list[Weight], dict[str, torch.Tensor]]:
        weights: list[Weight] = []
        tensors: dict[str, torch.Tensor] = {}
        keys: dict[tuple[Any, ...], str] = {}
        for name in order:
            if name not in self._fixed:
                continue
            key, tensor = self._weight(name)
            owner = key.rpartition(".")[0] if self._fixed[name][0] is not InputKind.CONSTANT_TENSOR else ""
            if kind := unusual(tensor):
                raise CaptureError(
                    f"weight {key!r} is {kind}, which no program may hold", module=owner or None
                )
            identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            key = keys.setdefault(identity, key)  # tied weights are stored once
            try:
                weights.append(Weight(name=name, key=key, spec=TensorSpec.of(tensor)))
            except ProgramError as error:
                raise CaptureError(f"weight {key!r}: {error}", module=owner or None) from error
            tensors[key] = as_stored(tensor, weights[-1].spec)
        return weights, tensors

    def _weight(self, name: str) -> tuple[str, torch.Tensor]:
        kind, target = self._fixed[name]
        tensor = self._exported.state_dict.get(target, self._exported.constants.get(target))
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"constant {target!r} is no tensor")
        if kind is InputKind.CONSTANT_TENSOR and not unusual(tensor):
            return f"constant.{_content(tensor)}", tensor  # the same name in every program that holds it
        return target.removeprefix(f"{ROOT}."), tensor


def _targets(exported: torch.export.ExportedProgram) -> dict[str, tuple[InputKind, str]]:
    """Return kind and export's name of each weight, by its name in the graph."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return {
        spec.arg.name: (spec.kind, spec.target)
        for spec in exported.graph_signature.input_specs
        if spec.kind in kinds and spec.target is not None
    }


def _mutations(exported: torch.export.ExportedProgram) -> dict[str, str]:
    """Map each value that overwrites a buffer or a parameter to the name of that buffer or parameter."""
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
    return {
        spec.arg.name: str(spec.target)
        for spec in exported.graph_signature.output_specs
        if spec.kind in kinds
    }


def as_stored(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a weight as the file holds it: one with gaps or repetitions as the storage range it spans."""
    if spec.span == spec.numel:
        return tensor
    places = torch.arange(spec.span, device=tensor.device).as_strided(spec.shape, spec.stride).reshape(-1)
    stretch = tensor.new_zeros(spec.span)
    stretch[places] = tensor.detach().reshape(-1)
    return stretch


def _content(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1)
    form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode()
    digest = hashlib.sha256(form)
    if data.numel():
        digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
