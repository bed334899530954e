"""The way from a device up to a server: what it carries and how long a round trip takes, over a short window.

Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading",
ICDCS 2022, section IV: a sliding window holds what probes and the requests themselves have shown, and a probe
is as large as what was sent of late.

A transfer of next to nothing takes a round trip; a larger one that of its time, and its bytes over the rate.
Of both the median counts, which one odd transfer does not move. Where two in a row say that the link is
another one now, what came before them is forgotten; round trips are few and of one moment.
"""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

from upriver.types import BANDWIDTH, MOST_BYTES

WINDOW = 8
"""Transfers looked back on: 40 s of probes alone, less than a second of requests."""

SMALL_BYTES = 1024
"""Up to here a transfer is a round trip: it fits one packet on every link."""

LEAST_PROBE, FIRST_PROBE, MOST_PROBE = 4 << 10, 64 << 10, 1 << 20
"""Bytes of a probe: where little is sent or nothing is known, before a request was sent, and at most."""

ROUND_TRIPS = 3
"""Sent in a row, and looked back on: one odd one moves nothing, and what they say is of now."""

PROBE_SHARE = 0.1
"""Of the time between two probes one may take so much: over a thin link a probe is in everybody's way."""

CHANGED = 1.5
"""The link is another one if it carries so many times as much, or as little: a fifth of jitter both ways
makes that at most."""

CONFIRMED = 2
"""Transfers in a row that say so before it is believed."""

LEAST_S, MOST_S = 1e-6, 1e6
"""A transfer that took less, or more, tells nothing."""

LEAST_SHARE = 0.05
"""What of a transfer's seconds counts at least: its round trip may have been quicker than the others."""


class LinkWindow:
    """The last transfers up to one server. Thread-safe.

    Args:
        window: Transfers looked back on.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._lock = threading.Lock()
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._rates: deque[float] = deque(maxlen=window)
        self._requests: deque[float] = deque(maxlen=window)

    def saw(self, num_bytes: float, seconds: float, *, request: bool = False) -> bool:
        """Take in one transfer; one that says nothing, since a clock was wrong, say, is left out.

        Args:
            request: Whether it was none of a probe: probes follow what requests send.

        Returns:
            Whether it says what the link carries.
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
        """Seconds of a round trip; 0 where none was seen."""
        with self._lock:
            return self._rtt_s()

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """What the link carries upwards, above 0; None where nothing has crossed it yet."""
        with self._lock:
            rates = list(self._rates)
        return None if not rates else min(median(rates), BANDWIDTH.most)

    @property
    def unsettled(self) -> bool:
        """Whether the last transfer says that the link is another one, and no second one has said so yet."""
        with self._lock:
            return self._is_another(1)

    def probe_bytes(self, every_s: float) -> int:
        """How large the next probe is to be, if one is sent that often; the last transfer may be right."""
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
        """Whether each of the ``last`` transfers is far from the ones before them, on the same side."""
        rates = list(self._rates)
        before, recent = rates[:-last], rates[-last:]
        if not before:
            return False
        usual = median(before)
        return min(recent) > CHANGED * usual or max(recent) < usual / CHANGED
