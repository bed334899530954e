"""Define a captured network as data: ``graph.json``, written canonically (`parser` reads it).

The file names weights by digest and operators by their entry in the allow-list. It holds no code. A graph is
made for one micro-batch size. Its digest is the SHA-256 of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch

from upriver.errors import ProgramError

SCHEMA = "upriver.program/2"

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A size, a stride, a position or a number of bytes. Fits the signed 64 bits that torch uses."""

Amount = Annotated[float, msgspec.Meta(ge=0)]
"""Bytes or operations for one sample."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16"),
        *("int8", "uint8", "int16", "int32", "int64", "bool"),
    )
}
"""Tensor types that a program may hold or that may cross a cut."""

_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve": torch.preserve_format,
}


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Type, shape and strides (in elements) of one tensor."""

    dtype: str
    shape: list[Count]
    stride: list[Count]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor, real or fake.

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
        """Number of elements. A repeated (stride 0) element counts each time."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def span(self) -> int:
        """Elements of storage from the first to the last used one: the number to ship."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.span * self.itemsize

    @property
    def touched_bytes(self) -> int:
        """Bytes that reading or writing all elements moves. A repeated element lies in memory once."""
        return min(self.span, self.numel) * self.itemsize

    def empty(self, device: str | torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of this spec."""
        return torch.empty_strided(self.shape, self.stride, dtype=DTYPES[self.dtype], device=device)


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Named tensor of the graph."""

    name: str
    spec: TensorSpec


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value read from the weights file, stored under ``key`` in storage order."""

    name: str
    key: str
    spec: TensorSpec


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operator call. ``outputs`` has one entry per result, None for results that are never read."""

    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Value | None]

    def reads(self) -> Iterator[str]:
        """Yield names of the tensors among its arguments, in order."""
        return references([self.args, self.kwargs])

    @property
    def made(self) -> list[Value]:
        """Results that something reads."""
        return [output for output in self.outputs if output is not None]


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
    stop: Count
    live: list[str]
    out_bytes: Amount
    param_bytes: Count
    flops: Amount
    peak_bytes: Amount


class Graph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole ``graph.json``.

    Attributes:
        device: Type of device of the capture. Operators lay out results differently on other types, so the
            declared strides are those of this type.
        autocast: Type that a run computes in under ``torch.autocast``. None for no autocast.
        operators: Each operator used, with the fingerprint of its signature where the graph was made.
        weights_digest: SHA-256 of the weights file.
        stages: ``live`` of the last stage are the outputs, in order. Only outputs may be constants.
    """

    schema: str
    micro_batch: Count
    device: str
    autocast: str | None
    operators: dict[str, str]
    weights_digest: str
    inputs: list[Value]
    weights: list[Weight]
    nodes: list[Node]
    stages: list[Stage]

    def encode(self) -> bytes:
        """Return the canonical bytes of the file."""
        return msgspec.json.encode(self)

    @property
    def input_bytes(self) -> float:
        """Bytes of the model's input, per sample."""
        return sum(value.spec.nbytes for value in self.inputs) / self.micro_batch


def constants(inputs: Iterable[Value], nodes: Iterable[Node]) -> frozenset[str]:
    """Return names of the values that no input reaches. They are the same in each run, so computed once.

    Examples are a position table, a causal mask, and a folded weight. They are never live and never cross a
    cut.
    """
    varying = {value.name for value in inputs}
    fixed: set[str] = set()
    for node in nodes:
        varies = not varying.isdisjoint(node.reads())
        (varying if varies else fixed).update(value.name for value in node.made)
    return frozenset(fixed)


class Lifetimes:
    """Range of positions at which each value is alive, for a graph of any length in one pass.

    A value is made once and never changed, so it is alive over one range of positions. Position ``p`` lies
    before node ``p``.

    Attributes:
        stretch: Maps each name to the (first, last) position at which the value is alive: made before, read
            at or after.
    """

    def __init__(
        self, inputs: Iterable[Value], nodes: Sequence[Node], outputs: Iterable[str], apart: Container[str]
    ) -> None:
        """Walk the graph once.

        Args:
            outputs: Names alive at the end.
            apart: Names that are never alive: weights and constants.
        """
        born = {value.name: 0 for value in inputs}
        last = dict.fromkeys(born, -1)
        for index, node in enumerate(nodes):
            last |= dict.fromkeys(node.reads(), index)
            born |= {value.name: index + 1 for value in node.made}
        last |= dict.fromkeys(outputs, len(nodes))
        self.end = len(nodes)
        self.stretch = {
            name: (first, last[name])
            for name, first in born.items()
            if name not in apart and last.get(name, -1) >= first
        }

    def walk(self) -> Iterator[tuple[int, Mapping[str, None]]]:
        """Yield each position with the names alive there, in the order in which they were made.

        All positions share one mapping, so a walk takes time linear in the number of nodes. Copy entries to
        keep them.
        """
        ends: list[list[str]] = [[] for _ in range(self.end + 1)]
        starts: list[list[str]] = [[] for _ in range(self.end + 1)]
        for name, (first, last) in self.stretch.items():
            starts[first].append(name)
            ends[last].append(name)
        alive: dict[str, None] = {}
        for position in range(self.end + 1):
            alive.update(dict.fromkeys(starts[position]))
            yield position, alive
            for name in ends[position]:
                del alive[name]


# ------------------------------------------------------------------------------- arguments as JSON


def reference(argument: Any) -> str | None:
    """Return the name of the tensor if an encoded argument refers to one, else None."""
    if isinstance(argument, dict) and len(argument) == 1 and isinstance(argument.get("tensor"), str):
        return str(argument["tensor"])
    return None


def references(argument: Any) -> Iterator[str]:
    """Yield names of the tensors that an encoded argument reads, including nested ones."""
    name = reference(argument)
    if name is not None:
        yield name
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from references(item)
    elif isinstance(argument, list):
        for item in argument:
            yield from references(item)


def encode_argument(argument: Any) -> Any:
    """Return a node's argument as JSON.

    Raises:
        ProgramError: If a graph file cannot express it.
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


def decode_argument(argument: Any, device: str | torch.device) -> Any:
    """Return the argument that :func:`encode_argument` wrote, if it is neither a tensor nor a list.

    Raises:
        ProgramError: If its form is unknown.
    """
    if not isinstance(argument, dict | list):
        return argument
    match list(argument.items()) if isinstance(argument, dict) else ():
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
