"""Read and write the weights file: safetensors, in execution order, each tensor on a 64-byte boundary.

The safetensors library sorts tensors by type and name, and aligns to 8 bytes. A program needs the tensors in
the order in which its stages read them. Then a cold process can start on the first ones. It also needs the
allocator's alignment, because unaligned operands change low bits. The format allows both. This module writes
its own header, padded with spaces. It fills gaps with named padding tensors, since the format forbids holes.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from upriver.errors import ProgramError
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.schema import DTYPES
from upriver.text import printable

ALIGNMENT = 64
LENGTH_BYTES = 8
"""Bytes of the number before the header that holds the header's length."""

METADATA = "__metadata__"
PADDING = "__pad__"
"""Names that no weight may have: the format's own, and the prefix of padding tensors."""

_CODES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements in memory: it is not sparse, on the meta device, or lazy."""
    return tensor.layout is torch.strided and not tensor.is_meta and not is_lazy(tensor)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that all names of the same elements share. Meaningless for a tensor without elements."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a contiguous tensor, in the order in which they lie in memory.

    Raises:
        ProgramError: If elements overlap or have gaps between them. Such a weight has no dense form.
    """
    dense = tensor.permute(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], d)))
    if not dense.is_contiguous():
        raise ProgramError(
            f"a weight of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense"
        )
    return dense


