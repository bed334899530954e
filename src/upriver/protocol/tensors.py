"""Convert tensors to bytes and back, bit for bit: with values, strides, alignment and shared storage.

A payload is a row of *regions*, one for each storage, each at a multiple of 64 bytes. A region holds the
range of the source storage that its tensors use. The range is widened down to a multiple of 64 bytes from the
storage's start. The region begins with ``skew`` bytes of padding, the source storage's own distance from a
64-byte boundary. So ``data_ptr() % 64`` is the same on both sides. Kernels choose their path, and with it the
low bits, by alignment and strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from upriver.errors import ProtocolError
from upriver.protocol.caps import MAX_INTEGER, Caps
from upriver.tensor_memory import ALIGNMENT, ITEM_NBYTES, aligned, dtype_name

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 256 * 1024
"""Bytes copied or read at once: the checksum then finds them still in the second-level cache."""

LEAST_BOOLS, MAX_BOOLS_PER_BYTE = 1 << 20, 4
"""Bool elements that a payload may hold: a base, and a factor on its bytes. Each bool is checked, which takes
time where strides overlap. A few kB could otherwise stand for as many elements as a payload may have, in each
of a thousand tensors. Several tensors over one storage remain possible."""

_PADDING = memoryview(bytes(2 * ALIGNMENT))


class StorageHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe one region of the payload: padding, then data.

    Attributes:
        nbytes: Bytes of data.
        skew: Bytes of padding before them, 0 to 63.
    """

    nbytes: int
    skew: int


class TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe one tensor: a strided view of a region.

    Attributes:
        dtype: Name of the element type, as ``float32``.
        shape: Elements along each dimension.
        strides: Elements between neighbours along each dimension, as in PyTorch.
        storage: Index of its region among the storages.
        offset: Elements before its first one in the region.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int


def region_starts(storages: Sequence[StorageHeader]) -> tuple[list[int], int]:
    """Return the start of each region in the payload, and the length of the payload."""
    starts, end = [], 0
    for storage in storages:
        start = aligned(end)
        starts.append(start)
        end = start + storage.skew + storage.nbytes
    return starts, end


# ------------------------------------------------------------------------------------------ sending


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Positions of tensors in a payload. The parts are views of the tensors' own memory, without a copy.

    Attributes:
        parts: Bytes of the payload in order, padding included.
        nbytes: Sum of the parts' sizes.
    """

    tensors: tuple[TensorHeader, ...]
    storages: tuple[StorageHeader, ...]
    parts: tuple[memoryview, ...]
    nbytes: int

    def checksum(self) -> str:
        """Return ``xxh3_64`` of the payload, in hex."""
        digest = xxhash.xxh3_64()
        for part in self.parts:
            digest.update(part)
        return digest.hexdigest()

    def write_into(self, buffer: memoryview) -> str:
        """Copy the payload to the start of ``buffer``.

        Returns:
            Its checksum, computed from the written bytes while they are still in the cache.

        Raises:
            ProtocolError: If the payload does not fit.
        """
        if len(buffer) < self.nbytes:
            raise ProtocolError(f"a payload of {self.nbytes} bytes does not fit {len(buffer)} bytes")
        target, digest, end = np.frombuffer(buffer, dtype=np.uint8), xxhash.xxh3_64(), 0
        for piece in self.pieces(PIECE_BYTES):
            written = target[end : end + len(piece)]
            written[...] = np.frombuffer(piece, dtype=np.uint8)  # no GIL, unlike a memoryview's copy
            digest.update(written.data)
            end += len(piece)
        return digest.hexdigest()

    def pieces(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the parts in pieces of at most ``nbytes``."""
        for part in self.parts:
            for start in range(0, len(part), nbytes):
                yield part[start : start + nbytes]


