"""The body of a run request: read to its end, within caps and within memory, before anything is computed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from upriver.errors import ProtocolError, TooLarge
from upriver.protocol import Caps, FrameDecoder, RunRequest, named
from upriver.types import MicroBatch


async def read_body(
    body: AsyncIterator[bytes], caps: Caps, *, room: Callable[[int], None] = lambda nbytes: None
) -> tuple[RunRequest, list[MicroBatch]]:
    """A request and the tensors sent along. All of it is read first: a client that sends does not read yet.

    Args:
        body: What comes.
        caps: What may come.
        room: Told how many bytes there are to be, before they are taken; raises if there is no room.

    Raises:
        ProtocolError: If it is malformed, ends early or goes on too long.
        TooLarge: If it has more bytes than allowed.
    """
    fitting = msgspec.structs.replace(caps, payload_bytes=min(caps.payload_bytes, caps.body_bytes))
    decoder, got = FrameDecoder(fitting), 0
    request: RunRequest | None = None
    batches: list[MicroBatch] = []
    async for chunk in body:
        got += len(chunk)
        if got > caps.body_bytes:
            raise TooLarge(f"a request has at most {caps.body_bytes} bytes; ask for less at once")
        room(got)
        for message in decoder.feed(chunk):
            if request is None and isinstance(message, RunRequest):
                request = message
            elif request is not None and isinstance(message, MicroBatch):
                _check_sent(request, len(batches), message)
                batches.append(message)
            else:
                raise ProtocolError(f"a request frame, then data frames, got {named(message)}")
    if request is None or not decoder.between_frames:
        raise ProtocolError(f"the body ended after {got} bytes, in the middle of a frame")
    expected = 0 if request.dataset is not None else len(request.micro_batches)
    if len(batches) != expected:
        raise ProtocolError(f"{expected} data frames were announced, got {len(batches)}")
    return request, batches


def _check_sent(request: RunRequest, index: int, batch: MicroBatch) -> None:
    if request.dataset is not None or index >= len(request.micro_batches):
        raise ProtocolError("more data frames than announced")
    wanted = (request.micro_batches[index], request.start)
    if (batch.ids, batch.position) != wanted:
        raise ProtocolError(
            f"data frame {index} must hold samples {wanted[0]} at position {wanted[1]}, "
            f"got {batch.ids} at {batch.position}"
        )
