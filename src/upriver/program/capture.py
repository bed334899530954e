"""nn.Module to Program: the frozen first part of the user's model, as a graph of operators.

``torch.export`` records the whole forward pass; a hook keeps what the boundary module returned, the wrapper
returns that, and everything after it is dropped as dead code. The graph is made for one micro-batch size.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from upriver.errors import CaptureError, ProgramError
from upriver.program import weights as weights_file
from upriver.program.example import Example
from upriver.program.graph import (
    SCHEMA,
    Graph,
    Node,
    Stage,
    TensorSpec,
    Value,
    Weight,
    digest_of,
    encode_argument,
    liveness,
    references,
)
from upriver.program.operators import ALLOWED, fingerprints
from upriver.program.program import Program, count_flops
from upriver.program.stages import Boundary, boundaries, peak_bytes
from upriver.program.trace import Trace, in_eval, no_fast_path, trace

_ROOT = "model"

_TORCH_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""Those that write pages when a model cannot be captured; each has a level of its own."""


class _Prefix(nn.Module):
    """The user's model, returning what one of its modules returned (or all of it, without a boundary)."""

    def __init__(self, model: nn.Module, boundary: str | None) -> None:
        super().__init__()
        self.model = model
        self.boundary = boundary

    def forward(self, *inputs: torch.Tensor) -> Any:
        if self.boundary is None:
            return self.model(*inputs)
        kept: list[Any] = []
        module = self.model.get_submodule(self.boundary)
        # A copy, since in-place code after the boundary would change what was kept; dropped again from the
        # graph.
        handle = module.register_forward_hook(lambda _module, _args, result: kept.append(result.clone()))
        try:
            self.model(*inputs)
        finally:
            handle.remove()
        return kept[0]


def capture(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    boundary: str | None = None,
    calls: Trace | None = None,
) -> Program:
    """Capture a model up to and including a module, in eval, for the micro-batch of ``inputs``.

    Args:
        model: The user's model; left as it was.
        inputs: Example inputs, samples in dimension 0, as many as a micro-batch holds.
        boundary: Name of the last module that belongs to the program; None takes the whole model.
        calls: A trace of the model, if one was made already.

    Raises:
        CaptureError: If the model cannot be captured; the message says why.
    """
    calls = calls or trace(model, Example.of(inputs))
    exported = _export(_Prefix(model, boundary), inputs)
    graph, weights = _build(exported, model, calls, boundary, micro_batch=inputs[0].shape[0])
    program = Program(graph, weights, device=inputs[0].device)
    return Program(_with_flops(graph, count_flops(program)), weights, device=program.device)


