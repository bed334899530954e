"""Represent samples of any shape as tensors and a description of their containers, without code.

A node is a number, a string, true, false or null as it is. Everything else is a list whose first item names
the kind:

=============  ======================================================
``["t", i]``   tensor ``i``
``["n", i]``   NumPy array, from tensor ``i``
``["m", i]``   the same as an `np.memmap`, like a slice of an array in a file, but without the file
``["g", i]``   NumPy scalar, from tensor ``i``
``["b", i]``   bytes, from tensor ``i``
``["i", s]``   whole number beyond a float's exact range, in decimal
``["f", s]``   NaN or an infinity, its eight bytes in hex
``["l", …]``   list
``["u", …]``   tuple
``["d", …]``   mapping: key, value, key, value, …; keys are strings, numbers or booleans
=============  ======================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from upriver.errors import ConfigError, ProtocolError
from upriver.tensor_memory import ALIGNMENT, ITEM_NBYTES, aligned_empty, dtype_name

Node: TypeAlias = "bool | int | float | str | list[Any] | None"

MAX_DEPTH = 64
MAX_NODES = 1 << 20
"""Nodes of one tree: enough for a batch of ten thousand samples with a hundred fields each."""

MOST_GAPS = 2
"""Bytes that may be sent for an array with gaps between its elements, as a multiple of its own bytes."""

EXACT = 2**53
"""Largest magnitude of a whole number that every JSON reader reads exactly."""

MAX_DIGITS = 400
"""Digits of a larger whole number."""

_NUMPY: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name) for name in ITEM_NBYTES if name != "bfloat16"
}
_DOUBLE = struct.Struct(">d")


def flatten(value: Any) -> tuple[Node, list[torch.Tensor]]:
    """Convert a sample to a description and tensors; `build` restores an equal sample.

    Tensors are not copied, nor are most arrays.

    Returns:
        The description, and the tensors that it numbers.

    Raises:
        ConfigError: If a part is of a kind that cannot be sent; the message names the kind and its place.
    """
    tensors: list[torch.Tensor] = []
    return _Flat(tensors).node(value, "", 0), tensors


_MORE: dict[Callable[[torch.Tensor], object], str] = {
    lambda tensor: tensor.device.type != "cpu": "on another device than the CPU",
    lambda tensor: tensor.requires_grad: "that requires a gradient",
    lambda tensor: tensor.is_conj() or tensor.is_neg(): "whose conjugate or negative bit is set",
    lambda tensor: vars(tensor): "with attributes of its own",
}
"""Properties of tensors that do not cross, each with its wording in errors."""


class _Flat:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._nodes = 0

    def node(self, value: Any, where: str, depth: int) -> Node:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ConfigError(f"a sample has at most {MAX_NODES} parts, {MAX_DEPTH} deep")
        match value:
            case None | bool() | str():
                return self._scalar(value, where)
            case int():
                self._exactly(value, int, where)
                return value if abs(value) <= EXACT else ["i", str(value)]
            case np.generic() | np.ndarray():
                return self._numpy(value, where)
            case float():
                self._exactly(value, float, where)
                return value if math.isfinite(value) else ["f", _DOUBLE.pack(value).hex()]
            case bytes():
                self._exactly(value, bytes, where)
                return self._number("b", torch.from_numpy(np.frombuffer(value, np.uint8).copy()))
            case torch.Tensor():
                self._exactly(value, torch.Tensor, where)
                return self._number("t", self._sendable(value, where))
        return self._container(value, where, depth)

    def _scalar(self, value: Any, where: str) -> Node:
        if isinstance(value, str):
            self._exactly(value, str, where)
            if not value.isascii() and not _has_code(value):
                raise self._refusal(value, where or "the sample", " with half a surrogate pair")
        result: Node = value
        return result

    def _container(self, value: Any, where: str, depth: int) -> Node:
        match value:
            case list() | tuple():
                kind = list if isinstance(value, list) else tuple
                self._exactly(value, kind, where)
                items = [self.node(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
                return ["l" if kind is list else "u", *items]
            case dict():
                self._exactly(value, dict, where)
                parts: list[Any] = ["d"]
                for key, item in value.items():
                    if type(key) not in (str, int, float, bool):
                        raise self._refusal(key, f"a key of {where or 'the sample'}")
                    parts += [
                        self.node(key, where, depth + 1),
                        self.node(item, f"{where}[{key!r}]", depth + 1),
                    ]
                return parts
        raise self._refusal(value, where or "the sample")

    def _numpy(self, value: np.generic | np.ndarray[Any, Any], where: str) -> Node:
        if value.dtype not in _NUMPY:
            raise self._refusal(value, where or "the sample", f" of {value.dtype}")
        if isinstance(value, np.generic):
            return self._number("g", torch.from_numpy(np.array(value)))
        if type(value) not in (np.ndarray, np.memmap):
            raise self._refusal(value, where or "the sample")
        kind = "n" if type(value) is np.ndarray else "m"
        return self._number(kind, torch.from_numpy(writeable(value)))

    def _sendable(self, value: torch.Tensor, where: str) -> torch.Tensor:
        """Return the tensor if its numbers and strides describe all of it, else raise.

        Any other property would depend on where the sample was made.
        """
        if dtype_name(value.dtype) not in ITEM_NBYTES or value.layout is not torch.strided or value.is_nested:
            raise self._refusal(value, where or "the sample", f" of {value.dtype}, {value.layout}")
        for held, more in _MORE.items():
            if held(value):
                raise self._refusal(value, where or "the sample", f" {more}")
        return value

    def _number(self, kind: str, tensor: torch.Tensor) -> Node:
        self._tensors.append(tensor)
        return [kind, len(self._tensors) - 1]

    def _exactly(self, value: object, kind: type, where: str) -> None:
        """Refuse a subclass, which would arrive as its base class."""
        if type(value) is not kind:
            raise self._refusal(value, where or "the sample")

    def _refusal(self, value: object, where: str, more: str = "") -> ConfigError:
        kind = type(value)
        return ConfigError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}{more}, which cannot be sent: samples are "
            "tensors, NumPy arrays and scalars, numbers, strings, bytes and None, in lists, tuples and dicts"
        )


def writeable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array itself, or a copy that a tensor can share.

    A copy keeps strides and alignment, which decide a kernel's order of computation. Strides that no tensor
    has are not kept. Gaps larger than the data between them are not kept either. In both cases elements are
    packed, with dimensions in the same order.
    """
    nbytes = array.itemsize + sum(
        (size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)
    )
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if odd or not array.size or nbytes > MOST_GAPS * array.nbytes:
        return np.array(array, order="K")
    if array.flags.writeable and array.flags.aligned:
        return array
    skew = array.ctypes.data % ALIGNMENT // array.itemsize * array.itemsize
    memory = aligned_empty(skew + nbytes).zero_().numpy()
    copied = np.ndarray(array.shape, array.dtype, memory, skew, array.strides)
    copied[...] = array
    return copied


