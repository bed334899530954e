"""Decode an untrusted ``graph.json``, and check its caps and rules before a tensor exists.

Checks that need the operators (shapes, strides, memory, operations) follow later, on tensors without data, in
:mod:`upriver.program.graph.validator`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from upriver.errors import ProgramError
from upriver.program.graph.artifact_paths import DIGEST
from upriver.program.graph.autocast import AUTOCAST
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.operators import check_fingerprints
from upriver.program.graph.schema import (
    DTYPES,
    SCHEMA,
    Graph,
    Lifetimes,
    Stage,
    TensorSpec,
    Value,
    Weight,
    constants,
    decode_argument,
    reference,
)

_INT64 = 1 << 63


class _Head(msgspec.Struct):
    schema: str


def decode(data: bytes | memoryview, caps: GraphCaps = DEFAULT_CAPS) -> Graph:
    """Read an untrusted graph file.

    Raises:
        ProgramError: If it is not a well-formed graph of this schema. The message says what and where.
    """
    if len(data) > caps.graph_bytes:
        raise ProgramError(f"graph of {len(data)} bytes; at most {caps.graph_bytes} are allowed")
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema != SCHEMA:
            raise ProgramError(f"graph schema {schema[:80]!r}; this version reads {SCHEMA!r}")
        graph = msgspec.json.decode(data, type=Graph)
        _check_head(graph, caps)
        _check_names(graph, caps)
        check_fingerprints(graph.operators, {node.op for node in graph.nodes})
        _check_stages(graph, caps)
        canonical = graph.encode() == data
    # msgspec raises its own errors and, for some text, Python's.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProgramError(f"graph.json: {error}") from None
    if not canonical:
        # One graph has one digest: no other spelling, no repeated field.
        raise ProgramError("graph.json is not written as this version writes it")
    return graph


def _check_head(graph: Graph, caps: GraphCaps) -> None:
    _within("micro_batch", graph.micro_batch, caps.micro_batch, least=1)
    _text(graph.device, "device", caps)
    if graph.autocast is not None and graph.autocast not in AUTOCAST:
        raise ProgramError(f"autocast to {graph.autocast[:80]!r}; allowed are {', '.join(AUTOCAST)}")
    if not DIGEST.fullmatch(graph.weights_digest):
        raise ProgramError(f"weights_digest {graph.weights_digest[:80]!r} is no digest")
    if not any(value.spec.shape[:1] == [graph.micro_batch] for value in graph.inputs):
        raise ProgramError(f"no input holds the {graph.micro_batch} samples of a micro-batch")
    _within("nodes", len(graph.nodes), caps.nodes)
    _within("stages", len(graph.stages), caps.stages, least=1)
    results = sum(len(node.outputs) for node in graph.nodes)
    _within("tensors", len(graph.inputs) + len(graph.weights) + results, caps.tensors)


def _check_names(graph: Graph, caps: GraphCaps) -> None:
    """Raise unless every name is made once, before it is read, and every tensor is within the caps."""
    known: set[str] = set()
    declared: list[Value | Weight] = [*graph.inputs, *graph.weights]
    for value in declared:
        _define(known, value, "the graph", caps)
    for weight in graph.weights:
        _text(weight.key, f"weight {weight.name!r}", caps)
    for index, node in enumerate(graph.nodes):
        where = f"node {index} ({node.op[:80]})"
        _check_arguments([*node.args, *node.kwargs.values()], where, caps)
        for name in node.reads():
            if name not in known:
                raise ProgramError(f"{where}: reads {name[:80]!r} before it is made")
        for value in node.made:
            _define(known, value, where, caps)


def _define(known: set[str], value: Value | Weight, where: str, caps: GraphCaps) -> None:
    _text(value.name, where, caps)
    if value.name in known:
        raise ProgramError(f"{where}: {value.name!r} is made twice")
    _check_spec(value.spec, f"{where}: {value.name!r}", caps)
    known.add(value.name)


def _check_spec(spec: TensorSpec, where: str, caps: GraphCaps) -> None:
    if spec.dtype not in DTYPES:
        raise ProgramError(f"{where}: type {spec.dtype[:80]!r} is not allowed")
    if len(spec.shape) != len(spec.stride) or len(spec.shape) > caps.dimensions:
        raise ProgramError(
            f"{where}: {len(spec.shape)} sizes, {len(spec.stride)} strides; at most {caps.dimensions} of each"
        )
    # A size of 0 hides the others from a product, and one element hides the strides. So cap each one too.
    largest = math.prod(max(1, size) for size in spec.shape) * spec.itemsize
    for nbytes in (largest, spec.nbytes, *(stride * spec.itemsize for stride in spec.stride)):
        if nbytes > caps.tensor_bytes:
            raise ProgramError(f"{where}: takes {nbytes} bytes, at most {caps.tensor_bytes} are allowed")


def check_weight(weight: Weight, stored: torch.Tensor | None) -> None:
    """Compare a weight in the weights file with its declaration in the graph.

    Raises:
        ProgramError: If it is missing, or its type, shape or density differs.
    """
    if stored is None:
        raise ProgramError(f"the weights file has no {weight.key!r}")
    shape, dtype = storage_shape(weight.spec), str(stored.dtype).removeprefix("torch.")
    if dtype != weight.spec.dtype or list(stored.shape) != shape:
        raise ProgramError(
            f"weight {weight.key!r} is {dtype} {list(stored.shape)} in its file, the graph says "
            f"{weight.spec.dtype} {shape}"
        )


def storage_shape(spec: TensorSpec) -> list[int]:
    """Return a weight's shape in its file: sizes in the order in which its elements lie in memory.

    A weight with gaps or repetitions between its elements is stored as the storage range that it spans.
    """
    order = sorted(range(len(spec.shape)), key=lambda d: (-spec.stride[d], d))
    expected = 1
    for d in reversed(order):
        if spec.shape[d] != 1 and spec.stride[d] != expected and spec.numel:
            return [spec.span]
        expected *= spec.shape[d]
    return [spec.shape[d] for d in order]


def _check_arguments(arguments: Sequence[Any], where: str, caps: GraphCaps) -> None:
    for count, (depth, argument) in enumerate(_walk(arguments, 0), start=1):
        if count > caps.arguments or depth > caps.depth:
            raise ProgramError(
                f"{where}: more than {caps.arguments} arguments, or nested deeper than {caps.depth}"
            )
        if isinstance(argument, str):
            _text(argument, where, caps)
        elif isinstance(argument, int) and not -_INT64 <= argument < _INT64:
            raise ProgramError(f"{where}: an integer of more than 64 bits")
        elif isinstance(argument, dict) and reference(argument) is None:
            decode_argument(argument, "cpu")


def _walk(arguments: Sequence[Any], depth: int) -> Iterator[tuple[int, Any]]:
    for argument in arguments:
        yield depth, argument
        if isinstance(argument, list):
            yield from _walk(argument, depth + 1)


def _check_stages(graph: Graph, caps: GraphCaps) -> None:
    stops = [stage.stop for stage in graph.stages]
    if stops != sorted(stops) or stops[-1] != len(graph.nodes):
        raise ProgramError("stages do not cover the nodes in order")
    fixed = constants(graph.inputs, graph.nodes)
    born = {value.name: 0 for value in graph.inputs}
    for index, node in enumerate(graph.nodes, start=1):
        born |= {value.name: index for value in node.made}
    for number, stage in enumerate(graph.stages, start=1):
        for text in (stage.name, stage.kind):
            _text(text, f"stage {number}", caps)
        _check_stage(stage, f"stage {number}", born, frozenset() if number == len(graph.stages) else fixed)
    _check_live(graph, fixed | {weight.name for weight in graph.weights})


def _check_stage(stage: Stage, where: str, born: dict[str, int], never: frozenset[str]) -> None:
    for name in stage.live:
        if born.get(name, stage.stop + 1) > stage.stop or name in never:
            raise ProgramError(f"{where}: {name[:80]!r} is no tensor made before its cut")
    if len(set(stage.live)) != len(stage.live):
        raise ProgramError(f"{where}: a tensor crosses its cut twice")
    if not all(map(math.isfinite, (stage.out_bytes, stage.flops, stage.peak_bytes))):
        raise ProgramError(f"{where}: out_bytes, flops and peak_bytes must be finite")


def _check_live(graph: Graph, apart: frozenset[str]) -> None:
    """Raise unless all values that later stages read cross every cut before them."""
    stages = iter(enumerate(graph.stages, start=1))
    number, stage = next(stages)
    for position, alive in Lifetimes(graph.inputs, graph.nodes, graph.stages[-1].live, apart).walk():
        while stage.stop == position:
            if missing := alive.keys() - set(stage.live):
                raise ProgramError(
                    f"stage {number}: {min(missing)[:80]!r}, read later, does not cross its cut"
                )
            if number == len(graph.stages):
                return
            number, stage = next(stages)


def _text(text: str, where: str, caps: GraphCaps) -> None:
    if len(text) > caps.text:
        raise ProgramError(f"{where}: a text of {len(text)} characters; at most {caps.text} are allowed")


def _within(name: str, value: int, most: int, *, least: int = 0) -> None:
    if not least <= value <= most:
        raise ProgramError(f"{name} must lie in {least}..{most}, got {value}")
