"""Check that a client that leaves is sent little more, however fast the socket accepts data."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from starlette.responses import StreamingResponse

from upriver.server.http.limits import CORK
from upriver.server.http.requests import zeros
from upriver.server.http.response_stream import CHUNK_BYTES, FrameStream, LastBuffer

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}
CHUNKS = 64
MORE = 5
"""Messages that may be in flight until the server notices that the client has left."""


async def sent_until_gone(response, *, after):
    """Return the messages sent to a client that leaves after some; the socket accepts all at once."""
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


@pytest.mark.parametrize("ends", [True, False])
def test_the_head_of_an_answer_goes_with_the_first_of_its_body(ends):
    """Check also that nothing is held back from then on."""

    async def buffers():
        if not ends:
            yield b"first"
        yield LastBuffer(b"last")

    async def check():
        done = []

        async def send(message):
            done.append(bytes(message.get("body", b"head")))

        async def receive():
            await asyncio.sleep(60)

        response = FrameStream(
            buffers(),
            stack=AsyncExitStack(),
            stall_timeout_s=60,
            deadline=asyncio.get_running_loop().time() + 60,
            on_sent=lambda nbytes: None,
            on_end=done.append,
        )
        await response({**SCOPE, "state": {CORK: done.append}}, receive, send)
        assert done == [True, b"head", *([b"last", False] if ends else [b"first", False, b"last"]), "ok"]

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
