"""For how much of the time a server that is well takes nothing, and why: it is full, or a quota is.

Where it refuses now and then a request waits a moment, and that is all. Where it does little else it is no
place to plan for, though it answers every question at once. Either way the job gets slower, so it is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from upriver.errors import Overloaded
from upriver.text import said

log = logging.getLogger("upriver")

MAX_REST_S = 5.0
"""A server may ask for a longer rest; asking it again after this long is cheap."""

WINDOW_S = 20.0
"""How far back to look: some rests of the longest kind (`MAX_REST_S`), and a server that takes requests again
is soon one to plan for."""

LEAST = 0.01
"""What is left of a server that has refused all the time: it may take the next request, which one that is not
there cannot."""

LOG_EVERY_S = 60.0
"""Between two log lines about one server, at least: a full one refuses several times a second."""


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


class RefusalLog:
    """What servers have refused, in words: counted for plans, and logged now and then. Thread-safe.

    Args:
        every_s: Seconds between two lines about one server, at least.
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, *, every_s: float = LOG_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._lock = threading.Lock()
        self._count, self._last = 0, ""
        self._logged: dict[str, tuple[float, int]] = {}  # address to when, and how many since

    def add(self, url: str, error: Overloaded) -> None:
        """A server has refused a request; logs it, unless there was a line about this server just now."""
        after = f"to be asked again after {min(MAX_REST_S, error.retry_after_s):g} s"
        reason = said(str(error).removeprefix(f"{url} "))
        why = f"{after}: {reason}" if reason else after
        now = self._now()
        with self._lock:
            self._count, self._last = self._count + 1, f"the last: {url}, {why}"
            at, silent = self._logged.get(url, (now, 0))
            due = url not in self._logged or now - at >= self._every_s
            self._logged[url] = (now, 0) if due else (at, silent + 1)
        if due:
            log.warning("%s refused %s, %s", url, _requests(silent + 1), why)

    @property
    def remark(self) -> str:
        """All of it so far in one sentence; empty where nothing was refused."""
        with self._lock:
            count, last = self._count, self._last
        if not count:
            return ""
        return (
            f"servers refused {_requests(count)} so far ({last}): that work was asked for again, or done here"
        )


def _requests(count: int) -> str:
    return "a request" if count == 1 else f"{count} requests"
