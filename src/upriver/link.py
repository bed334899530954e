"""Estimate the bandwidth and latency of a link from its transfers, and cap the rate of transfers.

Three rooms estimate links, each with a `LinkEstimator`:

- `upriver.rpc.link_meter`: from storage to compute, by answers and direct reads that share the link;
- `upriver.coldstart.fetch.concurrency`: from a store, by the weights of a model;
- `upriver.inference.remote_server`: from a device up to a server, by single requests and probes, as in Liu,
  Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading",
  ICDCS 2022, section IV: a sliding window holds the last transfers, and a probe is as large as requests.

A sample of a link is one whole transfer, or a slice of `SLICE_S` busy seconds of transfers that overlap. Time
during which nothing is on its way says nothing about the link, and overlapping transfers count once. If the
last samples show another link, earlier ones are forgotten.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from upriver.types import BANDWIDTH, MOST_BYTES

CHANGED, CHANGED_REQUESTS = 1.6, 1.5
"""Factors by which a changed link differs: by overlapping transfers, and by requests. Jitter of a fifth both
ways makes 1.5."""

SLICE_S = 0.125
"""Busy seconds in a sample of overlapping transfers."""

SLICES, CHANGED_SLICES = 80, 8
"""Slices in the window, and the last ones that show a changed link. Ten busy seconds smooth single frames,
and follow a link that changes within an epoch. One second shows a change."""

MAX_AGE_S = 60.0
"""Age of the oldest slice: a link with little traffic is busy for ten seconds in an hour."""

QUIET_S = 5.0
"""Seconds without a transfer after which earlier slices are out of date; later ones count alone."""

FRESH_BYTES, SURE_BYTES = 256 * 1024, 16 << 20
"""Bytes that count before the first slice is complete: fewer may be a head without a body. `SURE_BYTES` is
too much for one burst, see `LinkEstimator`."""

LATENCIES = 64
"""Requests whose least latency is the link's. While the link is full, most of them wait for other bytes."""

TRANSFERS, CHANGED_TRANSFERS, ROUND_TRIPS = 8, 2, 3
"""Whole transfers in the window, the last ones that show a changed link, and round trips in the window. Three
of them ignore outliers, and they are recent."""

SMALL_BYTES = 1024
"""Largest whole transfer that counts as a round trip. It fits one packet on every link."""

LEAST_S, MOST_S = 1e-6, 1e6
"""Bounds on a whole transfer's seconds. A transfer outside is ignored."""

LEAST_SHARE = 0.05
"""Least share of a transfer's seconds for its bytes: its round trip may have been shorter than the others."""

LEAST_PROBE, FIRST_PROBE, MOST_PROBE = 4 << 10, 64 << 10, 1 << 20
"""Bytes of a probe: at least, before the first request, and at most."""

PROBE_SHARE, MOST_PROBE_SHARE = 0.01, 0.1
"""Share of the time between two probes that one takes, and where round trips are long. A request that begins
meanwhile waits for it."""

PROBE_ROUND_TRIPS = 8
"""Round trips that a probe takes at least: if these are of a busy server, they vary as much. The rate is then
off by a seventh."""


class Sample(NamedTuple):
    """Bytes that crossed a link, the seconds for which they kept it busy, and the time of the last one."""

    num_bytes: float
    busy_s: float
    at_s: float = 0.0


def mean_rate(samples: Iterable[Sample]) -> float:
    """Return all bytes over all busy seconds: the rate of a stream, whose stalls count."""
    samples = list(samples)
    busy_s = sum(sample.busy_s for sample in samples)
    return sum(sample.num_bytes for sample in samples) / busy_s if busy_s > 0 else 0.0


def median_rate(samples: Iterable[Sample]) -> float:
    """Return the median of the samples' rates: the rate of a typical request, whatever one outlier is."""
    return median(sample.num_bytes / sample.busy_s for sample in samples)


