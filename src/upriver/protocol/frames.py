"""Encode and parse frames: a fixed prefix, a JSON header, a payload. `reading` reads them from a stream.

==========  =====  =====================================================
bytes       type   field
==========  =====  =====================================================
0 to 3      bytes  magic, ``UPRV``
4 to 5      u16    version of the protocol
6           u8     kind (`FrameKind`)
7           u8     0
8 to 11     u32    length of the header
12 to 19    u64    length of the payload, 0 unless the kind is ``DATA``
==========  =====  =====================================================

Integers of the prefix are big-endian; tensors are little-endian, as in memory on every platform that PyTorch
supports. No sockets here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from upriver.errors import ProtocolError, UpriverError
from upriver.protocol.caps import DEFAULT_CAPS, VERSION, Caps
from upriver.protocol.messages import (
    Index,
    Position,
    RunRequest,
    StatsHeader,
    check_version,
    decode_json,
    error_body,
    error_from,
)
from upriver.protocol.tensors import (
    Layout,
    StorageHeader,
    TensorHeader,
    build_tensors,
    check_headers,
    lay_out,
)
from upriver.types import MicroBatch, Timings

if TYPE_CHECKING:
    import torch

MAGIC = b"UPRV"
PREFIX = struct.Struct(">4sHBBIQ")
PREFIX_NBYTES = PREFIX.size


class FrameKind(IntEnum):
    """Kind of a frame's content."""

    DATA = 1
    ERROR = 2
    STATS = 3
    END = 4
    REQUEST = 5


@dataclass(frozen=True, slots=True)
class End:
    """The last frame of an answer; an answer without it was broken off."""


Message = MicroBatch | Timings | UpriverError | RunRequest | End
"""Decoded frame; the type shows the kind."""


def named(message: Message) -> str:
    """Return a message's kind in words, for errors about an unexpected message."""
    match message:
        case MicroBatch():
            return "a data frame"
        case Timings():
            return "a stats frame"
        case UpriverError():
            return "an error frame"
        case RunRequest():
            return "a request frame"
        case End():
            return "an end frame"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The fixed start of a frame."""

    kind: FrameKind
    header_nbytes: int
    payload_nbytes: int


class DataHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Header of a data frame: a `MicroBatch` without its bytes.

    Attributes:
        ids: Sample ids of the micro-batch.
        position: Position at which its tensors stand.
        skipped: Ids of samples that were skipped.
        tensors: Tensors, as views on the storages.
        storages: Storages in the payload, in order.
        checksum: ``xxh3_64`` of the payload, in hex.
        tree: Structure that holds the tensors of code's samples.
    """

    ids: tuple[Index, ...]
    position: Position
    skipped: tuple[Index, ...]
    tensors: tuple[TensorHeader, ...]
    storages: tuple[StorageHeader, ...]
    checksum: str
    tree: Any = None


# ------------------------------------------------------------------------------------------ sending


def data_head(batch: MicroBatch, layout: Layout, checksum: str) -> bytes:
    """Return prefix and header of a data frame for a payload that is already laid out."""
    header = DataHeader(
        ids=batch.ids,
        position=batch.position,
        skipped=batch.skipped,
        tensors=layout.tensors,
        storages=layout.storages,
        checksum=checksum,
        tree=batch.tree,
    )
    return frame_head(FrameKind.DATA, msgspec.json.encode(header), layout.nbytes)


def encode_data(batch: MicroBatch) -> tuple[bytes, list[memoryview]]:
    """Return a data frame as its head (prefix and header) and its payload's parts, without a copy."""
    layout = lay_out(batch.tensors)
    return data_head(batch, layout, layout.checksum()), list(layout.parts)


def encode(message: Message) -> list[bytes | memoryview]:
    """Return any message as the buffers to send, in order."""
    match message:
        case MicroBatch():
            head, parts = encode_data(message)
            return [head, *parts]
        case Timings():
            header = StatsHeader(
                phases=dict(message.phases),
                stages=dict(message.stages),
                expected_wait_s=message.expected_wait_s,
                k=message.k,
            )
            return [frame_head(FrameKind.STATS, msgspec.json.encode(header))]
        case UpriverError():
            return [frame_head(FrameKind.ERROR, msgspec.json.encode(error_body(message)))]
        case RunRequest():
            return [frame_head(FrameKind.REQUEST, msgspec.json.encode(message))]
        case End():
            return [frame_head(FrameKind.END, b"")]


