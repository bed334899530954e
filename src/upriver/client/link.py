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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

from upriver.errors import ConfigError
from upriver.store import Store
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
        self._active = 0
        self._busy_s = 0.0  # seconds with at least one transfer under way, up to _busy_since
        self._busy_since = 0.0
        self._checkpoints: deque[tuple[float, int]] = deque([(0.0, 0)])

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
            wait_s = self._reserve(piece, kind)
            if wait_s > 0:
                time.sleep(wait_s)
            num_bytes -= piece

    def _reserve(self, num_bytes: int, kind: Kind) -> float:
        """Take the link's next stretch of time for these bytes; the seconds until it is over."""
        with self._lock:
            self._bytes[kind] += num_bytes
            now = time.monotonic()
            self._checkpoint(now)
            if self.rate_bytes_per_s is None:
                return 0.0
            start = max(self._free_at, now - self._burst_bytes / self.rate_bytes_per_s)
            self._free_at = start + num_bytes / self.rate_bytes_per_s
            return self._free_at - now

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Mark a stretch during which bytes are on the way: what `observed_bandwidth` divides by.

        Overlapping transfers count once, as they share the link.
        """
        with self._lock:
            now = time.monotonic()
            if self._active == 0:
                self._busy_since = now
            self._active += 1
            self._tick(now)
        try:
            yield
        finally:
            with self._lock:
                self._tick(time.monotonic())
                self._active -= 1

    def observed_bandwidth(self) -> float | None:
        """Bytes per second of the last transfers, over the time one was under way; None before any."""
        with self._lock:
            now = time.monotonic()
            self._tick(now)
            busy_s, num_bytes = self._checkpoints[0]
            busy_s, num_bytes = self._busy_s - busy_s, sum(self._bytes.values()) - num_bytes
        return num_bytes / busy_s if num_bytes and busy_s > 0 else None

    def _tick(self, now: float) -> None:
        if self._active:
            self._busy_s += now - self._busy_since
            self._busy_since = now

    def _checkpoint(self, now: float) -> None:
        self._tick(now)
        if self._busy_s - self._checkpoints[-1][0] >= CHECKPOINT_BUSY_S:
            self._checkpoints.append((self._busy_s, sum(self._bytes.values())))
        while len(self._checkpoints) > 2 and self._busy_s - self._checkpoints[1][0] > WINDOW_BUSY_S:
            self._checkpoints.popleft()


class MeteredStore(Store):
    """A store whose reads cross the meter: what the compute tier reads by itself is on the same link.

    A whole object or range arrives at once, so its bytes are accounted after the read, piece by piece, in the
    calling thread (for an event loop, in a thread of its pool). Sizes and listings are not counted, nor are
    writes, which go the other way.

    Args:
        store: The store to read.
        meter: The job's link.
    """

    def __init__(self, store: Store, meter: LinkMeter) -> None:
        super().__init__(
            store._backend, name=store.name, uri=store.uri, root=store._root, secrets=store._secrets
        )
        self.meter = meter

    def get(self, path: str, *, etag: str | None = None) -> bytes:
        """`Store.get`, accounted."""
        with self.meter.transfer():
            data = super().get(path, etag=etag)
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
