"""Read stored tensors: ``.npy`` without pickle, and ``.safetensors`` with one tensor.

The parsers are our own: the sizes that a file claims must agree with its length before memory of that size is
allocated.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from upriver.pipeline.errors import SampleError

MAX_HEAD_BYTES = 8 + 2**20
"""Most bytes of a ``.safetensors`` file up to the end of its header."""

_MAX_DIMS = 16
_MAX_EMPTY = 2**40  # product of the other sizes of a tensor without elements: torch has a limit, too
_SHOWN, _SHOWN_CHARS = 5, 60  # of names in an error
_NPY_DTYPES: dict[str, torch.dtype] = {
    np.dtype(name).newbyteorder("<").str: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "int64", "int32", "int16", "int8"),
        *("uint64", "uint32", "uint16", "uint8", "complex128", "complex64", "bool"),
    )
}
"""Types that ``torch.from_numpy`` accepts, by their names in little-endian order."""

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_npy(data: bytes | memoryview) -> torch.Tensor:
    """Read a ``.npy`` file of version 1, 2 or 3 as a fresh, contiguous tensor.

    The tensor has the type that ``torch.from_numpy`` gives; the bytes of big-endian files are swapped.

    Raises:
        SampleError: If the data are no such file, hold Python objects or another unsupported dtype, or differ
            in length from their header.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
            (3, 0): np.lib.format.read_array_header_2_0,  # differs in names of fields, which are refused
        }
        if version not in readers:
            raise ValueError(f"version {version[0]}.{version[1]}; allowed: 1.0, 2.0, 3.0")
        shape, fortran_order, dtype = readers[version](stream)
    except Exception as exc:  # the header is a Python literal: parsing a crafted one can fail in many ways
        raise SampleError(f"not a .npy file: {exc or type(exc).__name__}".split("\n", 1)[0]) from None
    kind = dtype.newbyteorder("<").str
    if kind not in _NPY_DTYPES:
        raise SampleError(
            f".npy dtype {dtype.str!r}; allowed: {', '.join(_NPY_DTYPES)}, and the same in big-endian order"
        )
    body = memoryview(data)[stream.tell() :]
    stored = _fresh(body, _NPY_DTYPES[kind], shape[::-1] if fortran_order else shape)
    if not dtype.isnative:
        stored.numpy().byteswap(inplace=True)
    return stored.permute(tuple(reversed(range(stored.dim())))).contiguous() if fortran_order else stored


def read_safetensors(data: bytes | memoryview) -> torch.Tensor:
    """Read the only tensor of a ``.safetensors`` file, or the one named ``tensor``, as a fresh tensor.

    Raises:
        SampleError: If the data are no such file, hold several tensors and none named ``tensor``, or their
            offsets, shape and dtype do not agree.
    """
    tensors, body = _header(memoryview(data))
    problem = why_unclear(list(tensors))
    if problem:
        raise SampleError(f"a .safetensors file {problem}")
    try:
        dtype, shape, start, stop = _entry(tensors.get("tensor", next(iter(tensors.values()))))
    except (ValueError, TypeError, KeyError) as exc:
        raise SampleError(f"not a .safetensors file: {exc}".split("\n", 1)[0]) from None
    if dtype not in _SAFETENSORS_DTYPES:
        raise SampleError(f".safetensors dtype {dtype!r}; allowed: {', '.join(_SAFETENSORS_DTYPES)}")
    if not 0 <= start <= stop <= len(body):
        raise SampleError(f".safetensors offsets {start} to {stop} leave its {len(body)} bytes of data")
    return _fresh(body[start:stop], _SAFETENSORS_DTYPES[dtype], shape)


def tensor_names(head: bytes | memoryview) -> list[str]:
    """Return the names of the tensors in a ``.safetensors`` file.

    Args:
        head: The file, or its first `MAX_HEAD_BYTES`.

    Raises:
        SampleError: If it is no such file.
    """
    return list(_header(memoryview(head))[0])


def why_unclear(names: Sequence[str]) -> str:
    """Return why no tensor is the sample; empty if one is: the only one, or one named ``tensor``."""
    if len(names) == 1 or "tensor" in names:
        return ""
    shown = ", ".join(f"{name[:_SHOWN_CHARS]!r}" for name in names[:_SHOWN]) + ", …" * (len(names) > _SHOWN)
    holds = f"{len(names)} ({shown})" if names else "none"
    return f"must hold one tensor, or one named 'tensor'; it holds {holds}"


def _header(view: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return the entry of each tensor, unchecked, and the data behind the header."""
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or size > min(len(view), MAX_HEAD_BYTES) - 8:
        raise SampleError(f"not a .safetensors file: {len(view)} bytes with a header of {size}")
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as exc:
        raise SampleError(f"not a .safetensors file: {exc}".split("\n", 1)[0]) from None
    return tensors, view[8 + size :]


def _entry(entry: Any) -> tuple[str, list[int], int, int]:
    """Return type, shape and place of a tensor, from an unchecked entry."""
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or not all(type(number) is int for number in (start, stop, *shape)):
        raise TypeError("dtype must be a string, shape and offsets whole numbers")
    return dtype, shape, start, stop


def _fresh(body: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that owns its memory, which torch aligns to 64 bytes."""
    if len(shape) > _MAX_DIMS or any(type(size) is not int or size < 0 for size in shape):
        raise SampleError(
            f"a tensor of shape {str(tuple(shape))[:100]}; at most {_MAX_DIMS} sizes, each at least 0"
        )
    if 0 in shape and math.prod(size or 1 for size in shape) > _MAX_EMPTY:
        raise SampleError(f"a tensor of shape {str(tuple(shape))[:100]} without an element")
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(body):
        raise SampleError(
            f"a {dtype} tensor of shape {tuple(shape)} takes {needed} bytes, {len(body)} are stored"
        )
    out = torch.empty(needed, dtype=torch.uint8, device="cpu")
    out.numpy()[...] = np.frombuffer(body, dtype=np.uint8)
    if dtype is torch.bool and needed and int(out.max()) > 1:
        raise SampleError("a bool tensor with bytes other than 0 and 1")
    return out.view(dtype).view(tuple(shape))
