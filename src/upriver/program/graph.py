"""A captured network as data: ``graph.json``, written canonically and read with suspicion.

The file names weights by digest and operators by their place in the allow-list; it holds no code. A graph is
made for one micro-batch size. Its digest is the SHA-256 of its bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from upriver.errors import ProgramError

SCHEMA = "upriver.program/1"

MAX_GRAPH_BYTES = 64 << 20
MAX_NODES = 200_000
MAX_DIMENSIONS = 12
MAX_TENSOR_BYTES = 16 << 30
"""Caps on what a graph file may declare: above the largest published networks, below what harms a server."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "bool",
    )
}
"""Tensor types that may stand in a program or cross a cut."""

_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve": torch.preserve_format,
}


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Type, shape and strides (both in elements) of one tensor."""

    dtype: str
    shape: list[int]
    stride: list[int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor, real or fake.

        Raises:
            ProgramError: If its dtype is not in :data:`DTYPES`.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ProgramError(
                f"tensors of type {dtype} cannot stand in a program; allowed: {', '.join(DTYPES)}"
            )
        return cls(
            dtype=dtype, shape=[int(n) for n in tensor.shape], stride=[int(n) for n in tensor.stride()]
        )

    @property
    def numel(self) -> int:
        """Elements, counting a repeated (stride 0) one each time."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def span(self) -> int:
        """Elements of storage from the first to the last one used: what has to be shipped."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of storage it needs."""
        return self.span * self.itemsize

    def check(self, where: str) -> None:
        """Refuse what no tensor can be.

        Raises:
            ProgramError: Naming ``where``.
        """
        if self.dtype not in DTYPES:
            raise ProgramError(f"{where}: type {self.dtype!r} is not allowed")
        if len(self.shape) != len(self.stride) or len(self.shape) > MAX_DIMENSIONS:
            raise ProgramError(f"{where}: {len(self.shape)} sizes, {len(self.stride)} strides")
        if any(n < 0 for n in self.shape) or any(n < 0 for n in self.stride):
            raise ProgramError(f"{where}: negative size or stride")
        if max(self.nbytes, self.numel * self.itemsize) > MAX_TENSOR_BYTES:
            raise ProgramError(f"{where}: larger than {MAX_TENSOR_BYTES} bytes")

    def empty(self, device: str | torch.device) -> torch.Tensor:
        """An uninitialised tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=DTYPES[self.dtype], device=device)


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named tensor of the graph."""

    name: str
    spec: TensorSpec


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value read from the weights file, where it stands under ``key`` in storage order."""

    name: str
    key: str
    spec: TensorSpec


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operator call. ``outputs`` has one entry per result, None for results nobody reads."""

    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Value | None]


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes up to ``stop`` that run as one step.

    Attributes:
        name: Path of the module that ends here.
        kind: Class name of that module.
        stop: Index after the stage's last node.
        live: Names of the tensors that cross a cut placed after it.
        out_bytes: Their bytes, per sample.
        param_bytes: Bytes of weights that the stage reads.
        flops: Floating-point operations per sample.
        peak_bytes: Activations alive at once inside the stage, per sample.
    """

    name: str
    kind: str
    stop: int
    live: list[str]
    out_bytes: float
    param_bytes: int
    flops: float
    peak_bytes: float


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole ``graph.json``."""

    schema: str
    micro_batch: int
    weights_digest: str
    inputs: list[Value]
    weights: list[Weight]
    nodes: list[Node]
    stages: list[Stage]

    def encode(self) -> bytes:
        """The canonical bytes of the file."""
        return msgspec.json.encode(self)

    @property
    def input_bytes(self) -> float:
        """Bytes of the model's input, per sample."""
        return sum(value.spec.nbytes for value in self.inputs) / self.micro_batch