def encode(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a safetensors file of these tensors, in this order, each stored densely.

    Raises:
        ProgramError: If a tensor has no dense form, or a name that the format reserves.
    """
    return b"".join(_stored(tensors))


class Stored(ABC):
    """Interface of a weights file, wherever its bytes are.

    Attributes:
        tensors: Tensors by key, in storage order, on a 64-byte boundary.
    """

    tensors: Mapping[str, torch.Tensor]
    nbytes: int

    @abstractmethod
    def encode(self) -> bytes | memoryview:
        """Return the file."""


class FileInMemory(Stored):
    """Weights file that was read. Its tensors are views of it."""

    def __init__(self, data: torch.Tensor, caps: GraphCaps = DEFAULT_CAPS) -> None:
        """Read an untrusted file."""
        self._data, self.nbytes = data, data.nbytes
        self.tensors = decode(data, caps)

    def encode(self) -> memoryview:
        """Return the file as it was read."""
        return self._data.numpy().data


class WeightsFile(Stored):
    """Weights file of tensors that stay in place. It is written on request.

    So a model trained here and its program share the frozen weights, which must not change.

    Attributes:
        tensors: Tensors by key, in storage order. A tensor off a 64-byte boundary is a copy.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store tensors in the order of the file."""
        self._given = {name: tensor.detach() for name, tensor in tensors.items()}
        self.tensors = {name: aligned(storage_order(tensor)) for name, tensor in self._given.items()}
        self.nbytes = 0
        folded = hashlib.sha256()
        for piece in _stored(self._given):
            folded.update(piece)
            self.nbytes += len(piece)
        self.digest = folded.hexdigest()

    def encode(self) -> bytes:
        """Return the file."""
        return encode(self._given)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it begins on a 64-byte boundary, else a copy that does: alignment decides bits."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _stored(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a file's bytes: the header, then each tensor and its padding."""
    dense = {name: storage_order(tensor) for name, tensor in tensors.items()}
    head, entries = head_of((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in dense.items())
    yield head
    for entry in entries:
        yield raw_bytes(dense[entry.name])
        yield bytes(entry.gap)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements, row by row: its own memory if contiguous in main memory, else a copy."""
    dense = tensor.detach().cpu().contiguous()
    return memoryview(dense.reshape(-1).view(torch.uint8).numpy().data) if dense.numel() else memoryview(b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Tensor as described in the header, in bytes of the body."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def gap(self) -> int:
        """Bytes of padding after it."""
        return -self.stop % ALIGNMENT


def head_of(forms: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[TensorEntry]]:
    """Return the header of a file of such tensors, and the position of each tensor after the header.

    Args:
        forms: Name, type and shape of each tensor, in the order of the file. Names must be unique.

    Raises:
        ProgramError: If the format reserves a name, or does not have a type.
    """
    header: dict[str, Any] = {}
    entries: list[TensorEntry] = []
    offset = 0
    for number, (name, dtype, shape) in enumerate(forms, start=1):
        if is_reserved(name):
            raise ProgramError(f"a weight cannot be called {name!r}")
        if dtype not in _CODES:
            raise ProgramError(f"weight {name!r} is of type {dtype[:80]!r}; allowed are {', '.join(_CODES)}")
        stop = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entry = TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=offset, stop=stop)
        header[name] = _described(_CODES[dtype], shape, offset, stop)
        offset = stop + entry.gap
        if entry.gap:
            header[f"{PADDING}{number}"] = _described("U8", [entry.gap], stop, offset)
        entries.append(entry)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, entries


def _described(code: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}


def is_reserved(name: str) -> bool:
    """Return whether a name is reserved, so that no weight may have it."""
    return name == METADATA or name.startswith(PADDING)


def decode(data: torch.Tensor, caps: GraphCaps = DEFAULT_CAPS) -> dict[str, torch.Tensor]:
    """Return views on the tensors of an untrusted weights file. Nothing is copied.

    Args:
        data: The file as a one-dimensional uint8 tensor.

    Raises:
        ProgramError: If the header is wrong, a tensor exceeds the caps, or the tensors overlap, leave holes,
            or do not begin at 64-byte boundaries.
    """
    header, body = _header(data, caps)
    entries = [
        entry_of(name, entry, data.numel(), caps) for name, entry in header.items() if name != METADATA
    ]
    _check_layout(entries, body.numel())
    return {entry.name: _view(body, entry) for entry in entries if not is_reserved(entry.name)}


def _header(data: torch.Tensor, caps: GraphCaps) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the table of tensors, and the bytes after it."""
    length = header_length(bytes(data[:LENGTH_BYTES].tolist()), data.numel(), caps)
    start = LENGTH_BYTES + length
    if start % ALIGNMENT:
        raise ProgramError(f"the weights begin at byte {start}, not at a multiple of {ALIGNMENT}")
    return table_of(data[LENGTH_BYTES:start].numpy().tobytes(), "weights header", caps), data[start:]


def header_length(first: bytes, total: int, caps: GraphCaps = DEFAULT_CAPS) -> int:
    """Return the length of a file's header.

    Raises:
        ProgramError: If the header would not fit into the file, or is longer than the caps allow.
    """
    if total < LENGTH_BYTES:
        raise ProgramError(f"weights file of {total} bytes has no header")
    length = int.from_bytes(first, "little")
    if length > min(total - LENGTH_BYTES, caps.header_bytes):
        raise ProgramError(
            f"weights header of {length} bytes in a file of {total}; at most {caps.header_bytes} are allowed"
        )
    return length


def table_of(text: bytes, what: str, caps: GraphCaps = DEFAULT_CAPS) -> dict[str, Any]:
    """Return an untrusted JSON table.

    Raises:
        ProgramError: If it is not a table, has more entries than a header may have, or repeats a name.
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ProgramError(f"{what} names something twice")
        return found

    try:
        found = json.loads(text.decode(), object_pairs_hook=table)
    except (ValueError, RecursionError):
        raise ProgramError(f"{what} is not JSON") from None
    if not isinstance(found, dict) or len(found) > caps.header_entries:
        raise ProgramError(f"{what} is not a table of at most {caps.header_entries} tensors")
    return found


def entry_of(name: str, entry: Any, most: int, caps: GraphCaps = DEFAULT_CAPS) -> TensorEntry:
    """Return one tensor's entry of an untrusted header.

    Args:
        most: Number of bytes available.

    Raises:
        ProgramError: If the entry is malformed, or exceeds the caps.
    """
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(stop)], **rest} if (
            not rest and all(type(number) is int and number >= 0 for number in (start, stop, *shape))
        ):
            dtype = _NAMES.get(code, "")
        case _:
            raise ProgramError(f"weight {name[:80]!r}: malformed entry")
    if not dtype:
        allowed = ", ".join(_NAMES)
        raise ProgramError(
            f"weight {name[:80]!r} has the type {printable(code, 80)}, which is not supported; supported are "
            f"{allowed}"
        )
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise ProgramError(f"weight {name[:80]!r}: a name that is no text")
    if len(name) > caps.text or len(shape) > caps.dimensions:
        raise ProgramError(f"weight {name[:80]!r}: a name or a shape that is too long")
    # A size of 0 would hide the others from the product, and torch multiplies those too.
    elements = math.prod(max(1, size) for size in shape)
    nbytes = 0 if 0 in shape else elements * DTYPES[dtype].itemsize
    if not 0 <= start <= stop <= most or stop - start != nbytes or elements > caps.tensor_bytes:
        raise ProgramError(f"weight {name[:80]!r}: bytes {start}..{stop} do not hold its shape of {code}")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _check_layout(entries: list[TensorEntry], nbytes: int) -> None:
    """Raise unless tensors are adjacent, from the first byte to the last, each weight on a boundary."""
    end = 0
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "leaves a hole before it"
            raise ProgramError(f"weight {entry.name!r} {what}: it starts at byte {entry.start}, not {end}")
        if entry.start % ALIGNMENT and not is_reserved(entry.name):
            raise ProgramError(f"weight {entry.name!r} starts at byte {entry.start}, not on a boundary of 64")
        end = entry.stop
    if end != nbytes:
        raise ProgramError(f"the weights end at byte {end} of {nbytes}")


def _view(body: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    raw = body[entry.start : entry.stop]
    if entry.dtype == "bool" and raw.numel() and int(raw.max()) > 1:
        raise ProgramError(f"weight {entry.name!r}: a bool holds 0 or 1 only")
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)
