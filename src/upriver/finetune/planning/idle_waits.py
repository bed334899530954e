"""What work would wait for at servers that a job asks for nothing at the moment.

Servers say with every answer how busy they are with others' work, and a job that finds them too busy does all
of it here. Then no answer comes, and nothing would ever tell that they have become free again: so they are
asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import fmean
from typing import cast

from upriver.rpc.client import ServerClient
from upriver.rpc.load_report import expected_waits
from upriver.rpc.server_pool import ServerPool

ASK_AFTER_S = 5.0
"""Seconds without an answer after which servers are asked, and then between two times: slow networks take as
long for a micro-batch, and a question costs some hundred bytes."""


class IdleWaits:
    """Asks beside the training, where servers owe and give no answers; one question at a time.

    Args:
        pool: The servers; those that are up are asked.
        answers: Micro-batches that they have made so far.
        after_s: Seconds without a further one.
    """

    def __init__(self, pool: ServerPool, answers: Callable[[], int], *, after_s: float = ASK_AFTER_S) -> None:
        self._pool, self._answers, self._after_s = pool, answers, after_s
        self._seen, self._since = -1, 0.0
        self._found: list[float] = []
        self._thread: threading.Thread | None = None

    def look(self) -> float | None:
        """What was found since the last look, if anything; begins to ask if it is time. Returns at once."""
        answers, now = self._answers(), time.monotonic()
        if answers != self._seen:
            self._seen, self._since = answers, now
            self._found.clear()  # the answers say more
        found = self._found.pop() if self._found else None
        if now - self._since >= self._after_s and (self._thread is None or not self._thread.is_alive()):
            self._since = now
            self._thread = threading.Thread(target=self._ask, name="upriver-waits", daemon=True)
            self._thread.start()
        return found

    def close(self) -> None:
        """Wait for a question under way; the pool, which is closed before, has broken it off."""
        if self._thread is not None:
            self._thread.join()

    def _ask(self) -> None:
        if any(server.in_flight for server in self._pool.status()):
            return  # they would tell of this job's own work
        servers = [cast(ServerClient, client) for client in self._pool.up]
        if waits := [wait_s for server in servers for wait_s in expected_waits(server)]:
            self._found = [fmean(waits)]
