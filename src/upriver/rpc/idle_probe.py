"""Probe a link that nothing has crossed for a while, so that a plan is not judged by an old bandwidth.

A plan that sends next to nothing, or a cache that holds the epoch, leaves the link quiet. Its last bandwidth
then says little about the present one. A probe crosses the job's meter like all traffic, and the meter uses
it as the newest figure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from upriver._threads.background import BackgroundThread
from upriver.errors import UpriverError
from upriver.rpc.client import ServerClient
from upriver.rpc.link_meter import QUIET_S
from upriver.rpc.link_probe import BESIDE, probed
from upriver.rpc.server_pool import ServerPool
from upriver.text import bytes_text

log = logging.getLogger("upriver")

PROBE_AFTER_S = QUIET_S
"""Seconds without a byte, of answers or of direct reads, after which the link is probed."""


class QuietLink:
    """Probe a quiet link in a background thread during training; one probe at a time.

    Args:
        pool: The servers. A server that does not answer a probe is lost, as for any request.
        num_bytes: Returns the bytes that have crossed the link so far, by servers' answers and by direct
            reads.
        after_s: Seconds without a byte before a probe.
    """

    def __init__(
        self, pool: ServerPool, num_bytes: Callable[[], int], *, after_s: float = PROBE_AFTER_S
    ) -> None:
        self._pool, self._num_bytes, self._after_s = pool, num_bytes, after_s
        self._crossed, self._since = -1, 0.0
        self._thread = BackgroundThread(self._probe, name="probe")

    def look(self) -> None:
        """Start a probe if it is time; never blocks."""
        crossed, now = self._num_bytes(), time.monotonic()
        if crossed != self._crossed:
            self._crossed, self._since = crossed, now
        if now - self._since < self._after_s or self._thread.is_alive():
            return
        self._since = now
        self._thread = BackgroundThread(self._probe, name="probe")
        self._thread.start()

    def close(self) -> None:
        """Wait for a running probe; the pool, which is closed before, has interrupted it."""
        self._thread.join()

    def _probe(self) -> None:
        lease = self._pool.borrow()
        if lease is None:
            return
        try:
            with lease:
                client = lease.client
                if isinstance(client, ServerClient) and client.meter.quiet_s >= self._after_s:
                    log.info("the link was quiet; it carries %s/s", bytes_text(probed(client, BESIDE)))
        except UpriverError as error:
            log.info("the link was quiet, and a probe failed: %s", error)
