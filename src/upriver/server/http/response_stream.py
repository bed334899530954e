"""Stream a response at the client's pace, and stop as soon as the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from upriver.server.http.limits import ABORT, CORK
from upriver.server.http.requests import while_there

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Bytes passed to the socket at once. The HTTP layer joins each chunk with its length: the copy should fit
the second-level cache (measured in ``benchmarks/wire``)."""

LAST_WORDS_S = 1.0
"""Seconds that a response gets after its deadline to report that it missed it."""


class LastBuffer(bytes):
    """The final buffer of a response: the buffer and the end of the response leave in one piece."""


class FrameStream(Response):
    """Stream buffers, and close ``stack`` after the last one or when the client disconnects.

    Args:
        buffers: Buffers to send, in order; closed early if the client disconnects.
        stall_timeout_s: Seconds after which a client that reads nothing is dropped.
        deadline: Time by the loop's clock when the last byte must be sent, but for `LAST_WORDS_S`.
        on_sent: Called with the number of bytes of each chunk.
        on_end: Called once with the outcome: ``ok``, ``disconnect``, ``stalled``, ``deadline`` or ``error``.
    """

    media_type = "application/vnd.upriver.frames"

    def __init__(
        self,
        buffers: AsyncGenerator[bytes | memoryview],
        *,
        stack: AsyncExitStack,
        stall_timeout_s: float,
        deadline: float,
        on_sent: Callable[[int], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.status_code = 200
        self.body = b""
        self.background = None
        self._buffers = buffers
        self._stack = stack
        self._stall_timeout_s, self._deadline = stall_timeout_s, deadline
        self._on_sent, self._on_end = on_sent, on_end
        self.init_headers({"cache-control": "no-store"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all buffers, or stop when the client disconnects."""
        late, how = asyncio.timeout_at(self._deadline + LAST_WORDS_S), "error"
        try:
            async with late, while_there(receive):
                await self._send_all(send, _corking(scope))
            how = "ok"
        except (ClientDisconnect, asyncio.CancelledError) as error:
            how = "disconnect"
            if isinstance(error, asyncio.CancelledError):
                raise
        except TimeoutError:
            how = "deadline" if late.expired() else "stalled"
        finally:
            await self._stack.aclose()
            self._on_end(how)
        if how == "stalled":
            log.warning("dropped a client that took nothing for %g s", self._stall_timeout_s)
        if how in ("deadline", "stalled"):
            await _broken_off(scope)

    async def _send_all(self, send: Send, cork: Callable[[bool], None]) -> None:
        cork(True)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        corked = True
        try:
            async for buffer in self._buffers:
                for start in range(0, len(buffer), CHUNK_BYTES):
                    more = not isinstance(buffer, LastBuffer) or start + CHUNK_BYTES < len(buffer)
                    await self._send(send, buffer[start : start + CHUNK_BYTES], more=more)
                    if corked:
                        cork(corked := False)
                if isinstance(buffer, LastBuffer):
                    return
                del buffer
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if corked:
                cork(False)
            await self._buffers.aclose()

    async def _send(self, send: Send, chunk: bytes | memoryview, *, more: bool) -> None:
        async with asyncio.timeout(self._stall_timeout_s):
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._on_sent(len(chunk))
        if more:  # while the socket accepts everything, only this tells that the client has disconnected
            await asyncio.sleep(0)


async def _broken_off(scope: Scope) -> None:
    """Abort the connection of a client that reads nothing, to free the bytes it has not read."""
    abort = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the connection is lost by then, and no more of this response is expected


def _corking(scope: Scope) -> Callable[[bool], None]:
    corking: Callable[[bool], None] = scope.get("state", {}).get(CORK, lambda corked: None)
    return corking
