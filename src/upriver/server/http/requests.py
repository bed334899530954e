"""What routes ask of a request: how long its body is, how it comes, and whether its client is still there."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from upriver.errors import TooLarge

_ZEROS = bytes(256 * 1024)


@asynccontextmanager
async def while_there(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client goes; its whole request has been read.

    Raises:
        ClientDisconnect: If it went before the block ended.
    """
    limit, watcher = asyncio.timeout(None), asyncio.ensure_future(_gone(receive))

    def cancel(_: asyncio.Future[None]) -> None:
        if not over:
            limit.reschedule(-math.inf)

    over = False
    watcher.add_done_callback(cancel)
    try:
        async with limit:
            try:
                yield
            finally:
                over = True
                watcher.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        raise ClientDisconnect from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def zeros(nbytes: int) -> AsyncIterator[memoryview]:
    """So many bytes, in pieces; between them the loop may learn that nobody reads them any more."""
    for start in range(0, nbytes, len(_ZEROS)):
        yield memoryview(_ZEROS)[: nbytes - start]
        await asyncio.sleep(0)


class IncomingBody:
    """A body as it comes.

    Attributes:
        num_bytes: So far.
        seconds: From its first byte to the last so far; 0 where all of it came at once.
    """

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._first_at = 0.0
        self.num_bytes, self.seconds = 0, 0.0

    def __aiter__(self) -> IncomingBody:
        return self

    async def __anext__(self) -> bytes:
        chunk = await anext(self._body)
        if chunk:  # the last one is none
            now = time.perf_counter()
            if not self.num_bytes:
                self._first_at = now
            self.num_bytes, self.seconds = self.num_bytes + len(chunk), now - self._first_at
        return chunk


def content_length(request: Request) -> int | None:
    """What the request says of its body; None if nothing, or nonsense."""
    return number(request.headers.get("content-length", ""))


def check_length(request: Request, most: int, what: str) -> None:
    """Whether what the request says of its body may be read.

    Args:
        most: Bytes.
        what: Kind of request, for the message.

    Raises:
        TooLarge: If it has more.
    """
    length = content_length(request)
    if length is not None and length > most:
        raise TooLarge(f"a {what} has at most {most} bytes, got {length}")


def number(text: str) -> int | None:
    """A decimal number of 64 bits or so; Python refuses to read endless ones, with an error of its own."""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None
