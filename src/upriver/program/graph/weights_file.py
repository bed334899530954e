"""The weights file: safetensors, in execution order, every tensor on a 64-byte boundary.

The safetensors library sorts tensors by type and name when it writes and aligns to 8 bytes. A program wants
them in the order in which its stages read them, so that a cold process can start on the first ones, and
aligned as the allocator would have them, because unaligned operands change low bits. Both are legal in the
format: a header of our own making, padded with spaces, and named padding tensors between, since holes are not
allowed.
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
"""The header's length, before the header."""

METADATA = "__metadata__"
PADDING = "__pad__"
"""Names that no weight may have: the format's own, and the beginning of those of padding tensors."""

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
    """Whether its elements lie somewhere: it is not sparse, on the meta device, or still without a shape."""
    return tensor.layout is torch.strided and not tensor.is_meta and not is_lazy(tensor)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What is the same for all names of the same elements; of a tensor without any it says nothing."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a contiguous tensor, in the order in which they lie in memory.

    Raises:
        ProgramError: If elements overlap or have gaps between them; such a weight has no dense form.
    """
    dense = tensor.permute(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], d)))
    if not dense.is_contiguous():
        raise ProgramError(
            f"a weight of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense"
        )
    return dense


def encode(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file of these tensors, in this order, each stored densely.

    Raises:
        ProgramError: If a tensor has no dense form, or a name that the format keeps for itself.
    """
    return b"".join(_stored(tensors))


class Stored(ABC):
    """A weights file, wherever its bytes are.

    Attributes:
        tensors: Key to tensor, in storage order, on a 64-byte boundary.
        nbytes: Memory that it takes.
    """

    tensors: Mapping[str, torch.Tensor]
    nbytes: int

    @abstractmethod
    def encode(self) -> bytes | memoryview:
        """The file."""


class FileInMemory(Stored):
    """A weights file that was read; its tensors are views of it."""

    def __init__(self, data: torch.Tensor, caps: GraphCaps = DEFAULT_CAPS) -> None:
        """Take a file from anyone.

        Raises:
            ProgramError: As :func:`decode`.
        """
        self._data, self.nbytes = data, data.nbytes
        self.tensors = decode(data, caps)

    def encode(self) -> memoryview:
        """The file as it was read."""
        return self._data.numpy().data


class WeightsFile(Stored):
    """A weights file that is written when it is asked for, of tensors that stay where they are.

    So a model that is trained here and its program share the frozen weights, which must not change.

    Attributes:
        tensors: Key to tensor, in storage order, on a 64-byte boundary where it was or as a copy.
        digest: SHA-256 of the file.
        nbytes: Its size.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors in the order of the file.

        Raises:
            ProgramError: As :func:`encode`.
        """
        self._given = {name: tensor.detach() for name, tensor in tensors.items()}
        self.tensors = {name: aligned(storage_order(tensor)) for name, tensor in self._given.items()}
        self.nbytes = 0
        folded = hashlib.sha256()
        for piece in _stored(self._given):
            folded.update(piece)
            self.nbytes += len(piece)
        self.digest = folded.hexdigest()

    def encode(self) -> bytes:
        """The file."""
        return encode(self._given)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor if it begins on a 64-byte boundary, else a copy that does: alignment decides bits."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _stored(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """A file's bytes, header first, then one tensor after the other, padding between."""
    dense = {name: storage_order(tensor) for name, tensor in tensors.items()}
    head, entries = head_of((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in dense.items())
    yield head
    for entry in entries:
        yield raw_bytes(dense[entry.name])
        yield bytes(entry.gap)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor, row by row: its own memory where they lie so in main memory, else a copy."""
    dense = tensor.detach().cpu().contiguous()
    return memoryview(dense.reshape(-1).view(torch.uint8).numpy().data) if dense.numel() else memoryview(b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor as the header has it, in bytes of the body."""

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
    """How a file of such tensors begins, and where each of them lies behind that.

    Args:
        forms: Name, type and shape of each, in the order of the file; no name twice.

    Raises:
        ProgramError: If a name is one that the format keeps for itself, or a type none that it has.
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
    """Whether no weight may have that name."""
    return name == METADATA or name.startswith(PADDING)


def decode(data: torch.Tensor, caps: GraphCaps = DEFAULT_CAPS) -> dict[str, torch.Tensor]:
    """Views on the tensors of a weights file from anyone; nothing is copied.

    Args:
        data: The file as a one-dimensional uint8 tensor.

    Raises:
        ProgramError: If the header lies about anything, the tensors overlap, leave holes, or do not begin at
            64-byte boundaries, or one is larger than the caps allow.
    """
    header, body = _header(data, caps)
    entries = [
        entry_of(name, entry, data.numel(), caps) for name, entry in header.items() if name != METADATA
    ]
    _check_layout(entries, body.numel())
    return {entry.name: _view(body, entry) for entry in entries if not is_reserved(entry.name)}


def _header(data: torch.Tensor, caps: GraphCaps) -> tuple[dict[str, Any], torch.Tensor]:
    """The table of tensors, and the bytes behind it."""
    length = header_length(bytes(data[:LENGTH_BYTES].tolist()), data.numel(), caps)
    start = LENGTH_BYTES + length
    if start % ALIGNMENT:
        raise ProgramError(f"the weights begin at byte {start}, not at a multiple of {ALIGNMENT}")
    return table_of(data[LENGTH_BYTES:start].numpy().tobytes(), "weights header", caps), data[start:]


def header_length(first: bytes, total: int, caps: GraphCaps = DEFAULT_CAPS) -> int:
    """How long a file's header is.

    Args:
        first: The first bytes of the file, :data:`LENGTH_BYTES` of them.
        total: Bytes of the file.

    Raises:
        ProgramError: If the header would not fit into the file, or be longer than the caps allow.
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
    """A JSON table from anyone.

    Args:
        what: Names it in messages.

    Raises:
        ProgramError: If it is none, has more entries than a header may have, or names something twice.
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
    """What a header from anyone says of one tensor.

    Args:
        most: Bytes that there are.

    Raises:
        ProgramError: If it says what cannot be, or more than the caps allow.
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
    # A size of 0 hides the others from the product, and torch multiplies those too.
    elements = math.prod(max(1, size) for size in shape)
    nbytes = 0 if 0 in shape else elements * DTYPES[dtype].itemsize
    if not 0 <= start <= stop <= most or stop - start != nbytes or elements > caps.tensor_bytes:
        raise ProgramError(f"weight {name[:80]!r}: bytes {start}..{stop} do not hold its shape of {code}")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _check_layout(entries: list[TensorEntry], nbytes: int) -> None:
    """Side by side, from the first byte to the last, each weight on a boundary."""
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
