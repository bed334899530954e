"""Estimate bandwidth and round trip of the link from a device up to a server, over a sliding window.

Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading",
ICDCS 2022, section IV: a sliding window holds the measurements of probes and requests, and a probe is as
large as recent requests.

A tiny transfer takes a round trip. A larger one takes a round trip and its bytes over the rate. The estimate
of both is the median, which one outlier does not move. If two transfers in a row indicate another link,
earlier ones are forgotten. Round trips are few and recent anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

from upriver.types import BANDWIDTH, MOST_BYTES

WINDOW = 8
"""Transfers in the window: 40 s of probes alone, less than a second of requests."""

SMALL_BYTES = 1024
"""Largest transfer that counts as a round trip. It fits one packet on every link."""

LEAST_PROBE, FIRST_PROBE, MOST_PROBE = 4 << 10, 64 << 10, 1 << 20
"""Bytes of a probe: at least, before the first request, and at most."""

ROUND_TRIPS = 3
"""Probes in a row, and round trips in the window: one outlier does not move their median, and they are
recent."""

PROBE_SHARE = 0.1
"""Share of the time between two probes that one may take. On a slow link a probe delays all other
transfers."""

CHANGED = 1.5
"""Factor by which the rate of a changed link differs. A fifth of jitter both ways stays within it."""

CONFIRMED = 2
"""Transfers in a row that must indicate a changed link."""

LEAST_S, MOST_S = 1e-6, 1e6
"""Bounds on a transfer's seconds. A transfer outside is ignored."""

LEAST_SHARE = 0.05
"""Least share of a transfer's seconds for its bytes: its round trip may have been shorter than the others."""


class LinkWindow:
    """Window of the last transfers up to one server. Thread-safe.

    Args:
        window: Transfers in the window.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._lock = threading.Lock()
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._rates: deque[float] = deque(maxlen=window)
        self._requests: deque[float] = deque(maxlen=window)

    def saw(self, num_bytes: float, seconds: float, *, request: bool = False) -> bool:
        """Add one transfer. An implausible one, for example after a clock error, is ignored.

        Args:
            num_bytes: Bytes of the transfer.
            seconds: Its duration.
            request: True for a request's transfer. Probes have the size of requests.

        Returns:
            True if it measures the bandwidth.
        """
        if not (0 < num_bytes <= MOST_BYTES and LEAST_S <= seconds <= MOST_S):
            return False
        with self._lock:
            if request:
                self._requests.append(num_bytes)
            if num_bytes <= SMALL_BYTES:
                self._round_trips.append(seconds)
                return False
            self._rates.append(num_bytes / max(seconds - self._rtt_s(), LEAST_SHARE * seconds))
            if self._is_another(CONFIRMED):
                self._rates = deque(list(self._rates)[-CONFIRMED:], maxlen=self._rates.maxlen)
        return True

    @property
    def rtt_s(self) -> float:
        """Seconds of a round trip; 0 if none was measured."""
        with self._lock:
            return self._rtt_s()

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Upload bandwidth, above 0; None if it was not measured."""
        with self._lock:
            rates = list(self._rates)
        return None if not rates else min(median(rates), BANDWIDTH.most)

    @property
    def unsettled(self) -> bool:
        """True if only the last transfer indicates a changed link so far."""
        with self._lock:
            return self._is_another(1)

    def probe_bytes(self, every_s: float) -> int:
        """Return the size of the next probe for this interval. A slower last transfer counts at once."""
        with self._lock:
            rates = list(self._rates)
            wanted = median(self._requests) if self._requests else FIRST_PROBE
        if not rates:
            return LEAST_PROBE
        wanted = min(wanted, PROBE_SHARE * every_s * min(median(rates), rates[-1]))
        return int(min(max(wanted, LEAST_PROBE), MOST_PROBE))

    def _rtt_s(self) -> float:
        return median(self._round_trips) if self._round_trips else 0.0

    def _is_another(self, last: int) -> bool:
        """Return True if each of the ``last`` transfers is far from the earlier ones, in one direction."""
        rates = list(self._rates)
        before, recent = rates[:-last], rates[-last:]
        if not before:
            return False
        usual = median(before)
        return min(recent) > CHANGED * usual or max(recent) < usual / CHANGED
