"""Sending an answer: as fast as the client takes it, no faster, and not one byte after it has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Bytes given to the socket at once. The HTTP layer joins each chunk with its length: what it copies should
fit the second-level cache (measured in ``benchmarks/wire.py``)."""


class FrameStream(Response):
    """Streams buffers; closes ``stack`` when the last one is out, or when the client is gone.

    Args:
        buffers: What to send, in order; closed early if the client goes.
        stack: What the answer holds on to.
        stall_timeout_s: A client that takes nothing for so long is gone.
        on_sent: Told the bytes of each chunk.
    """

    media_type = "application/vnd.upriver.frames"

    def __init__(
        self,
        buffers: AsyncGenerator[bytes | memoryview],
        *,
        stack: AsyncExitStack,
        stall_timeout_s: float,
        on_sent: Callable[[int], None],
    ) -> None:
        self.status_code = 200
        self.body = b""
        self.background = None
        self._buffers = buffers
        self._stack = stack
        self._stall_timeout_s = stall_timeout_s
        self._on_sent = on_sent
        self.init_headers({"cache-control": "no-store"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client does."""
        watcher = asyncio.create_task(_until_gone(receive))
        sender = asyncio.create_task(self._send_all(send))
        try:
            await asyncio.wait({watcher, sender}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watcher, sender):
                task.cancel()
            await asyncio.gather(watcher, sender, return_exceptions=True)
            await self._stack.aclose()
        if not sender.cancelled():
            self._report(sender)

    def _report(self, sender: asyncio.Task[None]) -> None:
        try:
            sender.result()
        except TimeoutError:
            log.warning("dropped a client that took nothing for %g s", self._stall_timeout_s)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for buffer in self._buffers:
                for start in range(0, len(buffer), CHUNK_BYTES):
                    await self._send(send, buffer[start : start + CHUNK_BYTES])
                del buffer
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._buffers.aclose()

    async def _send(self, send: Send, chunk: bytes | memoryview) -> None:
        async with asyncio.timeout(self._stall_timeout_s):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._on_sent(len(chunk))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
