"""Measure a link by transfers without content, which grow until they take long enough to be meaningful.

A plan that sends next to nothing, or a cache that holds the epoch, leaves the link of a job quiet. Its last
bandwidth then says little about the present one. A probe crosses the job's meter like all traffic, and the
meter uses it as the newest figure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from upriver._threads.background import BackgroundThread
from upriver.errors import UpriverError
from upriver.link import QUIET_S
from upriver.rpc.client import ServerClient
from upriver.rpc.server_pool import ServerPool
from upriver.text import bytes_text
from upriver.types import Link

log = logging.getLogger("upriver")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeEffort:
    """The allowed cost of a probe.

    Attributes:
        first_bytes: Size of the first transfer.
        most_bytes: Size of the largest transfer.
        seconds: A transfer that took this long is the last: below it, start-up and bursts decide.
    """

    first_bytes: int
    most_bytes: int
    seconds: float


BEFORE = ProbeEffort(first_bytes=16 << 10, most_bytes=16 << 20, seconds=0.15)
"""Effort before a job begins, when nothing else crosses; 16 KiB at half a megabit take 0.26 s."""

BESIDE = ProbeEffort(first_bytes=16 << 10, most_bytes=1 << 20, seconds=0.1)
"""Effort during a training whose next request may come at any moment."""

GROWTH = 8
"""Largest growth from one transfer to the next: a rate measured during a burst says little about the link."""

BEYOND = 1.25
"""Aim for this many times the required seconds, so that one more transfer is the last."""


def measure_link(server: ServerClient) -> Link:
    """Measure bandwidth and round trip, before a job begins.

    Raises:
        UpriverError: If the server does not answer.
    """
    rtt = min(server.probe(1).first_byte_s for _ in range(3))
    return Link(bandwidth_bytes_per_s=probed(server, BEFORE), rtt_s=rtt)


def probed(server: ServerClient, effort: ProbeEffort) -> float:
    """Return the bytes per second of the last of several probes.

    Raises:
        UpriverError: If the server does not answer.
    """
    size = effort.first_bytes
    while True:
        probe = server.probe(size)
        if probe.seconds >= effort.seconds or size >= effort.most_bytes:
            return probe.bytes_per_s
        enough = int(BEYOND * effort.seconds * probe.bytes_per_s)
        size = min(max(2 * size, min(enough, GROWTH * size)), effort.most_bytes)


class QuietLink:
    """Probe a quiet link in a background thread during training; one probe at a time.

    Args:
        pool: The servers. A server that does not answer a probe is lost, as for any request.
        num_bytes: Returns the bytes that have crossed the link so far, by servers' answers and by direct
            reads.
        after_s: Seconds without a byte before a probe.
    """

    def __init__(self, pool: ServerPool, num_bytes: Callable[[], int], *, after_s: float = QUIET_S) -> None:
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
