"""Read the body of a run request to its end, within caps and memory, before anything is computed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import msgspec

from upriver.errors import ProtocolError, TooLarge
from upriver.imports import imported
from upriver.protocol import Caps, FrameDecoder, RunRequest, named
from upriver.text import said
from upriver.types import MicroBatch

_ORDER = "a request frame, then data frames"
_MORE = "more data frames than announced"


async def read_body(
    body: AsyncIterator[bytes], caps: Caps, *, room: Callable[[int], None] = lambda nbytes: None
) -> tuple[RunRequest, list[MicroBatch]]:
    """Return a request and its tensors. The body is read whole: a client does not read while it sends.

    Args:
        room: Called with the total of bytes before each chunk is decoded; raises if memory has no room.

    Raises:
        ProtocolError: If the body is malformed, or ends early or late.
        TooLarge: If it has more bytes than allowed.
    """
    fitting = msgspec.structs.replace(caps, payload_bytes=min(caps.payload_bytes, caps.body_bytes))
    decoder, got = FrameDecoder(fitting), 0
    decoder.why_no_data = f"{_ORDER}, got a data frame"
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
                decoder.why_no_data = "" if request.sent else _MORE
                if request.sent:  # data frames follow
                    await imported("torch")
            elif request is not None and isinstance(message, MicroBatch):
                batches.append(_checked(request, len(batches), message))
            else:
                raise ProtocolError(f"{_ORDER}, got {named(message)}")
    if request is None or not decoder.between_frames:
        raise ProtocolError(f"the body ended after {got} bytes, in the middle of a frame")
    expected = len(request.micro_batches) if request.sent else 0
    if len(batches) != expected:
        raise ProtocolError(f"{expected} data frames were announced, got {len(batches)}")
    return request, batches


def _checked(request: RunRequest, index: int, batch: MicroBatch) -> MicroBatch:
    """Check a data frame against its announcement.

    Encode its tree as JSON again, which takes no more memory than arrived.
    """
    if index >= len(request.micro_batches):
        raise ProtocolError(_MORE)
    wanted = (request.micro_batches[index], request.start)
    if (batch.ids, batch.position) != wanted:
        raise ProtocolError(
            f"data frame {index} must hold samples {wanted[0]} at position {wanted[1]}, "
            f"got {batch.ids} at {batch.position}"
        )
    if request.given and len(batch.tensors) != len(batch.ids):
        raise ProtocolError(
            f"data frame {index} must hold a tensor for each of {len(batch.ids)} samples, "
            f"got {len(batch.tensors)}"
        )
    if request.code is None:
        if batch.tree is not None:
            raise ProtocolError(f"data frame {index} has a tree; only samples for a user's code have one")
        return batch
    if not (
        isinstance(batch.tree, list) and batch.tree[:1] == ["l"] and len(batch.tree) == len(batch.ids) + 1
    ):
        raise ProtocolError(f"the tree of data frame {index} must be a list of {len(batch.ids)} samples")
    try:
        return replace(batch, tree=msgspec.Raw(msgspec.json.encode(batch.tree)))
    except (ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"the tree of data frame {index}: {said(str(error))}") from None
