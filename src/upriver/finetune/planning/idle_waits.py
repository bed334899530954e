"""Ask servers how long work would wait while a job sends them none.

Every response says how busy a server is with other jobs' work. A job that finds its servers too busy runs
everything locally. No further responses arrive then, so the job would never learn that the servers are free
again. This module asks them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import cast

from upriver._threads.background import BackgroundThread
from upriver.rpc.client import ServerClient
from upriver.rpc.load_report import expected_waits
from upriver.rpc.server_pool import ServerPool

ASK_AFTER_S = 5.0
"""Seconds without a response after which servers are asked, and between two requests. Slow networks take as
long for a micro-batch, and a request costs some hundred bytes."""


class IdleWaits:
    """Ask idle servers for their waits in a background thread, one request at a time.

    Args:
        pool: The servers; those that are up are asked.
        answers: Returns the number of micro-batches that the servers have made so far.
        after_s: Seconds without a further micro-batch before the servers are asked.
    """

    def __init__(self, pool: ServerPool, answers: Callable[[], int], *, after_s: float = ASK_AFTER_S) -> None:
        self._pool, self._answers, self._after_s = pool, answers, after_s
        self._seen, self._since = -1, 0.0
        self._found: list[float] = []
        self._thread = BackgroundThread(self._ask, name="waits")

    def look(self) -> float | None:
        """Return the wait found since the last call, if any, and start asking if it is time. Never blocks."""
        answers, now = self._answers(), time.monotonic()
        if answers != self._seen:
            self._seen, self._since = answers, now
            self._found.clear()  # the responses say more
        found = self._found.pop() if self._found else None
        if now - self._since >= self._after_s and not self._thread.is_alive():
            self._since = now
            self._thread = BackgroundThread(self._ask, name="waits")
            self._thread.start()
        return found

    def close(self) -> None:
        """Wait for a running request; the pool, which is closed before, has interrupted it."""
        self._thread.join()

    def _ask(self) -> None:
        if any(server.in_flight for server in self._pool.status()):
            return  # they would count this job's own work
        servers = [cast(ServerClient, client) for client in self._pool.up]
        if waits := [wait_s for server in servers for wait_s in expected_waits(server)]:
            self._found = [fmean(waits)]
