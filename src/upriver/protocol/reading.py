"""Read frames from a stream: blocking, right into the tensors' memory, or in chunks without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import xxhash

from upriver.errors import ProtocolError
from upriver.protocol.caps import DEFAULT_CAPS, Caps
from upriver.protocol.frames import (
    PREFIX_NBYTES,
    DataHeader,
    FrameKind,
    Message,
    Prefix,
    build_batch,
    parse_data_header,
    parse_message,
    parse_prefix,
)
from upriver.protocol.tensors import PIECE_BYTES
from upriver.tensor_memory import aligned_empty

if TYPE_CHECKING:
    import torch


class Readable(Protocol):
    """A blocking stream: a socket's file, an ``http.client.HTTPResponse``, ``io.BytesIO``."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the start of ``buffer`` and return the number of bytes; 0 at the end of the stream."""
        ...


def read_frame(
    source: Readable,
    caps: Caps = DEFAULT_CAPS,
    *,
    on_bytes: Callable[[int], None] | None = None,
    allocate: Callable[[int], torch.Tensor] = aligned_empty,
) -> Message:
    """Read one frame; a payload goes right into the memory that its tensors will use.

    Args:
        caps: Limits, checked before anything is allocated.
        on_bytes: Called after each piece with its size; may block, which throttles.
        allocate: Returns a 64-byte-aligned uint8 tensor of that many bytes.

    Raises:
        ProtocolError: If the frame is malformed or broken off.
        OSError: If ``source`` raises it.
    """
    note = on_bytes if on_bytes is not None else _ignore
    prefix = parse_prefix(_read(source, PREFIX_NBYTES, note), caps)
    header = _read(source, prefix.header_nbytes, note)
    if prefix.kind is not FrameKind.DATA:
        return parse_message(prefix.kind, header, caps)
    parsed = parse_data_header(header, prefix.payload_nbytes, caps)
    payload = allocate(prefix.payload_nbytes)
    digest = xxhash.xxh3_64()
    for piece in _fill(source, payload.numpy().data, note):
        digest.update(piece)
    return build_batch(parsed, payload, checksum=digest.hexdigest())


def _ignore(_: int) -> None:
    pass


def _read(source: Readable, nbytes: int, note: Callable[[int], None]) -> bytes:
    buffer = bytearray(nbytes)
    for _ in _fill(source, memoryview(buffer), note):
        pass
    return bytes(buffer)


def _fill(source: Readable, buffer: memoryview, note: Callable[[int], None]) -> Iterator[memoryview]:
    done = 0
    while done < len(buffer):
        got = source.readinto(buffer[done : done + PIECE_BYTES])
        if not got:
            raise ProtocolError(f"the stream ended {len(buffer) - done} bytes before the end of a frame")
        yield buffer[done : done + got]
        done += got
        note(got)


class FrameDecoder:
    """Decode frames without I/O: feed it chunks of any size, and receive messages once complete.

    Attributes:
        why_no_data: Error of a data frame, which is refused before memory is taken for it; empty to allow it.
    """

    def __init__(self, caps: Caps = DEFAULT_CAPS) -> None:
        self.why_no_data = ""
        self._caps = caps
        self._prefix: Prefix | None = None
        self._header: DataHeader | None = None
        self._target = bytearray(PREFIX_NBYTES)
        self._view = memoryview(self._target)
        self._payload: torch.Tensor | None = None
        self._done = 0

    @property
    def between_frames(self) -> bool:
        """Return whether the stream may end here."""
        return self._prefix is None and self._done == 0

    def feed(self, chunk: bytes | memoryview) -> Iterator[Message]:
        """Yield the messages that ``chunk`` completes.

        Raises:
            ProtocolError: If a frame is malformed.
        """
        rest = memoryview(chunk)
        while len(rest):
            take = min(len(self._view) - self._done, len(rest))
            self._view[self._done : self._done + take] = rest[:take]
            self._done += take
            rest = rest[take:]
            while self._done == len(self._view):
                message = self._step()
                if message is not None:
                    yield message
                if self.between_frames:
                    break

    def _step(self) -> Message | None:
        """Process a full prefix, header or payload; return a message once it is complete."""
        if self._prefix is None:
            self._prefix = parse_prefix(self._view, self._caps)
            self._expect(bytearray(self._prefix.header_nbytes))
            return None
        if self._payload is not None and self._header is not None:
            message: Message = build_batch(self._header, self._payload)
        elif self._prefix.kind is FrameKind.DATA:
            self._header = parse_data_header(self._view, self._prefix.payload_nbytes, self._caps)
            if self.why_no_data:
                raise ProtocolError(self.why_no_data)
            self._payload = aligned_empty(self._prefix.payload_nbytes)
            self._view, self._done = self._payload.numpy().data, 0
            return None
        else:
            message = parse_message(self._prefix.kind, self._view, self._caps)
        self._prefix = self._header = self._payload = None
        self._expect(bytearray(PREFIX_NBYTES))
        return message

    def _expect(self, target: bytearray) -> None:
        self._view, self._done = memoryview(target), 0
