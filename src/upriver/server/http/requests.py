"""Read from a request: the length of its body, the body as it arrives, and the client's disconnect."""

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
    """Cancel the block when the client disconnects; the request's body must have been read.

    Raises:
        ClientDisconnect: If the client disconnected before the block ended.
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
    """Yield ``nbytes`` zero bytes in pieces; between pieces the loop may notice a disconnect."""
    for start in range(0, nbytes, len(_ZEROS)):
        yield memoryview(_ZEROS)[: nbytes - start]
        await asyncio.sleep(0)


class IncomingBody:
    """A request's body as it arrives.

    Attributes:
        num_bytes: Bytes so far.
        seconds: Seconds from the first byte to the latest; 0 if all arrived at once.
    """

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._first_at = 0.0
        self.num_bytes, self.seconds = 0, 0.0

    def __aiter__(self) -> IncomingBody:
        return self

    async def __anext__(self) -> bytes:
        chunk = await anext(self._body)
        if chunk:  # the last chunk is empty
            now = time.perf_counter()
            if not self.num_bytes:
                self._first_at = now
            self.num_bytes, self.seconds = self.num_bytes + len(chunk), now - self._first_at
        return chunk


def content_length(request: Request) -> int | None:
    """Return the announced length of the body, or None if it is missing or invalid."""
    return number(request.headers.get("content-length", ""))


def check_length(request: Request, most: int, what: str) -> None:
    """Raise `TooLarge` if a request announces more than ``most`` bytes; ``what`` names it in the message."""
    length = content_length(request)
    if length is not None and length > most:
        raise TooLarge(f"a {what} has at most {most} bytes, got {length}")


def number(text: str) -> int | None:
    """Parse a decimal number of at most 19 digits, or return None.

    Python refuses very long ones with its own error.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None
