"""What routes ask of a request: how long its body is, how it comes, and whether its client is still there."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from upriver.errors import TooLarge

_T = TypeVar("_T")

_ZEROS = bytes(256 * 1024)


async def while_there(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Work for a client as long as it is there; its whole request has been read.

    Raises:
        ClientDisconnect: If it went first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def zeros(nbytes: int) -> AsyncIterator[memoryview]:
    """So many bytes, in pieces; between them the loop may learn that nobody reads them any more."""
    for start in range(0, nbytes, len(_ZEROS)):
        yield memoryview(_ZEROS)[: nbytes - start]
        await asyncio.sleep(0)


class Arriving:
    """A body as it comes.

    Attributes:
        num_bytes: So far.
        seconds: From its first byte to the last so far; 0 where all of it came at once.
    """

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._first_at = 0.0
        self.num_bytes, self.seconds = 0, 0.0

    def __aiter__(self) -> Arriving:
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
