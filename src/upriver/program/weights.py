"""The weights file: safetensors, in execution order, every tensor on a 64-byte boundary.

The safetensors library sorts tensors by type and name when it writes and aligns to 8 bytes. A program wants
them in the order in which its stages read them, so that a cold process can start on the first ones, and
aligned as the allocator would have them, because unaligned operands change low bits. Both are legal in the
format: a header of our own making, padded with spaces, and named padding tensors between, since holes are not
allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from upriver.errors import ProgramError
from upriver.program.graph import DTYPES

ALIGNMENT = 64
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1_000_000

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
    """A safetensors file of these tensors, in this order, each stored densely."""
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        data = _bytes_of(storage_order(tensor.detach()).cpu())
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        shape = list(storage_order(tensor).shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        pieces.append(data)
        offset += len(data)
        if gap := -offset % ALIGNMENT:
            pad = {"dtype": "U8", "shape": [gap], "data_offsets": [offset, offset + gap]}
            header[f"__pad__{len(pieces)}"] = pad
            pieces.append(bytes(gap))
            offset += gap
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def decode(data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views on the tensors of a weights file from anyone; nothing is copied.

    Args:
        data: The file as a one-dimensional uint8 tensor.

    Raises:
        ProgramError: If the header lies about anything.
    """
    total = data.numel()
    if total < 8:
        raise ProgramError(f"weights file of {total} bytes has no header")
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    if length > min(total - 8, MAX_HEADER_BYTES):
        raise ProgramError(f"weights header of {length} bytes in a file of {total}")
    try:
        header = json.loads(data[8 : 8 + length].numpy().tobytes())
    except (ValueError, RecursionError):
        raise ProgramError("weights header is not JSON") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ProgramError("weights header is not a table of tensors")
    body = data[8 + length :]
    return {
        str(name): _view(body, str(name), entry)
        for name, entry in header.items()
        if name != "__metadata__" and not str(name).startswith("__pad__")
    }


def _view(body: torch.Tensor, name: str, entry: Any) -> torch.Tensor:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
            code in _NAMES and all(type(size) is int and size >= 0 for size in shape)
        ):
            dtype = DTYPES[_NAMES[code]]
        case _:
            raise ProgramError(f"weight {name!r}: malformed entry")
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if not 0 <= start <= stop <= body.numel() or stop - start != nbytes:
        raise ProgramError(f"weight {name!r}: bytes {start}..{stop} do not hold shape {shape} of {code}")
    if start % dtype.itemsize:
        raise ProgramError(f"weight {name!r}: starts at byte {start}, not aligned to its elements")
    return body[start:stop].view(dtype).view(shape)
