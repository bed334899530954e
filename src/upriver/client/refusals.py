"""For how much of the time a server that is well takes nothing: it is full, or a quota is.

Where it refuses now and then a request waits a moment, and that is all. Where it does little else it is no
place to plan for, though it answers every question at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 20.0
"""How far back to look: some rests of the longest kind (`upriver.client.pool.MAX_REST_S`), and a server that
takes requests again is soon one to plan for."""

LEAST = 0.01
"""What is left of a server that has refused all the time: it may take the next request, which one that is not
there cannot."""


class Refusals:
    """The stretches of time in which one server took nothing. Not thread-safe.

    Args:
        window_s: How far back to look.
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, *, window_s: float = WINDOW_S, now: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._now = window_s, now
        self._spans: deque[tuple[float, float]] = deque()  # one after the other, none overlaps another

    def refused(self, began: float, until: float) -> None:
        """A request that was sent at ``began`` was refused; none is to be sent before ``until``."""
        while self._spans and self._spans[-1][1] >= began:
            first, last = self._spans.pop()
            began, until = min(began, first), max(until, last)
        if until > began:
            self._spans.append((began, until))

    @property
    def available(self) -> float:
        """The share of the last seconds in which it was not so; 1 for a server that has refused nothing."""
        now = self._now()
        first = now - self._window_s
        while self._spans and self._spans[0][1] <= first:
            self._spans.popleft()
        lost_s = sum(min(until, now) - max(began, first) for began, until in self._spans if began < now)
        return max(LEAST, 1.0 - lost_s / self._window_s)
