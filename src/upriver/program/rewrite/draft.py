"""Hold a program's nodes while they are rewritten, and make a program of them again.

A draft keeps the stages of its program, so a cut keeps its number and its name. The forms of values, the
values that cross a cut, and the costs of stages are derived anew at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from upriver.program.capture.prefix import bound
from upriver.program.eval_mode import no_fast_path
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.call_validator import arguments_by_name
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import ActivationMemory, Chain, lifetimes_of, live_at
from upriver.program.graph.operators import fingerprints
from upriver.program.graph.schedule import Values, bind
from upriver.program.graph.schema import Graph, Node, Stage, TensorSpec, Value, Weight
from upriver.program.graph.validator import silent
from upriver.program.graph.weights_file import WeightsFile, storage_order

UNKNOWN = TensorSpec(dtype="float32", shape=[], stride=[])
"""Form of a result before it is inferred."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeight:
    """A weight and its elements: as in the weights file, and in the form in which nodes read it."""

    weight: Weight
    stored: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        """The weight as nodes read it."""
        spec = self.weight.spec
        return self.stored.reshape(-1).as_strided(spec.shape, spec.stride)


class Draft:
    """Nodes of a program by stage, with its weights.

    Attributes:
        program: The program that the draft began as.
        stages: Nodes of each stage, in order. Forms of results may be out of date.
        outputs: Names of the values at the last cut, in order.
        weights: Weights by name. Those that no node reads are left out in the end.
    """

    def __init__(self, program: Program) -> None:
        graph = program.graph
        self.program = program
        self.outputs = list(graph.stages[-1].live)
        starts = [0, *(stage.stop for stage in graph.stages)]
        self.stages = [graph.nodes[a:b] for a, b in pairwise(starts)]
        self.weights = {
            weight.name: HeldWeight(weight=weight, stored=program.weight_tensors[weight.key])
            for weight in graph.weights
        }
        self._names = {value.name for value in graph.inputs} | self.weights.keys()
        self._names |= {value.name for node in graph.nodes for value in node.made}

    def new_name(self, hint: str) -> str:
        """Return a name that no value has yet."""
        name, count = hint, 0
        while name in self._names:
            count += 1
            name = f"{hint}_{count}"
        self._names.add(name)
        return name

    def add_weight(self, key: str, tensor: torch.Tensor) -> str:
        """Add a weight without gaps between its elements, and return its name."""
        tensor = tensor.detach()
        name = self.new_name(re.sub(r"\W", "_", key))
        weight = Weight(name=name, key=key, spec=TensorSpec.of(tensor))
        self.weights[name] = HeldWeight(weight=weight, stored=storage_order(tensor))
        return name

    def finish(self) -> Program:
        """Return the program of these nodes.

        Raises:
            CaptureError: If no reader would take it.
            ProgramError: If an operator does not take its arguments.
        """
        self._drop_unread()
        forms = Inference(self)
        nodes = [forms.add(node) for nodes in self.stages for node in nodes]
        nodes += [forms.add(node) for node in self._restore_strides(forms)]
        read = dict.fromkeys(name for node in nodes for name in node.reads())
        held = [self.weights[name] for name in read if name in self.weights]
        file = WeightsFile({each.weight.key: each.stored for each in held})
        graph = Graph(
            schema=self.program.graph.schema,
            micro_batch=self.program.micro_batch,
            device=self.program.graph.device,
            autocast=self.program.graph.autocast,
            operators=fingerprints(node.op for node in nodes),
            weights_digest=file.digest,
            inputs=self.program.graph.inputs,
            weights=[each.weight for each in held],
            nodes=nodes,
            stages=self._stages(nodes),
        )
        return bound(graph, file, self.program.device)

    def _drop_unread(self) -> None:
        """Drop nodes whose results nothing reads any more."""
        needed = set(self.outputs)
        kept: list[list[Node]] = []
        for nodes in reversed(self.stages):
            kept.append([])
            for node in reversed(nodes):
                if any(value.name in needed for value in node.made):
                    needed.update(node.reads())
                    kept[-1].append(node)
        self.stages = [nodes[::-1] for nodes in reversed(kept)]

    def _restore_strides(self, forms: Inference) -> list[Node]:
        """Add nodes that give the outputs the strides which they had at first, and return these nodes."""
        added: list[Node] = []
        for place, before in enumerate(self.program.live(self.program.num_stages)):
            name, spec = self.outputs[place], before.spec
            order = sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], dim))
            if name in self.weights or spec.span != spec.numel or forms.has_strides(name, spec):
                continue
            back = [order.index(dim) for dim in range(len(order))]
            self.outputs[place] = self.new_name(f"{name}_restored")
            turned, whole = self.new_name(f"{name}_turned"), self.new_name(f"{name}_whole")
            added += [
                call("permute.default", turned, tensor(name), order),
                call("contiguous.default", whole, tensor(turned)),
                call("permute.default", self.outputs[place], tensor(whole), back),
            ]
        self.stages[-1] = [*self.stages[-1], *added]
        return added

    def _stages(self, nodes: Sequence[Node]) -> list[Stage]:
        """Return the program's stages with the costs that they have now."""
        inputs, samples = self.program.graph.inputs, self.program.micro_batch
        chain = Chain(
            inputs=inputs,
            nodes=nodes,
            places=[()] * len(nodes),
            outputs=self.outputs,
            weights=frozenset(self.weights),
        )
        sizes = {
            value.name: value.spec.nbytes for value in [*inputs, *(v for node in nodes for v in node.made)]
        }
        memory, (lifetimes, _) = ActivationMemory(chain, sizes), lifetimes_of(chain)
        stops = [0]
        for part in self.stages:
            stops.append(stops[-1] + len(part))
        alive = live_at(lifetimes, stops)
        made: list[Stage] = []
        for before, start, stop in zip(self.program.stages, stops, stops[1:], strict=False):
            last = len(made) + 1 == len(self.stages)
            live = self.outputs if last else list(alive[stop])
            names = {name for node in nodes[start:stop] for name in node.reads()}
            read = {
                w.key: w.spec.nbytes for n in names if n in self.weights for w in (self.weights[n].weight,)
            }
            made.append(
                Stage(
                    name=before.name,
                    kind=before.kind,
                    stop=stop,
                    live=live,
                    out_bytes=sum(sizes[name] for name in live) / samples,
                    param_bytes=sum(read.values()),
                    flops=before.flops,
                    peak_bytes=memory.peak(start, stop) / samples,
                )
            )
        return made


