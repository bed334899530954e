"""Read the first bytes of an object when a load begins, in parallel with the lookups that interpret them.

To find a model's weights takes several sequential requests, and to construct the model takes time. The link
would idle meanwhile. The URI usually names the object, so its first bytes are requested at once. The response
also gives size, ETag and header, which need no further request, and the link's latency.

Nothing depends on the readahead. If it fails, or brings another object than the found weights, the load asks
the store as without it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import aclosing
from contextvars import Context
from typing import TypeVarTuple

from upriver._threads.background import BackgroundThread
from upriver.errors import UpriverError
from upriver.store import ObjectInfo, Store
from upriver.text import error_text

log = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")

MOST_BYTES = 4 << 20
"""Bytes to request: what a fast link brings before a model is constructed. More delays the small requests
that run at the same time. With Swift on one core, the groupings of ResNet-50 took 45 ms next to 16 MiB, and
12 ms next to 4 MiB."""

PIECE_BYTES = 512 * 1024
"""Bytes of a piece. Each piece needs the interpreter, which a constructor holds most of the time."""

ENDING_S = 2.0
"""Longest wait of a caller that cancels a readahead, and of the exiting process for all of them."""


class Loop(asyncio.SelectorEventLoop):
    """Event loop that ignores callbacks after its end, such as responses to cancelled requests."""

    def call_soon_threadsafe(
        self, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as any loop does, but raise no error on a closed loop."""
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


class Readahead:
    """Read the first bytes of an object in a separate thread.

    Attributes:
        info: The store's answer about the object; None until it has arrived.
        sent_s: Time of the request, by ``time.monotonic``.
        first_s: Time at which the response began.
        taken: True if a stream ends the readahead instead of its creator.
    """

    def __init__(self, store: Store, path: str, most_bytes: int, *, timeout_s: float) -> None:
        """Create a readahead without sending a request."""
        self.path = path
        self.info: ObjectInfo | None = None
        self.sent_s = self.first_s = 0.0
        self.come = 0
        self.taken = False
        self._store, self._most_bytes, self._timeout_s = store, most_bytes, timeout_s
        self._pieces: list[memoryview] = []
        self._starts: list[int] = []
        self._changed = threading.Condition()
        self._over = self._closed = False
        self._tell: Callable[[], object] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = BackgroundThread(self._work, name="coldstart-ahead")

    def start(self) -> None:
        """Start the thread, if possible."""
        self.sent_s = time.monotonic()
        try:
            self._thread.start()
        except UpriverError:
            self._over = True
        else:
            reading.add(self)

    def cancel(self) -> None:
        """Stop reading and release all bytes."""
        with self._changed:
            self._closed, self._tell = True, lambda: None
            self._let_go()
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        """Cancel, and wait up to `ENDING_S` for the thread."""
        self.cancel()
        self.join(ENDING_S)

    def join(self, timeout_s: float | None) -> None:
        """Wait for the thread, at most `timeout_s`."""
        self._thread.join(timeout_s)

    def _let_go(self) -> None:
        self._pieces.clear()
        self._starts.clear()

    # ------------------------------------------------------------------- for the search for weights

    @property
    def latency_s(self) -> float | None:
        """Seconds from the request to its first byte; None until that has arrived."""
        return None if self.info is None else self.first_s - self.sent_s

    def head(self, path: str) -> ObjectInfo:
        """Return `Store.head`, from the readahead's response if possible."""
        if path == self.path and self._wait(lambda: self.info is not None) and self.info is not None:
            return self.info
        return self._store.head(path)

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Return `Store.get_range`, from the readahead's bytes if possible."""
        if path == self.path and stop <= self._most_bytes and self._is(etag):
            self._wait(lambda: self.come >= stop)
            with self._changed:
                if self.come >= stop and not self._closed:
                    return b"".join(self._pieces[: bisect_right(self._starts, stop)])[start:stop]
        return self._store.get_range(path, start, stop, etag=etag)

    def _is(self, etag: str | None) -> bool:
        return self.info is not None and etag in (None, self.info.etag)

    def _wait(self, until: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: until() or self._over or self._closed, self._timeout_s)
            return until()

    # --------------------------------------------------------------------------------- for a stream

    def stop_of(self, etags: Mapping[str, str]) -> int:
        """Return how many first bytes of the object the readahead supplies; 0 if the objects may differ."""
        if self.info is None or not self.info.etag or etags.get(self.path) != self.info.etag:
            return 0
        return min(self._most_bytes, self.info.size)

    def tell(self, whom: Callable[[], object]) -> None:
        """Register a function to call when more bytes arrive, and when the readahead ends."""
        self._tell = whom

    def at(self, start: int) -> memoryview | None:
        """Return the bytes from `start` on that have arrived in one piece; None if they will not arrive."""
        with self._changed:
            if self._closed:  # a last piece may have arrived after the earlier ones were released
                return None
            if start < self.come:
                number = bisect_right(self._starts, start) - 1
                return self._pieces[number][start - self._starts[number] :]
            return None if self._over else memoryview(b"")

    # --------------------------------------------------------------------------- in its own thread

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=Loop) as runner:
                runner.run(self._read())
        except BaseException as error:
            log.debug("%s is not read ahead: %s", self.path, error_text(error))
        finally:
            with self._changed:
                self._over, self._loop, self._task = True, None, None
                if self._closed:
                    self._let_go()
                self._changed.notify_all()
            self._tell()

    async def _read(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        pieces = self._store.read_first_async(
            self.path, self._most_bytes, on_answer=self._answered, piece_bytes=PIECE_BYTES
        )
        async with aclosing(pieces):
            async for piece in pieces:
                with self._changed:
                    self._starts.append(self.come)
                    self._pieces.append(memoryview(piece))
                    self.come += len(piece)
                    self._changed.notify_all()
                self._tell()

    def _answered(self, info: ObjectInfo) -> None:
        with self._changed:
            self.first_s = time.monotonic()
            self.info = info
            self._changed.notify_all()


reading: weakref.WeakSet[Readahead] = weakref.WeakSet()
"""Track running readaheads, so that the exiting process can cancel them."""
