"""The first bytes of an object, asked for when a load begins, beside all that says what they are.

To find a model's weights takes some requests, one after the other, and to construct it takes time; the link
would idle meanwhile. The URI mostly names the object already, so its first bytes are asked for at once. What
is known with them, size, ETag, a header, need not be asked for again, and how long they took to begin is the
link's latency.

Nothing depends on it. Where it fails, or brought another object than the weights that are found, the store is
asked as if there had been nothing.
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

from upriver.coldstart.event_loop import Loop
from upriver.store import ObjectInfo, Store
from upriver.text import error_text

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 20
"""Asked for: what comes of a quick link until a model is constructed. More keeps a store from the small
requests that are asked for beside them: of Swift on one core, the groupings of ResNet-50 took 45 ms beside
16 MiB, and 12 beside 4."""

PIECE_BYTES = 512 * 1024
"""Handed on at once: each piece asks for the interpreter, which a constructor has for most of the time."""

ENDING_S = 2.0
"""How long whoever breaks something off waits for that, the end of a process for all of it."""


def _nobody() -> None:
    """Wants to be told."""


class Ahead:
    """Reads the first bytes of an object in a thread of its own.

    Attributes:
        path: The object.
        info: What the store says of it; None as long as it has not answered.
        sent_s: When it was asked for, by ``time.monotonic``.
        first_s: When the answer began.
        come: How many bytes have come.
        taken: Whether a stream ends it, and not who began it.
    """

    def __init__(self, store: Store, path: str, most_bytes: int, *, timeout_s: float) -> None:
        """Ask for nothing yet.

        Args:
            store: Where the object is, if it is there.
            path: Its name.
            most_bytes: That are asked for.
            timeout_s: How long somebody waits here for something before the store is asked for it again.
        """
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
        self._tell: Callable[[], object] = _nobody
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._work, name="upriver-coldstart-ahead", daemon=True)

    def start(self) -> None:
        """Begin, if a thread can be started."""
        self.sent_s = time.monotonic()
        try:
            self._thread.start()
        except RuntimeError:
            self._over = True
        else:
            reading.add(self)

    def cancel(self) -> None:
        """Read no more, and let go of what was read."""
        with self._changed:
            self._closed, self._tell = True, _nobody
            self._let_go()
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        """:meth:`cancel`, and wait for the thread, but for a moment at most."""
        self.cancel()
        self.join(ENDING_S)

    def join(self, timeout_s: float | None) -> None:
        """Wait for the thread, so long at most."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _let_go(self) -> None:
        self._pieces.clear()
        self._starts.clear()

    # ---------------------------------------------------------------- for whoever finds the weights

    @property
    def latency_s(self) -> float | None:
        """From the request to its first byte; None where none has come."""
        return None if self.info is None else self.first_s - self.sent_s

    def head(self, path: str) -> ObjectInfo:
        """As `Store.head`, without asking again where the answer says it.

        Raises:
            StoreError: See there.
        """
        if path == self.path and self._wait(lambda: self.info is not None) and self.info is not None:
            return self.info
        return self._store.head(path)

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """As `Store.get_range`, without asking again for what comes by itself.

        Raises:
            StoreError: See there.
        """
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
        """How many of the object's first bytes come from here; none if it is not certain that it is that one.

        Args:
            etags: Of the objects whose bytes are wanted.
        """
        if self.info is None or not self.info.etag or etags.get(self.path) != self.info.etag:
            return 0
        return min(self._most_bytes, self.info.size)

    def tell(self, whom: Callable[[], object]) -> None:
        """Call that when more has come, and when no more will."""
        self._tell = whom

    def at(self, start: int) -> memoryview | None:
        """What has come from that byte on, as far as it lies together; None if it will not come."""
        with self._changed:
            if self._closed:  # a last piece may have come all the same, without those before it
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


reading: weakref.WeakSet[Ahead] = weakref.WeakSet()
"""For the end of the process, which breaks them off with everything else."""