def lay_out(tensors: Sequence[torch.Tensor]) -> Layout:
    """Plan a payload for ``tensors``; each storage is sent once, and only its used range.

    Raises:
        ProtocolError: If a tensor is sparse, without memory, or of a dtype that may not cross.
    """
    plain = [_plain(tensor) for tensor in tensors]
    used: dict[object, _Used] = {}
    for index, tensor in enumerate(plain):
        used.setdefault(_key(tensor, index), _Used(tensor, len(used))).widen(tensor)
    storages = tuple(each.header() for each in used.values())
    headers = [used[_key(tensor, index)].tensor_header(tensor) for index, tensor in enumerate(plain)]
    parts = tuple(_parts(list(used.values()), storages))
    return Layout(tensors=tuple(headers), storages=storages, parts=parts, nbytes=region_starts(storages)[1])


def _key(tensor: torch.Tensor, index: int) -> object:
    """Return the key that tensors on one storage share; an empty tensor shares nothing."""
    storage = tensor.untyped_storage()
    return (storage.device, storage.data_ptr(), storage.nbytes()) if tensor.numel() else index


class _Used:
    """The range of one source storage that its tensors use."""

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.storage = tensor.untyped_storage()
        self.index = index
        self.start = self.stop = 0
        self.fresh = True

    def widen(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        low = int(tensor.storage_offset()) * tensor.itemsize
        high = low + (_last_element(tensor.shape, tensor.stride()) + 1) * tensor.itemsize
        low -= low % ALIGNMENT
        self.start = low if self.fresh else min(self.start, low)
        self.stop = max(self.stop, high)
        self.fresh = False

    def header(self) -> StorageHeader:
        nbytes = self.stop - self.start
        return StorageHeader(nbytes=nbytes, skew=self.storage.data_ptr() % ALIGNMENT if nbytes else 0)

    def tensor_header(self, tensor: torch.Tensor) -> TensorHeader:
        offset = int(tensor.storage_offset()) - self.start // tensor.itemsize if tensor.numel() else 0
        return TensorHeader(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            storage=self.index,
            offset=offset,
        )

    def bytes(self) -> memoryview:
        """Return the used range as a view; an accelerator's memory is first copied to the host."""
        import torch

        raw = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        raw = raw.set_(self.storage, self.start, (self.stop - self.start,), (1,))
        return raw.cpu().numpy().data


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ProtocolError(
            f"only dense tensors with memory can be sent, got {tensor.layout} on {tensor.device}"
        )
    if dtype_name(tensor.dtype) not in ITEM_NBYTES:
        raise ProtocolError(f"dtype {tensor.dtype} cannot be sent; allowed are {', '.join(ITEM_NBYTES)}")
    if tensor.data_ptr() % tensor.itemsize:
        raise ProtocolError(f"a tensor of {tensor.dtype} must lie at a multiple of {tensor.itemsize} bytes")
    # Lazy conjugation and negation are flags, not bytes: apply them to the bytes.
    return tensor.detach().resolve_conj().resolve_neg()


def _parts(used: Sequence[_Used], storages: Sequence[StorageHeader]) -> Iterator[memoryview]:
    end = 0
    for each, header in zip(used, storages, strict=True):
        padding = aligned(end) - end + header.skew
        if padding:
            yield _PADDING[:padding]
        if header.nbytes:
            yield each.bytes()
        end = aligned(end) + header.skew + header.nbytes


# ---------------------------------------------------------------------------------------- receiving


def check_headers(
    tensors: Sequence[TensorHeader], storages: Sequence[StorageHeader], payload_nbytes: int, caps: Caps
) -> None:
    """Check a header's statements about its payload, before any of the payload is read.

    Raises:
        ProtocolError: If anything is out of bounds; the message names it and the allowed range.
    """
    if len(tensors) > caps.tensors:
        raise ProtocolError(f"a frame may carry {caps.tensors} tensors, got {len(tensors)}")
    if len(storages) > len(tensors):
        raise ProtocolError(f"{len(storages)} storages for {len(tensors)} tensors")
    for storage in storages:
        _within("storage size", storage.nbytes, caps.payload_bytes)
        _within("storage skew", storage.skew, ALIGNMENT - 1)
    expected = region_starts(storages)[1]
    if expected != payload_nbytes:
        raise ProtocolError(f"the storages take {expected} bytes but the payload has {payload_nbytes}")
    for tensor in tensors:
        _check_tensor(tensor, storages, caps)
    looked_at = sum(math.prod(_without_repeats(tensor)) for tensor in tensors if tensor.dtype == "bool")
    _within("elements of bool tensors", looked_at, LEAST_BOOLS + MAX_BOOLS_PER_BYTE * payload_nbytes)


def build_tensors(
    tensors: Sequence[TensorHeader], storages: Sequence[StorageHeader], payload: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return views of ``payload`` (uint8, 64-byte aligned) as the checked headers describe.

    Raises:
        ProtocolError: If a bool holds anything but 0 and 1.
    """
    import torch

    whole, first = payload.untyped_storage(), payload.storage_offset()
    regions = []
    for start, storage in zip(region_starts(storages)[0], storages, strict=True):
        begin = first + start + storage.skew
        region = whole[begin : begin + storage.nbytes]
        if not isinstance(region, torch.UntypedStorage):  # a slice of a storage is a storage
            raise ProtocolError("the payload has no storage to view")
        regions.append(region)
    return tuple(_view(tensor, regions[tensor.storage]) for tensor in tensors)


def _view(header: TensorHeader, region: torch.UntypedStorage) -> torch.Tensor:
    import torch

    view = torch.empty(0, dtype=getattr(torch, header.dtype), device="cpu")
    view.set_(region, header.offset, header.shape, header.strides)
    if header.dtype == "bool" and view.numel():
        raw = torch.empty(0, dtype=torch.uint8, device="cpu")
        raw.set_(region, header.offset, _without_repeats(header), header.strides)
        if int(raw.max()) > 1:
            raise ProtocolError("a bool tensor may hold 0 and 1 only")
    return view


def _without_repeats(tensor: TensorHeader) -> tuple[int, ...]:
    """Return the shape, with an element that a stride of 0 repeats counted once."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    return tuple(size if stride else min(size, 1) for size, stride in pairs)


def _check_tensor(tensor: TensorHeader, storages: Sequence[StorageHeader], caps: Caps) -> None:
    if tensor.dtype not in ITEM_NBYTES:
        raise ProtocolError(f"unknown dtype {tensor.dtype[:40]!r}; allowed are {', '.join(ITEM_NBYTES)}")
    _within("number of dimensions", len(tensor.shape), caps.dims)
    if len(tensor.shape) != len(tensor.strides):
        raise ProtocolError(f"{len(tensor.shape)} sizes but {len(tensor.strides)} strides")
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        _within("size", size, MAX_INTEGER)
        _within("stride", stride, MAX_INTEGER)
    _within("storage index", tensor.storage, len(storages) - 1)
    _within("offset", tensor.offset, MAX_INTEGER)
    itemsize = ITEM_NBYTES[tensor.dtype]
    # Kernels use aligned instructions, which crash on a misaligned complex number.
    if storages[tensor.storage].skew % itemsize:
        raise ProtocolError(f"{tensor.dtype} must lie at a multiple of {itemsize} bytes")
    # A stride of 0 stands for more bytes than it holds, and a size of 0 hides the other sizes: cap the
    # product.
    _within("tensor bytes", math.prod(max(size, 1) for size in tensor.shape) * itemsize, caps.payload_bytes)
    elements = 0 if 0 in tensor.shape else _last_element(tensor.shape, tensor.strides) + 1
    stop = (tensor.offset + elements) * itemsize
    _within("end of the tensor in its storage", stop, storages[tensor.storage].nbytes)


def _last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _within(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ProtocolError(f"{name} must lie in 0..{most}, got {value}")
