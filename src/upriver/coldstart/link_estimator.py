"""Estimate the bandwidth and latency of a store's link, and how many requests fill it.

`upriver.rpc.link_meter` estimates the link to servers.

PISeL (Jafari et al., CIKM 2024, section 3.2, "Partition Downloader") sends one request after the other. Each
leaves when latency x bandwidth is left of the earlier ones. So the link never idles, and the first needed
bytes come first. If one connection does not fill the link, several must be in flight. Each load finds the
number by trial: it doubles the number as long as more bytes arrive. A load begins with half of the last
load's final number. The last result is no upper bound, since its connections may have limited it. It is no
lower bound either, since the link may have changed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

FEWEST_BUSY_S = 0.05
FEWEST_BYTES = 256 * 1024
"""Fewest transfer seconds and bytes for an estimate of the bandwidth. Less may be one burst."""

SURE_BYTES = 16 << 20
"""Bytes that suffice for an estimate in any time, because they cannot be one burst."""

WINDOW_BUSY_S = 2.0
"""Transfer seconds over which the bandwidth is averaged."""

HEADS = 64
"""Responses whose lowest latency is the estimate. While the link is full, most of them have to wait."""

TRIAL_BUSY_S = 0.1
TRIAL_BYTES = 1 << 20
"""Fewest transfer seconds and bytes with a number of requests before more are tried."""

GAIN = 1.15
"""Least gain for which twice as many requests are kept. Less is chance."""

FULL = 0.9
"""Share of a bandwidth cap above which more requests bring nothing."""

BURST_S = 0.05
"""Burst of a capped bandwidth after a pause, in seconds of the cap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLink:
    """Link from a store.

    Attributes:
        latency_s: Seconds from a request to its first byte.
        bandwidth_bytes_per_s: Bandwidth of all requests together.
        requests: Concurrent requests that this bandwidth needs.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    requests: int = 1

    @property
    def hidden_bytes(self) -> float:
        """Bytes that arrive while a request waits for its first byte."""
        return self.latency_s * self.bandwidth_bytes_per_s


class FlowMeter:
    """Measure a link during its use, from one thread.

    Attributes:
        link: Current estimate; the given link before the first measurement.
        known: True if the bandwidth was measured.
        wanted: Number of requests that should receive at once.
    """

    def __init__(self, link: StoreLink, *, most: int, bound_bytes_per_s: float = math.inf) -> None:
        """Start with a given link.

        Args:
            link: Earlier estimate of the link.
            most: Most concurrent requests.
            bound_bytes_per_s: Bandwidth cap, see :class:`TokenBucket`.
        """
        self.link, self.known = link, False
        self.wanted = min(max(1, link.requests // 2), most)
        self._said, self._most, self._bound_bytes_per_s = link, most, bound_bytes_per_s
        self._bodies, self._at_s = 0, 0.0
        self._busy_s, self._nbytes = 0.0, 0
        self._points = deque([(0.0, 0)])  # transfer seconds, bytes
        self._heads: deque[float] = deque(maxlen=HEADS)
        self._settled = most == 1
        self._before: tuple[int, float] | None = None  # the number of requests before, and their bandwidth
        self._trial_s, self._trial_bytes = 0.0, 0

    @property
    def bounded(self) -> bool:
        """True if the estimate is the bandwidth cap, and the link may give more."""
        return self.link.bandwidth_bytes_per_s >= FULL * self._bound_bytes_per_s

    def begun(self, now_s: float, waited_s: float) -> None:
        """Note the start of a response, and the seconds since its request."""
        self._tick(now_s)
        self._bodies += 1
        self._heads.append(waited_s)
        self._learn()

    def came(self, now_s: float, num_bytes: int) -> None:
        """Note received bytes."""
        self._tick(now_s)
        self._nbytes += num_bytes
        self._points.append((self._busy_s, self._nbytes))
        while len(self._points) > 2 and self._busy_s - self._points[1][0] > WINDOW_BUSY_S:
            self._points.popleft()
        self._learn()
        if not self._settled and self._bodies >= self.wanted:
            self._trial_bytes += num_bytes
            if self._trial_s >= TRIAL_BUSY_S and self._trial_bytes >= TRIAL_BYTES:
                self._judge(self._trial_bytes / self._trial_s)

    def ended(self, now_s: float) -> None:
        """Note the end of a response that had begun."""
        self._tick(now_s)
        self._bodies -= 1

    def _tick(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        self._at_s = now_s
        if self._bodies:
            self._busy_s += passed_s
        if self._bodies >= self.wanted and not self._settled:
            self._trial_s += passed_s

    def _learn(self) -> None:
        (since_s, before), latency_s = self._points[0], min(self._heads, default=self._said.latency_s)
        busy_s, nbytes = self._busy_s - since_s, self._nbytes - before
        self.known = (busy_s >= FEWEST_BUSY_S and nbytes >= FEWEST_BYTES) or nbytes >= SURE_BYTES
        bandwidth = nbytes / busy_s if self.known else self._said.bandwidth_bytes_per_s
        self.link = StoreLink(
            latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, requests=self.link.requests
        )

    def _judge(self, rate: float) -> None:
        """Compare the bandwidth of the current number of requests with the earlier one."""
        self._trial_s, self._trial_bytes = 0.0, 0
        if self._before is not None and rate < GAIN * self._before[1]:
            self.wanted, self._settled = self._before[0], True
        elif rate >= FULL * self._bound_bytes_per_s or self.wanted == self._most:
            self._settled = True
        else:
            self._before = self.wanted, rate
            self.wanted = min(2 * self.wanted, self._most)
        self.link = replace(self.link, requests=self.wanted)


class TokenBucket:
    """Token bucket for an operator's bandwidth cap, used by one thread."""

    def __init__(self, bytes_per_s: float) -> None:
        """Start with a full bucket.

        Args:
            bytes_per_s: Bandwidth cap; infinite for none.
        """
        self._bytes_per_s = bytes_per_s
        self._free_at_s = -math.inf

    def taken(self, now_s: float, num_bytes: int) -> float:
        """Count transferred bytes. Return the seconds to pause before more."""
        if self._bytes_per_s == math.inf:
            return 0.0
        since_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = since_s + num_bytes / self._bytes_per_s
        return max(0.0, self._free_at_s - now_s)