def build(node: Node, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the sample that `flatten` converted.

    Arrays and scalars share memory with their tensors.

    Raises:
        ProtocolError: If the description is malformed, or numbers a missing tensor.
    """
    return _Built(tensors).value(node, 0)


def identical(one: Any, other: Any) -> bool:
    """Return whether two samples are bit-identical: numbers, types, shapes and the order of dimensions.

    Raises:
        ConfigError: As `flatten`.
    """
    (ours, tensors), (theirs, others) = flatten(one), flatten(other)
    if msgspec.json.encode(ours) != msgspec.json.encode(theirs) or len(tensors) != len(others):
        return False  # 1, 1.0 and True are equal, but not identical
    return all(map(_same_bits, tensors, others))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or _order(one) != _order(other):
        return False
    if not one.numel():
        return True  # an empty NumPy array may have strides that prevent a view of its bytes
    bits = [each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the strides without gaps, of dimensions where they matter."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return [stride for size, stride in zip(tensor.shape, strides, strict=True) if size > 1 and tensor.numel()]


class _Built:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._nodes = 0
        self._kinds: dict[str, Callable[[list[Any], int], Any]] = {
            "t": lambda items, depth: self._tensor(items),
            "n": lambda items, depth: self._array(items),
            "m": lambda items, depth: self._array(items).view(np.memmap),
            "g": lambda items, depth: self._array(items, scalar=True),
            "b": lambda items, depth: self._bytes(items),
            "i": lambda items, depth: _whole(items),
            "f": lambda items, depth: _double(items),
            "l": lambda items, depth: [self.value(item, depth + 1) for item in items],
            "u": lambda items, depth: tuple(self.value(item, depth + 1) for item in items),
            "d": self._mapping,
        }

    def value(self, node: object, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ProtocolError(f"a sample has at most {MAX_NODES} parts, {MAX_DEPTH} deep")
        if node is None or type(node) in (bool, int, float, str):
            return node
        if (
            not isinstance(node, list)
            or not node
            or not isinstance(node[0], str)
            or node[0] not in self._kinds
        ):
            raise ProtocolError(f"malformed part of a sample: {str(node)[:60]!r}")
        return self._kinds[node[0]](node[1:], depth)

    def _tensor(self, items: list[Any]) -> torch.Tensor:
        if len(items) != 1 or type(items[0]) is not int or not 0 <= items[0] < len(self._tensors):
            raise ProtocolError(f"a sample names one of {len(self._tensors)} tensors, got {str(items)[:60]}")
        return self._tensors[items[0]]

    def _array(self, items: list[Any], *, scalar: bool = False) -> Any:
        tensor = self._tensor(items)
        if tensor.dtype not in _NUMPY.values() or (scalar and tensor.dim()):
            raise ProtocolError(f"no NumPy value is {tensor.dtype} of shape {tuple(tensor.shape)}")
        array = tensor.numpy()
        return array[()] if scalar else array

    def _bytes(self, items: list[Any]) -> bytes:
        tensor = self._tensor(items)
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
            raise ProtocolError(f"bytes are uint8 of shape (n,), got {tensor.dtype} of {tuple(tensor.shape)}")
        return tensor.numpy().tobytes()

    def _mapping(self, items: list[Any], depth: int) -> dict[Any, Any]:
        if len(items) % 2:
            raise ProtocolError("a mapping has a value for each key")
        values = [self.value(item, depth + 1) for item in items]
        keys = values[::2]
        if not all(type(key) in (str, int, float, bool) for key in keys):
            raise ProtocolError("keys are strings, numbers or booleans")
        return dict(zip(keys, values[1::2], strict=True))


def _has_code(text: str) -> bool:
    """Return whether UTF-8, and so JSON, can encode a text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(items: list[Any]) -> int:
    text = items[0] if len(items) == 1 and isinstance(items[0], str) else ""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise ProtocolError(f"a whole number has at most {MAX_DIGITS} digits, got {text[:40]!r}")
    return int(text)


def _double(items: list[Any]) -> float:
    text = items[0] if len(items) == 1 and isinstance(items[0], str) else ""
    try:
        value: float = _DOUBLE.unpack(bytes.fromhex(text))[0]
    except (ValueError, struct.error):
        raise ProtocolError(f"a float is eight bytes in hex, got {text[:40]!r}") from None
    return value
