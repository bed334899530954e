"""A store that responds on command, and a sink, for tests of streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from upriver.coldstart.fetch.concurrency import ConcurrencySearch
from upriver.coldstart.format import checkpoint as source
from upriver.coldstart.format import manifest
from upriver.coldstart.format.checkpoint import TensorLocation, WeightSource
from upriver.errors import UpriverError
from upriver.store import Store
from upriver.store.buffers import BufferSequence

WAIT_S = 60.0


def published(store: Store, path: str) -> WeightSource:
    """Return the source of weights published under that name."""
    return source.published(store, path, manifest.read(store, path))


def lying(store: Any, places: Iterable[tuple[str, int, int]], **changed: Any) -> WeightSource:
    """Place tensors anywhere, as in a foreign file: without checksums."""
    tensors = tuple(
        TensorLocation(
            name=f"t{number}", dtype="uint8", shape=(stop - start,), path=path, start=start, stop=stop
        )
        for number, (path, start, stop) in enumerate(places)
    )
    known = {"ties": {}, "etags": {}, "chunk_bytes": 1 << 20, "ordered": False}
    return WeightSource(store=store, path="net", tensors=tensors, **known | changed)


class Memory:
    """A sink that checks a stream's promises.

    Attributes:
        got: Index to a tensor's bytes, as they were when it was filled.
        asked: Indices that got memory, in order.
        error: The error at the end, if any.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.got: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.error: UpriverError | None = None
        self.threads: set[str] = set()
        self._rooms: dict[int, bytearray] = {}

    def room(self, index: int) -> memoryview:
        self._called()
        assert index not in self._rooms
        tensor = self.source.tensors[index]
        assert tensor.stop > tensor.start
        self.asked.append(index)
        self._rooms[index] = bytearray(tensor.stop - tensor.start)
        return memoryview(self._rooms[index])

    def filled(self, index: int) -> None:
        self._called()
        assert index not in self.got
        self.got[index] = bytes(self._rooms.get(index, b""))

    def failed(self, error: UpriverError) -> None:
        self._called()
        assert isinstance(error, UpriverError)
        self.error = error

    def _called(self) -> None:
        assert self.error is None
        self.threads.add(threading.current_thread().name)


@dataclass(eq=False)
class Asked:
    """A request that a scripted store received.

    Attributes:
        start: First byte.
        nbytes: Number of bytes requested.
        ended: Whether the request is complete or was cancelled.
    """

    start: int
    nbytes: int
    etag: str | None
    pieces: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    ended: bool = False


class ScriptedStore:
    """A store that delivers bytes only when a test says so."""

    name = "scripted"

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[Asked] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._free = False

    def direct(self, most: int) -> None:
        """Return None: this is no store of obstore's."""

    async def read_into_async(
        self,
        path: str,
        start: int,
        into: Sequence[memoryview],
        *,
        etag: str | None,
        on_bytes: Callable[[int], Awaitable[None]],
        piece_bytes: int,
        direct: None,
    ) -> None:
        places = BufferSequence(into)
        asked = Asked(start, places.left, etag)
        with self._changed:
            self._loop = asyncio.get_running_loop()
            self.asked.append(asked)
            self._changed.notify_all()
        try:
            at = start
            await on_bytes(0)
            while places.left:
                nbytes = places.left if self._free else min(await asked.pieces.get(), places.left)
                piece = self.content[at : at + nbytes]
                places.take(piece)
                at += len(piece)
                await on_bytes(len(piece))
        finally:
            asked.ended = True

    def starts(self, *, at_least: int = 1) -> list[int]:
        """Wait for ``count`` requests and an idle stream; return where the requests begin."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= at_least, WAIT_S)
        self._idle()
        return [asked.start for asked in self.asked]

    def bring(self, number: int, nbytes: int) -> None:
        """Deliver so many more bytes of a request."""
        self.starts(at_least=number + 1)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.asked[number].pieces.put_nowait, nbytes)
        self._idle()

    def release(self) -> None:
        """Deliver everything at once from now on, so that the stream can end."""

        def all_of_it() -> None:
            self._free = True
            for asked in self.asked:
                asked.pieces.put_nowait(len(self.content))

        assert self._loop is not None
        self._loop.call_soon_threadsafe(all_of_it)

    def _idle(self) -> None:
        """Wait until the stream has done all it can do alone."""

        async def turns() -> None:
            for _ in range(50):
                await asyncio.sleep(0)

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(turns(), self._loop).result(WAIT_S)


def feed(
    flow: ConcurrencySearch, rate_of: Callable[[int], float], *, seconds: float, now_s: float = 10.0
) -> float:
    """Use a link whose rate depends on the number of requests, with as many requests as are wanted."""
    under_way = 0
    for _ in range(int(seconds / 0.005)):
        while under_way < flow.wanted:
            under_way += 1
            flow.begun(now_s, 0.02)
        while under_way > flow.wanted:
            under_way -= 1
            flow.ended(now_s)
        now_s += 0.005
        flow.came(now_s, int(rate_of(under_way) * 0.005))
    for _ in range(under_way):
        flow.ended(now_s)
    return now_s