class Inference:
    """Find the forms of results by running nodes without data, in order."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self._device = draft, draft.program.device
        self._mode = FakeTensorMode(allow_fallback_kernels=False)
        self._values: Values = {}
        with self._mode:
            for value in draft.program.graph.inputs:
                self._values[value.name] = value.spec.empty(self._device)

    def add(self, node: Node) -> Node:
        """Return the node with the forms of its results.

        Raises:
            ProgramError: If the operator does not take its arguments.
        """
        step = bind([(len(self._values), node)], {}, self._device)[0]
        with silent(), self._mode, torch.no_grad(), no_fast_path(), autocasting(self._device, None):
            for name in node.reads():
                if name not in self._values:
                    self._values[name] = self._draft.weights[name].weight.spec.empty(self._device)
            try:
                results = step.call(self._values)
            except Exception as error:  # an operator may raise any error on arguments that do not fit
                raise step.refusal(error) from None
        outputs: list[Value | None] = []
        for output, result in zip(node.outputs, results, strict=True):
            outputs.append(None)
            if output is not None:
                self._values[output.name] = result
                outputs[-1] = Value(name=output.name, spec=TensorSpec.of(result))
        return Node(op=node.op, args=node.args, kwargs=node.kwargs, outputs=outputs)

    def has_strides(self, name: str, spec: TensorSpec) -> bool:
        """Return whether a value lies in memory as declared. A dimension of one element has no stride."""
        steps = zip(spec.shape, spec.stride, self._values[name].stride(), strict=True)
        return all(size < 2 or declared == step for size, declared, step in steps)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a value."""
        if name in self._values:
            return self._values[name].dtype
        return self._draft.weights[name].stored.dtype


def call(op: str, name: str, *args: Any, **kwargs: Any) -> Node:
    """Return a node with one result called ``name``, whose form is not known yet."""
    return Node(op=op, args=list(args), kwargs=kwargs, outputs=[Value(name=name, spec=UNKNOWN)])


def tensor(name: str) -> dict[str, str]:
    """Return the argument that refers to a value."""
    return {"tensor": name}


def given(node: Node) -> dict[str, Any]:
    """Return every argument of a node by name, encoded, with defaults for missing ones."""
    return arguments_by_name(node.op, node.args, node.kwargs)


def renamed(argument: Any, names: Mapping[str, str]) -> Any:
    """Return an encoded argument that refers to other values."""
    if isinstance(argument, list):
        return [renamed(item, names) for item in argument]
    if isinstance(argument, dict):
        name = argument.get("tensor")
        return tensor(names[name]) if isinstance(name, str) and name in names else argument
    return argument


def reading(node: Node, names: Mapping[str, str]) -> Node:
    """Return the node with other values as its arguments."""
    args, kwargs = renamed(node.args, names), {key: renamed(arg, names) for key, arg in node.kwargs.items()}
    return Node(op=node.op, args=args, kwargs=kwargs, outputs=node.outputs)


def makers(nodes: Iterable[Node]) -> dict[str, Node]:
    """Return the node that makes each value, by name."""
    return {value.name: node for node in nodes for value in node.made}
