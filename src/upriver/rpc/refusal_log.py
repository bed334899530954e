"""Log why healthy servers refuse requests: they are full, or a quota is.

The job gets slower then, so the log and the plan say so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from upriver.control.server_choice import MAX_REST_S
from upriver.errors import Overloaded
from upriver.text import said

log = logging.getLogger("upriver")

LOG_EVERY_S = 60.0
"""Least seconds between two log lines about one server: a full one refuses several times a second."""


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
