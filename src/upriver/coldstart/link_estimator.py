"""What the link to a store lets through, as the requests of a load show it, and how many of them fill it.

One request after the other, each sent when latency x bandwidth is left of those before, is what PISeL does
(Jafari et al., CIKM 2024, section 3.2, "Partition Downloader"): the link never idles, and what is needed
first comes first. Where one connection does not fill the link, several must be under way. How many is found
by trying, in each load: twice as many as long as more comes through. A load begins with half of those that
the last one ended with. What that one saw is no reason to stop, as it may have been all that its connections
gave, nor to go on with as many, as the link may have become another.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

FEWEST_BUSY_S = 0.05
FEWEST_BYTES = 256 * 1024
"""What must have crossed before it says something of a bandwidth: less is one burst."""

SURE_BYTES = 16 << 20
"""With so many it was no burst, however short it took."""

WINDOW_BUSY_S = 2.0
"""Seconds of transfers that the bandwidth is taken from."""

HEADS = 64
"""Answers of which the quickest says what the latency is: while the link is full, most have to wait."""

TRIAL_BUSY_S = 0.1
TRIAL_BYTES = 1 << 20
"""What so many requests at once must have shown before more are tried."""

GAIN = 1.15
"""Twice as many requests are worth it if they bring so many times as much; less is chance."""

FULL = 0.9
"""Of a bound on the bandwidth: with that, more requests bring nothing."""

BURST_S = 0.05
"""Of a capped bandwidth, what may pass at once after a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLink:
    """The way from a store.

    Attributes:
        latency_s: From a request to its first byte.
        bandwidth_bytes_per_s: Of all requests together.
        requests: How many at once it takes to have that.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    requests: int = 1

    @property
    def hidden_bytes(self) -> float:
        """What comes in while a request waits for its first byte."""
        return self.latency_s * self.bandwidth_bytes_per_s


class FlowMeter:
    """Measures a link while it is used; one thread's.

    Attributes:
        link: As it has shown itself, or where it has not yet, as it was said to be.
        known: Whether its bandwidth has shown itself.
        wanted: How many requests should be receiving at once.
    """

    def __init__(self, link: StoreLink, *, most: int, bound_bytes_per_s: float = math.inf) -> None:
        """Begin with what is said of a link.

        Args:
            link: What it is said to be.
            most: Requests under way at once, at most.
            bound_bytes_per_s: An operator's, see :class:`Cap`.
        """
        self.link, self.known = link, False
        self.wanted = min(max(1, link.requests // 2), most)
        self._said, self._most, self._bound_bytes_per_s = link, most, bound_bytes_per_s
        self._bodies, self._at_s = 0, 0.0
        self._busy_s, self._nbytes = 0.0, 0
        self._points = deque([(0.0, 0)])  # busy seconds, bytes
        self._heads: deque[float] = deque(maxlen=HEADS)
        self._settled = most == 1
        self._before: tuple[int, float] | None = None  # how many there were before, and what they brought
        self._trial_s, self._trial_bytes = 0.0, 0

    @property
    def bounded(self) -> bool:
        """Whether the link may give more than was seen: what came was what may come."""
        return self.link.bandwidth_bytes_per_s >= FULL * self._bound_bytes_per_s

    def begun(self, now_s: float, waited_s: float) -> None:
        """An answer begins, so long after it was asked for."""
        self._tick(now_s)
        self._bodies += 1
        self._heads.append(waited_s)
        self._learn()

    def came(self, now_s: float, num_bytes: int) -> None:
        """So many bytes have come."""
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
        """An answer that had begun is over."""
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
        """Look at what as many requests as are wanted now bring."""
        self._trial_s, self._trial_bytes = 0.0, 0
        if self._before is not None and rate < GAIN * self._before[1]:
            self.wanted, self._settled = self._before[0], True
        elif rate >= FULL * self._bound_bytes_per_s or self.wanted == self._most:
            self._settled = True
        else:
            self._before = self.wanted, rate
            self.wanted = min(2 * self.wanted, self._most)
        self.link = replace(self.link, requests=self.wanted)


class Cap:
    """An operator's bound on the bandwidth, a bucket of tokens; one thread's."""

    def __init__(self, bytes_per_s: float) -> None:
        """Start with a full one.

        Args:
            bytes_per_s: At most; infinite for no bound.
        """
        self._bytes_per_s = bytes_per_s
        self._free_at_s = -math.inf

    def taken(self, now_s: float, num_bytes: int) -> float:
        """So many bytes have passed: the seconds for which no more may."""
        if self._bytes_per_s == math.inf:
            return 0.0
        since_s = max(self._free_at_s, now_s - BURST_S)
        self._free_at_s = since_s + num_bytes / self._bytes_per_s
        return max(0.0, self._free_at_s - now_s)
