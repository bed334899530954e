"""Meter the link from storage to compute: count every byte that crosses it, and emulate a slower one.

Answers of near-data servers and direct reads of the store pass the same meter, so both ways are compared by
the same measure. It counts the bytes of bodies and objects, without HTTP headers or TCP overhead.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Literal, get_args

from upriver.errors import ConfigError
from upriver.link import LinkEstimator, TokenBucket
from upriver.pipeline import Dataset
from upriver.store import Store
from upriver.types import require_finite

Kind = Literal["answers", "direct"]
"""Traffic on the link: frames of a server, or objects read straight from the store."""

PIECE_BYTES = 64 * 1024
"""Bytes reserved at once on an emulated link: small, so that parallel streams take turns as under TCP."""

BURST_BYTES = 64 * 1024
"""Bytes that an idle emulated link passes at once: one piece. A larger burst would make short transfers seem
too fast."""


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
        self._lock = threading.Lock()
        self._bytes: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self._pending = 0
        self._bucket = TokenBucket(math.inf, burst_bytes=burst_bytes)
        self._estimator = LinkEstimator(now_s=time.monotonic())

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
            with self._lock:
                self._bytes[kind] += piece
            self._estimator.arrive(piece, time.monotonic())
            num_bytes -= piece

    def add(self, num_bytes: Mapping[str, int]) -> None:
        """Count bytes, by kind, that another process received for this one."""
        with self._lock:
            for kind in self._bytes:
                self._bytes[kind] += num_bytes.get(kind, 0)

    def _reserve(self, num_bytes: int) -> float:
        """Reserve the emulated link's next time span for these bytes; return the seconds until it is over."""
        if self.rate_bytes_per_s is None:
            return 0.0
        with self._lock:
            self._bucket.rate_bytes_per_s = self.rate_bytes_per_s  # may have changed since
            return self._bucket.take(num_bytes, time.monotonic())

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Mark a time span during which bytes are on the way: the divisor of `observed_bandwidth`.

        Overlapping transfers count once, as they share the link.
        """
        self._estimator.begin(time.monotonic())
        try:
            yield
        finally:
            self._estimator.end(time.monotonic())

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

    @property
    def quiet_s(self) -> float:
        """Seconds since anything has crossed or been under way."""
        with self._lock:
            return 0.0 if self._pending else self._estimator.idle_s(time.monotonic())

    def observed_bandwidth(self) -> float | None:
        """Return the bytes per second of recent transfers, over busy time; None before enough has crossed.

        After a pause the earlier figure holds until enough has crossed anew.
        """
        return self._estimator.bandwidth(time.monotonic())

    def head_came(self, seconds: float) -> None:
        """Record the seconds that a store needed to begin an answer."""
        self._estimator.add_latency(seconds)

    @contextmanager
    def reading(
        self, store: Store, path: str, start: int | None, stop: int | None
    ) -> Iterator[Callable[[int], None]]:
        """Account one read of a store; see `upriver.store.observer.ReadObserver`.

        The link is busy from the head of an answer on, not while the store looks for the object.
        """
        asked_at = time.monotonic()
        with self.pending(), ExitStack() as busy:

            def came(num_bytes: int) -> None:
                if num_bytes == 0:
                    if not store.is_local:
                        self.head_came(time.monotonic() - asked_at)
                    busy.enter_context(self.transfer())
                self.account(num_bytes, "direct")

            yield came

    def filled_by(self, num_bytes: float) -> int | None:
        """Return how many objects of this size, read at once, fill the link; None before that is known.

        The number covers one object that arrives and one that is requested meanwhile. It adds those that
        could arrive while the store looks for an object.
        """
        rate, wait_s = self._estimator.bandwidth(), self._estimator.latency_s
        if rate is None or wait_s is None:
            return None
        return 2 + int(wait_s * rate / max(num_bytes, 1.0))


def metered(dataset: Dataset, meter: LinkMeter) -> Dataset:
    """Return the same dataset, read over the metered link."""
    return dataset.with_store(dataset.store.observed_by(meter))