def _export(wrapper: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    with torch.no_grad(), _quiet(), in_eval(wrapper), no_fast_path():
        try:
            exported: torch.export.ExportedProgram = torch.export.export(wrapper, inputs, strict=False)
            exported = exported.run_decompositions({})
        except Exception as error:  # export raises whatever the user's code or its own tracing raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CaptureError(f"torch.export could not capture the model: {reason}") from error
    return exported


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own warnings, logs and printed graphs from a user who gets one line with the reason."""
    loggers = [logging.getLogger(name) for name in ("torch", *_TORCH_LOGGERS)]
    levels = [logger.level for logger in loggers]
    nowhere = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _build(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    calls: Trace,
    boundary: str | None,
    *,
    micro_batch: int,
) -> tuple[Graph, bytes]:
    nodes, results = _nodes(exported)
    outputs = _outputs(exported)
    if boundary is not None:
        nodes, outputs = _without_last_copy(nodes, outputs)
    used = {name for node in nodes for name in references([node.args, node.kwargs])}
    inputs = _inputs(exported)
    weights, tensors = _weights(exported, _in_order(nodes, used))
    specs = {value.name: value.spec for value in inputs}
    specs |= {output.name: output.spec for node in nodes for output in node.outputs if output is not None}
    names = {weight.name for weight in weights}
    live = liveness(nodes, outputs, names)
    before = [call for call in calls.calls if _ended_by(call.exit, calls, boundary)]
    cuts = boundaries(before, _last_nodes(results, len(nodes)), live, outputs)
    data = weights_file.encode(tensors)
    graph = Graph(
        schema=SCHEMA,
        micro_batch=micro_batch,
        autocast=None,
        operators=fingerprints(node.op for node in nodes),
        weights_digest=digest_of(data),
        inputs=inputs,
        weights=weights,
        nodes=nodes,
        stages=_stages(cuts, nodes, live, specs, weights, model, boundary, micro_batch),
    )
    return graph, data


def _ended_by(event: int, calls: Trace, boundary: str | None) -> bool:
    return boundary is None or event <= calls.of(boundary)[0].exit


def _inputs(exported: torch.export.ExportedProgram) -> list[Value]:
    wanted = set(exported.graph_signature.user_inputs)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder" and node.name in wanted]
    return [Value(name=node.name, spec=TensorSpec.of(node.meta["val"])) for node in placeholders]


def _outputs(exported: torch.export.ExportedProgram) -> list[str]:
    for spec in exported.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"the frozen part changes {spec.target!r} while it runs ({spec.kind.name.lower()})"
            )
    names = [name for name in exported.graph_signature.user_outputs if isinstance(name, str)]
    if not names:
        raise CaptureError("the frozen part gives no tensor")
    return list(dict.fromkeys(names))


def _nodes(exported: torch.export.ExportedProgram) -> tuple[list[Node], list[tuple[torch.fx.Node, int]]]:
    """The operator calls as data, and the fx nodes they stand for."""
    nodes: list[Node] = []
    origins: list[tuple[torch.fx.Node, int]] = []
    for fx in exported.graph.nodes:
        if fx.op in ("placeholder", "output"):
            continue
        if fx.op != "call_function":
            raise CaptureError(f"the graph holds a {fx.op} ({fx.target}), which is not an operator")
        if fx.target is operator.getitem or fx.target is torch.ops.aten._assert_tensor_metadata.default:
            continue  # parts of a result are named where it is made; the assertion has no result
        origins.append((fx, len(nodes)))
        nodes.append(_node(fx))
    return nodes, origins


def _node(fx: torch.fx.Node) -> Node:
    if not isinstance(fx.target, torch._ops.OpOverload) or fx.target.namespace != "aten":
        raise CaptureError(f"the model calls {fx.target}, which is no ATen operator")
    name = f"{fx.target._schema.name.removeprefix('aten::')}.{fx.target._overloadname}"
    if name not in ALLOWED:
        raise CaptureError(f"the model calls operator {name}, which no program may hold")
    try:
        return Node(
            op=name,
            args=[encode_argument(argument) for argument in fx.args],
            kwargs={key: encode_argument(value) for key, value in sorted(fx.kwargs.items())},
            outputs=_results(fx),
        )
    except ProgramError as error:
        raise CaptureError(f"operator {name}: {error}") from error


def _results(fx: torch.fx.Node) -> list[Value | None]:
    value = fx.meta["val"]
    if isinstance(value, torch.Tensor):
        return [Value(name=fx.name, spec=TensorSpec.of(value))]
    outputs: list[Value | None] = [None] * len(value)
    for user in fx.users:
        if user.target is not operator.getitem:
            raise CaptureError(f"operator {fx.target} gives a list that is read as a whole")
        index = int(user.args[1])  # type: ignore[arg-type]
        if outputs[index] is not None:
            raise CaptureError(f"operator {fx.target}: result {index} has two names")
        outputs[index] = Value(name=user.name, spec=TensorSpec.of(user.meta["val"]))
    return outputs


def _without_last_copy(nodes: list[Node], outputs: list[str]) -> tuple[list[Node], list[str]]:
    *rest, last = nodes
    if last.op != "clone.default" or [value.name for value in last.outputs if value is not None] != outputs:
        raise CaptureError("the boundary's answer does not end the graph")
    return rest, [last.args[0]["tensor"]]


def _in_order(nodes: Iterable[Node], used: set[str]) -> list[str]:
    """Names in the order in which they are first read."""
    seen: dict[str, None] = {}
    for node in nodes:
        for name in references([node.args, node.kwargs]):
            if name in used:
                seen.setdefault(name)
    return list(seen)


def _weights(
    exported: torch.export.ExportedProgram, order: Sequence[str]
) -> tuple[list[Weight], dict[str, torch.Tensor]]:
    sources = {
        spec.arg.name: spec.target
        for spec in exported.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        and spec.target is not None
    }
    weights: list[Weight] = []
    tensors: dict[str, torch.Tensor] = {}
    keys: dict[tuple[Any, ...], str] = {}
    for name in order:
        if name not in sources:
            continue
        target = sources[name]
        tensor = exported.state_dict.get(target, exported.constants.get(target))
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"constant {target!r} is no tensor")
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        key = keys.setdefault(identity, target.removeprefix(f"{_ROOT}."))  # tied weights are stored once
        tensors[key] = tensor
        weights.append(Weight(name=name, key=key, spec=TensorSpec.of(tensor)))
    return weights, tensors


def _last_nodes(origins: Sequence[tuple[torch.fx.Node, int]], num_nodes: int) -> dict[tuple[str, int], int]:
    """(module path, number of its call) to the index of its last node."""
    last: dict[tuple[str, int], int] = {}
    for fx, index in origins[:num_nodes]:
        for key, (path, _type) in (fx.meta.get("nn_module_stack") or {}).items():
            if path != _ROOT and not path.startswith(f"{_ROOT}."):
                continue
            number = key.rpartition("@")[2] if "@" in key.rpartition(".")[2] else "0"
            last[path.removeprefix(_ROOT).removeprefix("."), int(number)] = index
    return last


def _stages(
    cuts: Sequence[Boundary],
    nodes: Sequence[Node],
    live: Sequence[frozenset[str]],
    specs: Mapping[str, TensorSpec],
    weights: Sequence[Weight],
    model: nn.Module,
    boundary: str | None,
    micro_batch: int,
) -> list[Stage]:
    sizes = {weight.name: weight.spec.nbytes for weight in weights}
    stages = []
    start = 0
    for cut in cuts:
        read = {name for node in nodes[start : cut.stop] for name in references([node.args, node.kwargs])}
        last = cut.stop == len(nodes)
        name = boundary if last and boundary is not None else cut.name
        stages.append(
            Stage(
                name=name,
                kind=type(model.get_submodule(name)).__name__ if name != "output" else "output",
                stop=cut.stop,
                live=list(cut.live),
                out_bytes=sum(specs[name].nbytes for name in cut.live) / micro_batch,
                param_bytes=sum(sizes[name] for name in read if name in sizes),
                flops=0.0,
                peak_bytes=peak_bytes(nodes, live, specs, start, cut.stop) / micro_batch,
            )
        )
        start = cut.stop
    return stages


def _with_flops(graph: Graph, flops: Sequence[float]) -> Graph:
    stages = [
        msgspec.structs.replace(s, flops=f / graph.micro_batch)
        for s, f in zip(graph.stages, flops, strict=True)
    ]
    return msgspec.structs.replace(graph, stages=stages)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
