"""Track for how much of the time a healthy server refuses requests, and why: it is full, or a quota is.

If a server refuses now and then, a request waits a moment. If it mostly refuses, no plan should rely on it,
although it answers every request at once. In both cases the job gets slower, so the log and the plan say so.
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
"""Longest rest that a server can ask for; asking it again after this time is cheap."""

WINDOW_S = 20.0
"""Seconds to look back: several of the longest rests (`MAX_REST_S`), yet short enough that a recovered server
is soon planned for again."""

LEAST = 0.01
"""Least availability of a server that has refused all the time: unlike a dead one, it may accept the next
request."""

LOG_EVERY_S = 60.0
"""Least seconds between two log lines about one server: a full one refuses several times a second."""


class Refusals:
    """The time spans in which one server refused requests. Not thread-safe.

    Args:
        window_s: Seconds to look back.
        now: Returns seconds of a monotonic clock.
    """

    def __init__(self, *, window_s: float = WINDOW_S, now: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._now = window_s, now
        self._spans: deque[tuple[float, float]] = deque()  # in order, without overlaps

    def refused(self, began: float, until: float) -> None:
        """Record that a request sent at ``began`` was refused, and that none follows before ``until``."""
        while self._spans and self._spans[-1][1] >= began:
            first, last = self._spans.pop()
            began, until = min(began, first), max(until, last)
        if until > began:
            self._spans.append((began, until))

    @property
    def available(self) -> float:
        """Share of the last seconds without refusals; 1 for a server that has refused nothing."""
        now = self._now()
        first = now - self._window_s
        while self._spans and self._spans[0][1] <= first:
            self._spans.popleft()
        lost_s = sum(min(until, now) - max(began, first) for began, until in self._spans if began < now)
        return max(LEAST, 1.0 - lost_s / self._window_s)


class RefusalLog:
    """Count refused requests for plans, and log them now and then. Thread-safe.

    Args:
        every_s: Least seconds between two lines about one server.
        now: Returns seconds of a monotonic clock.
    """

    def __init__(self, *, every_s: float = LOG_EVERY_S, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._lock = threading.Lock()
        self._count, self._last = 0, ""
        self._logged: dict[str, tuple[float, int]] = {}  # address to (time of its line, refusals since)

    def add(self, url: str, error: Overloaded) -> None:
        """Record that a server refused a request; log it unless a line about this server is recent."""
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
        """All refusals so far in one sentence; empty if there were none."""
        with self._lock:
            count, last = self._count, self._last
        if not count:
            return ""
        return (
            f"servers refused {_requests(count)} so far ({last}): that work was asked for again, or done here"
        )


def _requests(count: int) -> str:
    return "a request" if count == 1 else f"{count} requests"
