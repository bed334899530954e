"""Measure the link from a store during a load, and find how many requests fill it.

PISeL (Jafari et al., CIKM 2024, section 3.2, "Partition Downloader") sends one request after the other. Each
leaves when latency x bandwidth is left of the earlier ones. So the link never idles, and the first needed
bytes come first. If one connection does not fill the link, several must be in flight. Each load finds the
number by trial: it doubles the number as long as more bytes arrive. A load begins with half of the last
load's final number. The last result is no upper bound, since its connections may have limited it. It is no
lower bound either, since the link may have changed.
"""

from __future__ import annotations

import math

from upriver.coldstart.link_cache import StoreLink
from upriver.link import LinkEstimator

BURST_S = 0.05
"""Transfer seconds of one burst: memory that a connection has filled while nobody read."""

TRIAL_BUSY_S = 0.1
TRIAL_BYTES = 1 << 20
"""Fewest transfer seconds and bytes with a number of requests before more are tried."""

GAIN = 1.15
"""Least gain for which twice as many requests are kept. Less is chance."""

FULL = 0.9
"""Share of a bandwidth cap above which more requests bring nothing."""


class ConcurrencySearch:
    """Find the number of requests that fill a link during its use, from one thread.

    Attributes:
        wanted: Number of requests that should receive at once.
    """

    def __init__(self, link: StoreLink, *, most: int, bound_bytes_per_s: float = math.inf) -> None:
        """Start with an earlier estimate of the link, the most requests, and the bandwidth cap."""
        self.wanted = min(max(1, link.requests // 2), most)
        self._estimator = LinkEstimator(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, burst_s=BURST_S)
        self._said, self._requests = link, link.requests
        self._most, self._bound_bytes_per_s = most, bound_bytes_per_s
        self._bodies, self._at_s = 0, 0.0
        self._settled = most == 1
        self._before: tuple[int, float] | None = None  # the number of requests before, and their bandwidth
        self._trial_s, self._trial_bytes = 0.0, 0

    @property
    def link(self) -> StoreLink:
        """Current estimate; the given link before the first measurement."""
        estimator, said = self._estimator, self._said
        latency_s = estimator.latency_s
        return StoreLink(
            latency_s=said.latency_s if latency_s is None else latency_s,
            bandwidth_bytes_per_s=estimator.bandwidth() or said.bandwidth_bytes_per_s,
            requests=self._requests,
        )

    @property
    def known(self) -> bool:
        """True if the bandwidth was measured."""
        return self._estimator.known

    @property
    def bounded(self) -> bool:
        """True if the estimate is the bandwidth cap, and the link may give more."""
        return self.link.bandwidth_bytes_per_s >= FULL * self._bound_bytes_per_s

    def begun(self, now_s: float, waited_s: float) -> None:
        """Note the start of a response, and the seconds since its request."""
        self._tick(now_s)
        self._bodies += 1
        self._estimator.add_latency(waited_s)
        self._estimator.begin(now_s)

    def came(self, now_s: float, num_bytes: int) -> None:
        """Note received bytes."""
        self._tick(now_s)
        self._estimator.arrive(num_bytes, now_s)
        if not self._settled and self._bodies >= self.wanted:
            self._trial_bytes += num_bytes
            if self._trial_s >= TRIAL_BUSY_S and self._trial_bytes >= TRIAL_BYTES:
                self._judge(self._trial_bytes / self._trial_s)

    def ended(self, now_s: float) -> None:
        """Note the end of a response that had begun."""
        self._tick(now_s)
        self._bodies -= 1
        self._estimator.end(now_s)

    def _tick(self, now_s: float) -> None:
        if self._bodies >= self.wanted and not self._settled:
            self._trial_s += now_s - self._at_s
        self._at_s = now_s

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
        self._requests = self.wanted
