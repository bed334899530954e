"""The link from storage to compute: count every byte that crosses it, and emulate a thinner one if asked.

Answers of near-data servers and direct reads of the store pass the same meter, so the plain way and the
near-data way are judged by one yardstick. Counted are the bytes of bodies and objects, not HTTP headers or
TCP's own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, get_args

import obstore

from upriver.errors import ConfigError
from upriver.store import ObjectInfo, Store
from upriver.store.direct import Direct
from upriver.store.places import PIECE_BYTES as PLACED_BYTES
from upriver.store.store import _ignore, _ignore_async, _info, _is_empty_range, _options
from upriver.types import require_finite

Kind = Literal["answers", "direct"]
"""What crossed the link: frames of a server, or objects read straight from the store."""

PIECE_BYTES = 64 * 1024
"""Reserved at once on an emulated link: small, so that parallel streams take turns (what TCP would do)."""

BURST_BYTES = 64 * 1024
"""What an idle emulated link lets through at once: one piece. A large burst would make short transfers
cheat."""

WINDOW_BUSY_S = 10.0
"""Seconds of transfers that `LinkMeter.observed_bandwidth` looks back on: long enough to smooth single
frames, short enough to follow a link that changes within an epoch."""

CHECKPOINT_BUSY_S = 0.05
"""Busy seconds between two points of that window: it then holds some 200 points."""

WINDOW_AGE_S = 60.0
"""Seconds on the clock after which a point is forgotten all the same: a link that carries little is busy for
ten seconds in an hour."""

QUIET_S = 5.0
"""Seconds without a transfer after which what the link carried is old: what comes next counts alone."""

RECENT_BUSY_S = 1.0
"""Busy seconds that say what the link carries at this moment."""

BEFORE_BUSY_S = 0.25
"""Busy seconds before those that they are compared with at least. Fewer than those: a change is seen while it
is still part of the last second, and what is left of the time before it must go, too."""

CHANGED = 1.6
"""The link has become another one if it carries more than so many times as much as before, or as little:
jitter of a fifth both ways makes 1.5, and what came before a change only delays that it is seen."""

FRESH_BYTES = 256 * 1024
FRESH_BUSY_S = 0.15
"""What must have crossed, the one or the other, before there is a figure, at first and after a pause: less is
a burst, or a head without a body."""


HEADS = 64
"""Requests to a store of which the quickest says how long it takes to look for an object: while the link is
full, most of their heads have waited for other bytes."""


class _Point(NamedTuple):
    """Where the counters stood at some moment."""

    at_s: float
    busy_s: float
    num_bytes: int


class LinkMeter:
    """Counts bytes from storage to compute, and paces them when a rate is set. Thread-safe.

    Args:
        rate_bytes_per_s: Rate of the emulated link, shared by all connections and direct reads; None leaves
            the real link as it is.
        burst_bytes: What may pass at once after the emulated link was idle.
    """

    def __init__(self, rate_bytes_per_s: float | None = None, *, burst_bytes: int = BURST_BYTES) -> None:
        if rate_bytes_per_s is not None:
            require_finite("rate_bytes_per_s", rate_bytes_per_s, positive=True)
        require_finite("burst_bytes", burst_bytes)
        self.rate_bytes_per_s = rate_bytes_per_s
        self._burst_bytes = burst_bytes
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the emulated link has sent all that was promised so far
        self._bytes: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self._active = self._pending = 0
        self._busy_s = 0.0  # seconds with at least one transfer under way, up to _busy_since
        self._busy_since = 0.0
        self._last_at = time.monotonic()  # something crossed
        self._checkpoints = deque([_Point(self._last_at, 0.0, 0)])
        self._before_pause: float | None = None
        self._heads: deque[float] = deque(maxlen=HEADS)

    @property
    def bytes_by_kind(self) -> Mapping[Kind, int]:
        """Bytes that have crossed so far, by kind."""
        with self._lock:
            return dict(self._bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that have crossed so far."""
        with self._lock:
            return sum(self._bytes.values())

    @property
    def piece_bytes(self) -> int:
        """How much to read between two calls of `account`: small only where the link is emulated."""
        return PIECE_BYTES if self.rate_bytes_per_s is not None else 16 * PIECE_BYTES

    def account(self, num_bytes: int, kind: Kind) -> None:
        """Count bytes that have arrived; on an emulated link, return only when they would have.

        Blocks the calling thread, so an event loop calls it through a thread.
        """
        if num_bytes < 0 or kind not in self._bytes:
            raise ConfigError(
                f"cannot account {num_bytes} bytes of kind {kind!r}, kinds are {get_args(Kind)}"
            )
        while num_bytes > 0:
            piece = min(num_bytes, self.piece_bytes)
            wait_s = self._reserve(piece)
            if wait_s > 0:
                time.sleep(wait_s)
            self._count(piece, kind)
            num_bytes -= piece

    def _reserve(self, num_bytes: int) -> float:
        """Take the emulated link's next stretch of time for these bytes; the seconds until it is over."""
        if self.rate_bytes_per_s is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now - self._burst_bytes / self.rate_bytes_per_s)
            self._free_at = start + num_bytes / self.rate_bytes_per_s
            return self._free_at - now

    def _count(self, num_bytes: int, kind: Kind) -> None:
        """They have arrived."""
        with self._lock:
            self._bytes[kind] += num_bytes
            self._last_at = now = time.monotonic()
            self._checkpoint(now)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Mark a stretch during which bytes are on the way: what `observed_bandwidth` divides by.

        Overlapping transfers count once, as they share the link.
        """
        with self._lock:
            now = time.monotonic()
            if self._active == 0:
                self._begin(now)
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._last_at = time.monotonic()
                self._tick(self._last_at)
                self._active -= 1

    @contextmanager
    def pending(self) -> Iterator[None]:
        """Mark a stretch in which an answer may come at any moment: the link is not quiet, nor is it busy."""
        with self._lock:
            self._pending += 1
        try:
            yield
        finally:
            with self._lock:
                self._pending -= 1

    def _begin(self, now: float) -> None:
        """The link is in use again; after a long pause, everything before it is forgotten."""
        if now - self._last_at >= QUIET_S:
            self._before_pause = self._rate()
            self._checkpoints = deque([_Point(now, self._busy_s, sum(self._bytes.values()))])
        self._busy_since = now

    @property
    def quiet_s(self) -> float:
        """Seconds for which nothing has crossed, or been under way."""
        with self._lock:
            return 0.0 if self._active or self._pending else time.monotonic() - self._last_at

    def observed_bandwidth(self) -> float | None:
        """Bytes per second of the last transfers, while one was under way; None before enough has crossed.

        Looks back on `WINDOW_BUSY_S` of transfers, on less where they are old or the link has changed. After
        a pause it is the figure from before, until enough has crossed anew.
        """
        with self._lock:
            self._checkpoint(time.monotonic())
            return self._rate()

    def head_came(self, seconds: float) -> None:
        """A store has begun to answer so long after it was asked."""
        with self._lock:
            self._heads.append(seconds)

    def filled_by(self, num_bytes: float) -> int | None:
        """How many objects of so many bytes, read at once, fill the link; None before that can be known.

        One that arrives, one that is asked for meanwhile, and as many more as would arrive while a store
        looks for one.
        """
        with self._lock:
            rate, wait_s = self._rate(), min(self._heads, default=None)
        if rate is None or wait_s is None:
            return None
        return 2 + int(wait_s * rate / max(num_bytes, 1.0))

    def _rate(self) -> float | None:
        first = self._checkpoints[0]
        busy_s, num_bytes = self._busy_s - first.busy_s, sum(self._bytes.values()) - first.num_bytes
        few = num_bytes < FRESH_BYTES and busy_s < FRESH_BUSY_S
        if few:
            return self._before_pause
        return num_bytes / busy_s if num_bytes and busy_s > 0 else None

    def _tick(self, now: float) -> None:
        if self._active:
            self._busy_s += now - self._busy_since
            self._busy_since = now

    def _checkpoint(self, now: float) -> None:
        self._tick(now)
        points = self._checkpoints
        if self._busy_s - points[-1].busy_s >= CHECKPOINT_BUSY_S:
            points.append(_Point(now, self._busy_s, sum(self._bytes.values())))
            self._forget_before_change()
        while len(points) > 2 and (
            self._busy_s - points[1].busy_s > WINDOW_BUSY_S or self._last_at - points[1].at_s > WINDOW_AGE_S
        ):
            points.popleft()

    def _forget_before_change(self) -> None:
        """Where the last second carried clearly more or less than all before it, that alone counts."""
        points, last = self._checkpoints, self._checkpoints[-1]
        old = [i for i, point in enumerate(points) if last.busy_s - point.busy_s >= RECENT_BUSY_S]
        if not old or points[at := old[-1]].busy_s - points[0].busy_s < BEFORE_BUSY_S:
            return
        recent, before = _between(points[at], last), _between(points[0], points[at])
        if not before / CHANGED <= recent <= before * CHANGED:
            self._checkpoints = deque(list(points)[at:])


def _between(first: _Point, last: _Point) -> float:
    return (last.num_bytes - first.num_bytes) / (last.busy_s - first.busy_s)


class MeteredStore(Store):
    """A store whose reads cross the meter: what the compute tier reads by itself is on the same link.

    Over a network the bytes are accounted as they arrive, in the calling thread: accounted at the end,
    sixteen objects that share a thin link would be nothing for seconds, and then a burst. The link is busy
    from an answer's head on, not while the store looks for the object. Other reads come at
    once, and are accounted afterwards (for an event loop, in a thread of its pool). Sizes and listings are
    not counted, nor are writes, which go the other way.

    Args:
        store: The store to read.
        meter: The job's link.
    """

    def __init__(self, store: Store, meter: LinkMeter) -> None:
        super().__init__(
            store._backend, name=store.name, uri=store.uri, root=store._root, secrets=store._secrets
        )
        self.meter = meter

    def get(
        self, path: str, *, etag: str | None = None, on_answer: Callable[[ObjectInfo], None] = _ignore
    ) -> bytes:
        """`Store.get`, accounted."""
        if self._root is None:
            return self._arriving(path, _options(etag), on_answer)
        with self.meter.transfer():
            data = super().get(path, etag=etag, on_answer=on_answer)
            self.meter.account(len(data), "direct")
        return data

    async def get_async(self, path: str, *, etag: str | None = None) -> bytes:
        """`Store.get_async`, accounted."""
        with self.meter.transfer():
            data = await super().get_async(path, etag=etag)
            await asyncio.to_thread(self.meter.account, len(data), "direct")
        return data

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """`Store.get_range`, accounted."""
        if _is_empty_range(start, stop):
            return b""
        if self._root is None:
            data = self._arriving(path, _options(etag, (start, stop)))
            return self._whole(data, path, start, stop)
        with self.meter.transfer():
            data = super().get_range(path, start, stop, etag=etag)
            self.meter.account(len(data), "direct")
        return data

    async def get_range_async(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """`Store.get_range_async`, accounted."""
        with self.meter.transfer():
            data = await super().get_range_async(path, start, stop, etag=etag)
            await asyncio.to_thread(self.meter.account, len(data), "direct")
        return data

    def read_into(
        self,
        path: str,
        start: int,
        into: memoryview | Sequence[memoryview],
        *,
        etag: str | None = None,
        on_bytes: Callable[[int], None] = _ignore,
        piece_bytes: int = PLACED_BYTES,
    ) -> None:
        """`Store.read_into`, accounted."""
        asked_at = time.monotonic()
        with self.meter.pending(), ExitStack() as busy:

            def came(num_bytes: int) -> None:
                if num_bytes == 0:
                    self._begun(busy, asked_at)
                self.meter.account(num_bytes, "direct")
                on_bytes(num_bytes)

            piece_bytes = min(piece_bytes, self.meter.piece_bytes)
            super().read_into(path, start, into, etag=etag, on_bytes=came, piece_bytes=piece_bytes)

    async def read_into_async(
        self,
        path: str,
        start: int,
        into: memoryview | Sequence[memoryview],
        *,
        etag: str | None = None,
        on_bytes: Callable[[int], Awaitable[None]] = _ignore_async,
        piece_bytes: int = PLACED_BYTES,
        direct: Direct | None = None,
    ) -> None:
        """`Store.read_into_async`, accounted."""
        asked_at = time.monotonic()
        with self.meter.pending(), ExitStack() as busy:

            async def came(num_bytes: int) -> None:
                if num_bytes == 0:
                    self._begun(busy, asked_at)
                await asyncio.to_thread(self.meter.account, num_bytes, "direct")
                await on_bytes(num_bytes)

            piece_bytes = min(piece_bytes, self.meter.piece_bytes)
            await super().read_into_async(
                path, start, into, etag=etag, on_bytes=came, piece_bytes=piece_bytes, direct=direct
            )

    def _begun(self, busy: ExitStack, asked_at: float) -> None:
        """An answer begins: from now on it keeps the link busy."""
        if self._root is None:
            self.meter.head_came(time.monotonic() - asked_at)
        busy.enter_context(self.meter.transfer())

    def _arriving(self, path: str, options: Any, on_answer: Callable[[ObjectInfo], None] = _ignore) -> bytes:
        """What an object's request gives, accounted piece by piece as it arrives."""
        pieces, asked_at = [], time.monotonic()
        with self._errors("read", path), self.meter.pending():
            answer = obstore.get(self._backend, self._checked(path), options=options)
            self.meter.head_came(time.monotonic() - asked_at)
            on_answer(_info(path, answer.meta))
            with self.meter.transfer():
                for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                    self.meter.account(len(piece), "direct")
                    pieces.append(piece)
        return b"".join(pieces)