def frame_head(kind: FrameKind, header: bytes, payload_nbytes: int = 0) -> bytes:
    """Return prefix and header of a frame."""
    return PREFIX.pack(MAGIC, VERSION, kind, 0, len(header), payload_nbytes) + header


# ---------------------------------------------------------------------------------------- receiving


def parse_prefix(data: bytes | memoryview, caps: Caps = DEFAULT_CAPS) -> Prefix:
    """Parse the first ``PREFIX_NBYTES`` bytes of a frame, and check them against ``caps``.

    Raises:
        ProtocolError: If they are not a frame's prefix, of another version, or larger than allowed.
    """
    if len(data) != PREFIX_NBYTES:
        raise ProtocolError(f"a frame starts with {PREFIX_NBYTES} bytes, got {len(data)}")
    magic, version, kind, zero, header_nbytes, payload_nbytes = PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}, got {magic!r}")
    check_version(version)
    if kind not in FrameKind.__members__.values() or zero:
        raise ProtocolError(f"unknown kind of frame {kind} (flags {zero})")
    if header_nbytes > caps.header_bytes:
        raise ProtocolError(f"a header has at most {caps.header_bytes} bytes, got {header_nbytes}")
    most = caps.payload_bytes if kind == FrameKind.DATA else 0
    if payload_nbytes > most:
        raise ProtocolError(f"a payload of this kind has at most {most} bytes, got {payload_nbytes}")
    return Prefix(FrameKind(kind), header_nbytes, payload_nbytes)


def parse_data_header(
    header: bytes | memoryview, payload_nbytes: int, caps: Caps = DEFAULT_CAPS
) -> DataHeader:
    """Parse the header of a data frame, and check all that it says about the payload.

    Raises:
        ProtocolError: If anything is malformed or out of bounds.
    """
    parsed = decode_json(header, DataHeader, "header of a data frame")
    check_headers(parsed.tensors, parsed.storages, payload_nbytes, caps)
    if len(parsed.ids) > caps.samples or len(parsed.skipped) > len(parsed.ids):
        raise ProtocolError(
            f"at most {caps.samples} ids, got {len(parsed.ids)} ({len(parsed.skipped)} skipped)"
        )
    strange = set(parsed.skipped).difference(parsed.ids)
    if strange:
        raise ProtocolError(f"skipped samples must be among a frame's ids, and {min(strange)} is not")
    return parsed


def build_batch(header: DataHeader, payload: torch.Tensor, *, checksum: str | None = None) -> MicroBatch:
    """Return the micro-batch of a data frame; its tensors are views of ``payload``.

    Args:
        header: Result of `parse_data_header`.
        payload: uint8, 64-byte aligned, complete.
        checksum: ``xxh3_64`` of the payload in hex, if the reader already computed it.

    Raises:
        ProtocolError: If the payload differs from the sent one.
    """
    got = checksum if checksum is not None else xxhash.xxh3_64(payload.numpy().data).hexdigest()
    if got != header.checksum:
        raise ProtocolError(f"checksum of the payload is {got}, the header says {header.checksum[:40]!r}")
    return MicroBatch(
        ids=header.ids,
        position=header.position,
        skipped=header.skipped,
        tensors=build_tensors(header.tensors, header.storages, payload),
        tree=header.tree,
    )


def parse_message(kind: FrameKind, header: bytes | memoryview, caps: Caps = DEFAULT_CAPS) -> Message:
    """Parse a frame without a payload (`FrameKind.DATA` has one, see `build_batch`).

    Raises:
        ProtocolError: If the header is malformed.
    """
    match kind:
        case FrameKind.ERROR:
            return error_from(decode_json(header, dict, "header of an error frame"))
        case FrameKind.STATS:
            return decode_json(header, StatsHeader, "header of a stats frame").timings()
        case FrameKind.REQUEST:
            request = decode_json(header, RunRequest, "request")
            request.check(caps)
            return request
        case FrameKind.END:
            if len(header):
                raise ProtocolError(f"an end frame has no header, got {len(header)} bytes")
            return End()
        case FrameKind.DATA:
            raise ProtocolError("a data frame has a payload")
