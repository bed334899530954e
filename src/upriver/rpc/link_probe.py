"""Measure a link by transfers without content, which grow until they take long enough to be meaningful."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.rpc.client import ServerClient


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEstimate:
    """The bandwidth and round trip that probes of the link showed."""

    bandwidth_bytes_per_s: float
    rtt_s: float


def measure_link(server: ServerClient) -> LinkEstimate:
    """Measure bandwidth and round trip, before a job begins.

    Raises:
        UpriverError: If the server does not answer.
    """
    rtt = min(server.probe(1).first_byte_s for _ in range(3))
    return LinkEstimate(bandwidth_bytes_per_s=probed(server, BEFORE), rtt_s=rtt)


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
