"""Compute when refused requests should retry: after those that wait, and one after another."""

from __future__ import annotations

import math
from collections import deque

DRAIN_WINDOW_S = 30.0
"""Window over which the rate is computed at which memory comes free."""

MAX_FREED = 1024
"""Most requests that enter the rate at which memory comes free."""

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
"""Bounds of ``Retry-After``."""

SPREAD = 4.0
"""Multiple of the time that the waiting requests need, over which retries are spread.

Sooner, most retries would be refused again. Later, an idle server would wait for them.
"""


class RetryTimes:
    """Times at which refused requests should retry."""

    def __init__(self) -> None:
        self._freed: deque[tuple[float, int]] = deque(maxlen=MAX_FREED)
        self._next_place = -math.inf  # time at which all requests that were told to retry would be done

    def freed(self, nbytes: int, now: float) -> None:
        """Record bytes that came free."""
        self._freed.append((now, nbytes))

    def soonest_s(self, waiting_bytes: int, longest_wait_s: float, now: float) -> float:
        """Return the seconds until the waiting requests are done, at the recent rate.

        If nothing came free of late, return the longest wait so far.
        """
        seconds_per_byte = self._seconds_per_byte(now)
        seconds = longest_wait_s if seconds_per_byte is None else waiting_bytes * seconds_per_byte
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))

    def next_s(self, nbytes: int, waiting_bytes: int, longest_wait_s: float, now: float) -> float:
        """Return the seconds for a refused request of ``nbytes``: after those that were refused before it."""
        soonest_s = self.soonest_s(waiting_bytes, longest_wait_s, now)
        latest_s = min(MOST_RETRY_S, SPREAD * soonest_s)
        seconds = min(latest_s, max(soonest_s, self._next_place - now))
        self._next_place = now + seconds + nbytes * (self._seconds_per_byte(now) or 0.0)
        return seconds

    def _seconds_per_byte(self, now: float) -> float | None:
        """Return the seconds in which a byte comes free of late; None if no memory came free."""
        while self._freed and self._freed[0][0] < now - DRAIN_WINDOW_S:
            self._freed.popleft()
        freed = sum(nbytes for _, nbytes in self._freed)
        return max(now - self._freed[0][0], 1.0) / freed if freed else None
