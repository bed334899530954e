"""Meter the link from storage to compute: count every byte that crosses it, and emulate a slower one.

Answers of near-data servers and direct reads of the store pass the same meter, so both ways are compared by
the same measure. It counts the bytes of bodies and objects, without HTTP headers or TCP overhead.
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
"""Traffic on the link: frames of a server, or objects read straight from the store."""

PIECE_BYTES = 64 * 1024
"""Bytes reserved at once on an emulated link: small, so that parallel streams take turns as under TCP."""

BURST_BYTES = 64 * 1024
"""Bytes that an idle emulated link passes at once: one piece. A larger burst would make short transfers seem
too fast."""

WINDOW_BUSY_S = 10.0
"""Seconds of transfers in the window of `LinkMeter.observed_bandwidth`: long enough to smooth single frames,
short enough to follow a link that changes within an epoch."""

CHECKPOINT_BUSY_S = 0.05
"""Busy seconds between two points of that window, which then holds some 200 points."""

WINDOW_AGE_S = 60.0
"""Elapsed seconds after which a point is dropped: a link with little traffic is busy for ten seconds in an
hour."""

QUIET_S = 5.0
"""Seconds without a transfer after which earlier measurements are out of date; later ones count alone."""

RECENT_BUSY_S = 1.0
"""Busy seconds that show the link's present bandwidth."""

BEFORE_BUSY_S = 0.25
"""Least busy seconds before the recent ones to compare with. They are fewer: a change is seen while it is
still part of the last second, and the rest of the time before it must be dropped too."""

CHANGED = 1.6
"""Factor, up or down, beyond which the link's bandwidth has changed. Jitter of a fifth both ways makes 1.5,
and traffic from before a change only delays its detection."""

FRESH_BYTES = 256 * 1024
FRESH_BUSY_S = 0.15
"""Bytes or busy seconds, one of the two, needed for a bandwidth at the start and after a pause: less is a
burst, or a head without a body."""


HEADS = 64
"""Number of recent store requests whose minimum is the store's lookup time. While the link is full, most of
their heads have waited for other bytes."""


class _Point(NamedTuple):
    """The counters at some moment."""

    at_s: float
    busy_s: float
    num_bytes: int


class LinkMeter:
    """Count bytes from storage to compute, and pace them when a rate is set. Thread-safe.

    Args:
        rate_bytes_per_s: Rate of the emulated link, shared by all connections and direct reads; None keeps
            the rate of the real link.
        burst_bytes: Bytes that may pass at once after the emulated link was idle.
    """

    def __init__(self, rate_bytes_per_s: float | None = None, *, burst_bytes: int = BURST_BYTES) -> None:
        if rate_bytes_per_s is not None:
            require_finite("rate_bytes_per_s", rate_bytes_per_s, positive=True)
        require_finite("burst_bytes", burst_bytes)
        self.rate_bytes_per_s = rate_bytes_per_s
        self._burst_bytes = burst_bytes
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the emulated link has sent all reserved bytes
        self._bytes: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self._active = self._pending = 0
        self._busy_s = 0.0  # seconds with at least one transfer under way, up to _busy_since
        self._busy_since = 0.0
        self._last_at = time.monotonic()  # time of the last bytes that crossed
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
        """Bytes to read between two calls of `account`: few only if the link is emulated."""
        return PIECE_BYTES if self.rate_bytes_per_s is not None else 16 * PIECE_BYTES

    def account(self, num_bytes: int, kind: Kind) -> None:
        """Count bytes that have arrived; on an emulated link, return only when they would have.

        Blocks the calling thread, so an event loop must call it in another thread.
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
        """Reserve the emulated link's next time span for these bytes; return the seconds until it is over."""
        if self.rate_bytes_per_s is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now - self._burst_bytes / self.rate_bytes_per_s)
            self._free_at = start + num_bytes / self.rate_bytes_per_s
            return self._free_at - now

    def _count(self, num_bytes: int, kind: Kind) -> None:
        """Count bytes that have arrived."""
        with self._lock:
            self._bytes[kind] += num_bytes
            self._last_at = now = time.monotonic()
            self._checkpoint(now)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Mark a time span during which bytes are on the way: the divisor of `observed_bandwidth`.

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
        """Mark a time span in which an answer may arrive any moment: the link is neither quiet nor busy."""
        with self._lock:
            self._pending += 1
        try:
            yield
        finally:
            with self._lock:
                self._pending -= 1

    def _begin(self, now: float) -> None:
        """Mark the link as in use again; after a long pause, forget everything before it."""
        if now - self._last_at >= QUIET_S:
            self._before_pause = self._rate()
            self._checkpoints = deque([_Point(now, self._busy_s, sum(self._bytes.values()))])
        self._busy_since = now

    @property
    def quiet_s(self) -> float:
        """Seconds since anything has crossed or been under way."""
        with self._lock:
            return 0.0 if self._active or self._pending else time.monotonic() - self._last_at

    def observed_bandwidth(self) -> float | None:
        """Return the bytes per second of recent transfers, over busy time; None before enough has crossed.

        The window spans `WINDOW_BUSY_S` of transfers, or less if they are old or the link has changed. After
        a pause the earlier figure holds until enough has crossed anew.
        """
        with self._lock:
            self._checkpoint(time.monotonic())
            return self._rate()

    def head_came(self, seconds: float) -> None:
        """Record the seconds that a store needed to begin an answer."""
        with self._lock:
            self._heads.append(seconds)

    def filled_by(self, num_bytes: float) -> int | None:
        """Return how many objects of this size, read at once, fill the link; None before that is known.

        The number covers one object that arrives and one that is requested meanwhile. It adds those that
        could arrive while the store looks for an object.
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
        """Keep only the last second if its rate clearly differs from the rate before it."""
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
    """A store whose reads cross the meter, since the compute tier's direct reads use the same link.

    Over a network the calling thread accounts bytes as they arrive. If it accounted them at the end, sixteen
    objects that share a slow link would show nothing for seconds, and then a burst. The link is busy from the
    head of an answer on, not while the store looks for the object. Reads of other stores arrive at once and
    are accounted afterwards (in a pool thread, for an event loop). Sizes, listings and writes, which go the
    other way, are not counted.

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
        """Call `Store.get`, accounted."""
        if self._root is None:
            return self._arriving(path, _options(etag), on_answer)
        with self.meter.transfer():
            data = super().get(path, etag=etag, on_answer=on_answer)
            self.meter.account(len(data), "direct")
        return data

    async def get_async(self, path: str, *, etag: str | None = None) -> bytes:
        """Call `Store.get_async`, accounted."""
        with self.meter.transfer():
            data = await super().get_async(path, etag=etag)
            await asyncio.to_thread(self.meter.account, len(data), "direct")
        return data

    def get_range(self, path: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """Call `Store.get_range`, accounted."""
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
        """Call `Store.get_range_async`, accounted."""
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
        """Call `Store.read_into`, accounted."""
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
        """Call `Store.read_into_async`, accounted."""
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
        """Mark the link as busy from the head of an answer on."""
        if self._root is None:
            self.meter.head_came(time.monotonic() - asked_at)
        busy.enter_context(self.meter.transfer())

    def _arriving(self, path: str, options: Any, on_answer: Callable[[ObjectInfo], None] = _ignore) -> bytes:
        """Return a requested object's bytes, accounted piece by piece as they arrive."""
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
