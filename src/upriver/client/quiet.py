"""Probes of a link that nothing has crossed for a while, so that a plan is not judged by an old bandwidth.

A plan that ships next to nothing, or a cache that holds the epoch, leaves the link quiet, and what it carried
last says little of what it would carry now. A probe crosses the job's meter as all traffic does, which takes
it for the newest figure there is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from upriver.client.link import QUIET_S
from upriver.client.pool import ServerPool
from upriver.client.transport import ServerClient
from upriver.errors import UpriverError
from upriver.text import bytes_text

log = logging.getLogger("upriver")

PROBE_AFTER_S = QUIET_S
"""Seconds without a byte, of answers or of direct reads, after which the link is probed."""

PROBE_FIRST_BYTES = 16 << 10
"""Takes a quarter of a second at half a megabit per second, and says how much more may follow."""

PROBE_BYTES = 1 << 20
PROBE_S = 0.25
"""What a probe may move, and how long it may take, at most."""


class QuietLink:
    """Probes the link beside the training whenever it has been quiet; one probe at a time.

    Args:
        pool: The servers. One that does not answer a probe is lost, as for any request.
        num_bytes: Bytes that have crossed the link so far, by servers' answers and by direct reads.
        after_s: Seconds without a byte.
    """

    def __init__(
        self, pool: ServerPool, num_bytes: Callable[[], int], *, after_s: float = PROBE_AFTER_S
    ) -> None:
        self._pool, self._num_bytes, self._after_s = pool, num_bytes, after_s
        self._crossed, self._since = -1, 0.0
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a probe if it is time; returns at once."""
        crossed, now = self._num_bytes(), time.monotonic()
        if crossed != self._crossed:
            self._crossed, self._since = crossed, now
        if now - self._since < self._after_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._since = now
        self._thread = threading.Thread(target=self._probe, name="upriver-probe", daemon=True)
        self._thread.start()

    def _probe(self) -> None:
        lease = self._pool.borrow()
        if lease is None:
            return
        try:
            with lease:
                client = lease.client
                if isinstance(client, ServerClient) and client.meter.quiet_s >= self._after_s:
                    log.info("the link was quiet; it carries %s/s", bytes_text(probed(client)))
        except UpriverError as error:
            log.info("the link was quiet, and a probe failed: %s", error)


def probed(client: ServerClient) -> float:
    """Bytes per second by a short probe.

    Raises:
        UpriverError: If the server does not answer.
    """
    began = time.monotonic()
    first = client.probe(PROBE_FIRST_BYTES)
    took_s = time.monotonic() - began
    left_s = PROBE_S - took_s
    fitting = int(PROBE_FIRST_BYTES / max(took_s, 1e-6) * left_s)
    size = min(PROBE_BYTES - PROBE_FIRST_BYTES, fitting)
    if size > PROBE_FIRST_BYTES:
        first = client.probe(size)
    return first.num_bytes / max(first.seconds, 1e-6)