class LinkEstimator:
    """Estimate one link, in one direction. Thread-safe; the caller gives all times.

    Args:
        window: Samples that count.
        changed: The last samples, which must show a changed link.
        changed_by: Factor by which these must differ from the earlier ones.
        each: True if each of them must; otherwise their rate together.
        rate_of: Makes the bandwidth of some samples.
        latencies: Latencies whose least counts.
        burst_s: Busy seconds below which all that has crossed may be one burst of up to `SURE_BYTES`. Where
            it is given, less than `FRESH_BYTES` say nothing, however long they took.
        bandwidth_bytes_per_s: Bandwidth until enough has crossed; None where unknown.
        now_s: Time of the last known use.
    """

    def __init__(
        self,
        *,
        window: int = SLICES,
        changed: int = CHANGED_SLICES,
        changed_by: float = CHANGED,
        each: bool = False,
        rate_of: Callable[[Iterable[Sample]], float] = mean_rate,
        latencies: int = LATENCIES,
        burst_s: float = 0.0,
        bandwidth_bytes_per_s: float | None = None,
        now_s: float = -math.inf,
    ) -> None:
        self._lock = threading.RLock()
        self._changed, self._changed_by, self._each = changed, changed_by, each
        self._rate_of = rate_of
        self._samples: deque[Sample] = deque(maxlen=window)
        self._latencies: deque[float] = deque(maxlen=latencies)
        self._requests: deque[float] = deque(maxlen=window)
        self._earlier, self._burst_s = bandwidth_bytes_per_s, burst_s
        self._active, self._at_s = 0, now_s
        self._bytes, self._busy_s = 0.0, 0.0  # of the slice that is not complete
        self._crossed = 0  # bytes since the start, or since the last pause

    @classmethod
    def of_requests(cls, window: int = TRANSFERS) -> LinkEstimator:
        """Make an estimator for whole transfers, see `add_transfer`."""
        return cls(
            window=window,
            changed=CHANGED_TRANSFERS,
            changed_by=CHANGED_REQUESTS,
            each=True,
            rate_of=median_rate,
            latencies=ROUND_TRIPS,
        )

    # ------------------------------------------------------------------------------ whole transfers

    def add_transfer(self, num_bytes: float, seconds: float, *, request: bool = False) -> bool:
        """Add one whole transfer, of a request or a probe. Return True if it measures the bandwidth.

        A tiny transfer takes a round trip. A larger one takes a round trip and its bytes over the rate. An
        implausible one, for example after a clock error, is ignored.
        """
        if not (0 < num_bytes <= MOST_BYTES and LEAST_S <= seconds <= MOST_S):
            return False
        with self._lock:
            if request:
                self._requests.append(num_bytes)
            if num_bytes <= SMALL_BYTES:
                self._latencies.append(seconds)
                return False
            busy_s = max(seconds - (self.latency_s or 0.0), LEAST_SHARE * seconds)
            self._add(Sample(num_bytes, busy_s))
        return True

    def probe_bytes(self, every_s: float) -> int:
        """Return the size of the next probe for this interval. A slower last transfer counts at once."""
        with self._lock:
            if not self._samples:
                return LEAST_PROBE
            wanted = median(self._requests) if self._requests else FIRST_PROBE
            rate = min(self._rate_of(self._samples), self._rate_of([self._samples[-1]]))
            seconds = max(PROBE_SHARE * every_s, PROBE_ROUND_TRIPS * (self.latency_s or 0.0))
            most = min(seconds, MOST_PROBE_SHARE * every_s) * rate
            return int(min(max(min(wanted, most), LEAST_PROBE), MOST_PROBE))

    # ------------------------------------------------------------------------- overlapping transfers

    def begin(self, now_s: float) -> None:
        """Note that bytes of a transfer are on their way from now on."""
        with self._lock:
            if not self._active and now_s - self._at_s >= QUIET_S:
                self._earlier = self.bandwidth()
                self._samples.clear()
                self._bytes, self._busy_s, self._crossed = 0.0, 0.0, 0
            self._tick(now_s)
            self._active += 1

    def arrive(self, num_bytes: int, now_s: float) -> None:
        """Add bytes of any transfer."""
        with self._lock:
            self._bytes += num_bytes
            self._crossed += num_bytes
            self._tick(now_s)

    def end(self, now_s: float) -> None:
        """Note the end of a transfer that had begun."""
        with self._lock:
            self._tick(now_s)
            self._active -= 1

    def add_latency(self, seconds: float) -> None:
        """Add the seconds from a request to the first byte of its answer."""
        with self._lock:
            self._latencies.append(seconds)

    # ------------------------------------------------------------------------------------- estimates

    def bandwidth(self, now_s: float = -math.inf) -> float | None:
        """Return the bytes per second, above 0; None where unknown.

        After a pause the earlier figure holds until enough has crossed anew.
        """
        with self._lock:
            if self._active:
                self._tick(now_s)
            if not self.known:
                return self._earlier
            running = [Sample(self._bytes, self._busy_s)] if self._bytes or self._busy_s else []
            rate = self._rate_of([*self._samples, *running])
        return min(rate, BANDWIDTH.most) if rate > 0 else None

    @property
    def known(self) -> bool:
        """True if enough has crossed since the start, or since the last pause."""
        with self._lock:
            if self._burst_s and self._crossed < FRESH_BYTES:
                return False
            enough = FRESH_BYTES if self._busy_s >= self._burst_s else SURE_BYTES
            return bool(self._samples) or self._bytes >= enough

    @property
    def latency_s(self) -> float | None:
        """Seconds from a request to its first byte; None where unknown."""
        with self._lock:
            return min(self._latencies, default=None)

    @property
    def newest(self) -> float | None:
        """Bytes per second of the last sample; None without one."""
        with self._lock:
            if not self._samples:
                return None
            return min(self._rate_of([self._samples[-1]]), BANDWIDTH.most)

    def restart(self) -> None:
        """Forget all samples but the last."""
        with self._lock:
            while len(self._samples) > 1:
                self._samples.popleft()

    def idle_s(self, now_s: float) -> float:
        """Return the seconds since anything has crossed or been on its way."""
        with self._lock:
            return 0.0 if self._active else now_s - self._at_s

    # ------------------------------------------------------------------------ with the lock held

    def _tick(self, now_s: float) -> None:
        """Count the time up to now as busy, if a transfer is on its way."""
        now_s = max(now_s, self._at_s)  # a thread may have been overtaken
        if self._active:
            self._busy_s += now_s - self._at_s
        self._at_s = now_s
        if slices := int(self._busy_s / SLICE_S):
            rate = self._bytes / self._busy_s
            for _ in range(min(slices, SLICES)):
                self._add(Sample(rate * SLICE_S, SLICE_S, now_s))
            self._busy_s -= slices * SLICE_S
            self._bytes = rate * self._busy_s
        while len(self._samples) > 1 and now_s - self._samples[0].at_s > MAX_AGE_S:
            self._samples.popleft()

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample)
        if self._differ(self._changed):
            while len(self._samples) > self._changed:
                self._samples.popleft()

    def _differ(self, last: int) -> bool:
        """Return True if the last samples are far from the earlier ones, in one direction."""
        earlier, recent = list(self._samples)[:-last], list(self._samples)[-last:]
        if not earlier:
            return False
        usual = self._rate_of(earlier)
        rates = [self._rate_of([sample]) for sample in recent] if self._each else [self._rate_of(recent)]
        return min(rates) > self._changed_by * usual or max(rates) < usual / self._changed_by


class TokenBucket:
    """Cap the rate of all transfers together. Not thread-safe.

    Between any two moments at most ``rate * seconds + burst`` bytes pass, if each caller waits as told.

    Args:
        rate_bytes_per_s: The cap, which may change at any time; infinite for none.
        burst_bytes: Bytes that may pass at once after a pause.
    """

    def __init__(self, rate_bytes_per_s: float, *, burst_bytes: float) -> None:
        self.rate_bytes_per_s, self._burst_bytes = rate_bytes_per_s, burst_bytes
        self._free_at_s = -math.inf  # when all taken bytes have passed

    def take(self, num_bytes: float, now_s: float) -> float:
        """Take bytes; return the seconds from now until they have passed, 0 if within the burst."""
        rate = self.rate_bytes_per_s
        if rate == math.inf:
            return 0.0
        self._free_at_s = max(self._free_at_s, now_s - self._burst_bytes / rate) + num_bytes / rate
        return max(0.0, self._free_at_s - now_s)
