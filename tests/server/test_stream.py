"""An answer to a client that goes: not much more of it is sent, however fast the socket takes it."""

import asyncio
from contextlib import AsyncExitStack

from starlette.responses import StreamingResponse

from upriver.server.requests import zeros
from upriver.server.stream import CHUNK_BYTES, FrameStream

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}
CHUNKS = 64
MORE = 5
"""So many may be on their way until everybody knows that nobody reads them."""


async def sent_until_gone(response, *, after):
    """Messages that were sent to a client that goes when it has so many; a socket that takes all at once."""
    sent, gone = [], asyncio.Event()

    async def send(message):
        sent.append(message)
        if len(sent) == after:
            gone.set()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    await response(SCOPE, receive, send)
    return len(sent)


async def one_buffer():
    yield memoryview(bytes(CHUNKS * CHUNK_BYTES))


def test_frames_are_not_sent_to_nobody():
    async def check():
        sizes, ends = [], []
        response = FrameStream(
            one_buffer(),
            stack=AsyncExitStack(),
            stall_timeout_s=60,
            deadline=asyncio.get_running_loop().time() + 60,
            on_sent=sizes.append,
            on_end=ends.append,
        )
        assert await sent_until_gone(response, after=3) <= 3 + MORE
        assert ends == ["disconnect"]
        assert sum(sizes) <= (2 + MORE) * CHUNK_BYTES

    asyncio.run(check())


def test_a_probe_is_not_sent_to_nobody():
    async def check():
        assert await sent_until_gone(StreamingResponse(zeros(CHUNKS * CHUNK_BYTES)), after=3) <= 3 + MORE

    asyncio.run(check())


def test_zeros():
    async def check(count):
        return b"".join([bytes(piece) async for piece in zeros(count)])

    for count in (0, 1, 300_000):
        assert asyncio.run(check(count)) == bytes(count)
