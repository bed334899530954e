"""Sending an answer: as fast as the client takes it, no faster, and not one byte after it has gone."""

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
"""Bytes given to the socket at once. The HTTP layer joins each chunk with its length: what it copies should
fit the second-level cache (measured in ``benchmarks/wire.py``)."""

LAST_WORDS_S = 1.0
"""After its deadline an answer may take so much longer to tell that it was that."""


class Last(bytes):
    """A buffer after which an answer ends: both go out in one piece."""


class FrameStream(Response):
    """Streams buffers; closes ``stack`` when the last one is out, or when the client is gone.

    Args:
        buffers: What to send, in order; closed early if the client goes.
        stack: What the answer holds on to.
        stall_timeout_s: A client that takes nothing for so long is gone.
        deadline: When the last byte must be out, by the loop's clock, but for `LAST_WORDS_S`.
        on_sent: Told the bytes of each chunk.
        on_end: Told how it ended, once: ``ok``, ``disconnect``, ``stalled``, ``deadline`` or ``error``.
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
        """Send everything, or stop when the client does."""
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
                    more = not isinstance(buffer, Last) or start + CHUNK_BYTES < len(buffer)
                    await self._send(send, buffer[start : start + CHUNK_BYTES], more=more)
                    if corked:
                        cork(corked := False)
                if isinstance(buffer, Last):
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
        if more:  # as long as the socket takes all, nothing else tells that the client has gone
            await asyncio.sleep(0)


async def _broken_off(scope: Scope) -> None:
    """Have no connection wait for a reader who reads nothing, and hold what it has not taken."""
    abort = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the connection is lost by then, and nobody expects more of this answer


def _corking(scope: Scope) -> Callable[[bool], None]:
    corking: Callable[[bool], None] = scope.get("state", {}).get(CORK, lambda corked: None)
    return corking