def digest_of(data: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal: the name of a program, a weights file or a dataset."""
    return hashlib.sha256(data).hexdigest()


def decode(data: bytes | memoryview) -> Graph:
    """Read a graph file from anyone.

    Raises:
        ProgramError: If it is not a well-formed graph of this schema; the message says what and where.
    """
    if len(data) > MAX_GRAPH_BYTES:
        raise ProgramError(f"graph of {len(data)} bytes; at most {MAX_GRAPH_BYTES} are allowed")
    try:
        graph = msgspec.json.decode(data, type=Graph)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProgramError(f"graph.json: {error}") from None
    _check(graph)
    return graph


def _check(graph: Graph) -> None:
    if graph.schema != SCHEMA:
        raise ProgramError(f"graph schema {graph.schema!r}; this version reads {SCHEMA!r}")
    if graph.micro_batch < 1:
        raise ProgramError(f"micro_batch must be at least 1, got {graph.micro_batch}")
    if len(graph.nodes) > MAX_NODES:
        raise ProgramError(f"graph of {len(graph.nodes)} nodes; at most {MAX_NODES} are allowed")
    known: set[str] = set()
    declared: list[Value | Weight] = [*graph.inputs, *graph.weights]
    for value in declared:
        _define(known, value.name, value.spec, value.name)
    for index, node in enumerate(graph.nodes):
        where = f"node {index} ({node.op})"
        for name in references([node.args, node.kwargs]):
            if name not in known:
                raise ProgramError(f"{where}: reads {name!r} before it is made")
        for output in node.outputs:
            if output is not None:
                _define(known, output.name, output.spec, where)
    _check_stages(graph)


def _define(known: set[str], name: str, spec: TensorSpec, where: str) -> None:
    if name in known:
        raise ProgramError(f"{where}: {name!r} is made twice")
    spec.check(where)
    known.add(name)


def _check_stages(graph: Graph) -> None:
    stops = [stage.stop for stage in graph.stages]
    if not stops or stops != sorted(stops) or stops[0] < 0 or stops[-1] != len(graph.nodes):
        raise ProgramError("stages do not cover the nodes in order")
    live = liveness(graph.nodes, graph.stages[-1].live, {weight.name for weight in graph.weights})
    for position, stage in enumerate(graph.stages, start=1):
        if not set(stage.live) >= live[stage.stop]:
            raise ProgramError(f"stage {position}: what later stages read does not cross its cut")
    made = {value.name for value in graph.inputs}
    start = 0
    for stage in graph.stages:
        for node in graph.nodes[start : stage.stop]:
            made |= {output.name for output in node.outputs if output is not None}
        start = stage.stop
        if not set(stage.live) <= made or len(set(stage.live)) != len(stage.live):
            raise ProgramError(f"stage {stage.name!r}: {stage.live} are not tensors made before its cut")


def liveness(nodes: Sequence[Node], outputs: Sequence[str], weights: set[str]) -> list[frozenset[str]]:
    """Names alive at each position 0…len(nodes): made before, read at or after it; weights apart."""
    alive: set[str] = set(outputs)
    sets = [frozenset(alive)]
    for node in reversed(nodes):
        alive -= {output.name for output in node.outputs if output is not None}
        alive |= set(references([node.args, node.kwargs])) - weights
        sets.append(frozenset(alive))
    return sets[::-1]


# ------------------------------------------------------------------------------- arguments as JSON


def references(argument: Any) -> Iterator[str]:
    """Names of the tensors that an encoded argument reads."""
    if isinstance(argument, dict):
        if set(argument) == {"tensor"} and isinstance(argument["tensor"], str):
            yield argument["tensor"]
        else:
            for item in argument.values():
                yield from references(item)
    elif isinstance(argument, list):
        for item in argument:
            yield from references(item)


def encode_argument(argument: Any) -> Any:
    """A node's argument as JSON.

    Raises:
        ProgramError: If it is something a graph file cannot say.
    """
    match argument:
        case None | bool() | int() | str():
            return argument
        case float():
            return argument if math.isfinite(argument) else {"float": str(argument)}
        case torch.fx.Node():
            return {"tensor": argument.name}
        case list() | tuple():
            return [encode_argument(item) for item in argument]
        case torch.dtype():
            return {"dtype": str(argument).removeprefix("torch.")}
        case torch.device():
            return {"device": "here"}
        case torch.memory_format():
            names = [name for name, value in _MEMORY_FORMATS.items() if value is argument]
            return {"memory_format": names[0]}
        case torch.layout() if argument is torch.strided:
            return {"layout": "strided"}
    raise ProgramError(f"argument of type {type(argument).__name__} cannot stand in a program")


def decode_argument(argument: Any, values: dict[str, torch.Tensor], device: torch.device) -> Any:
    """The argument that :func:`encode_argument` wrote, with tensors looked up in ``values``.

    Raises:
        ProgramError: If it is of no known form.
    """
    if isinstance(argument, list):
        return [decode_argument(item, values, device) for item in argument]
    if not isinstance(argument, dict):
        return argument
    match list(argument.items()):
        case [("tensor", str(name))]:
            return values[name]
        case [("float", "inf" | "-inf" | "nan" as text)]:
            return float(text)
        case [("dtype", str(name))] if name in DTYPES:
            return DTYPES[name]
        case [("device", "here")]:
            return device
        case [("memory_format", str(name))] if name in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[name]
        case [("layout", "strided")]:
            return torch.strided
    raise ProgramError(f"argument {str(argument)[:80]!r} is of no known form")
