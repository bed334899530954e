"""Decide the next request's cut and server: pure functions, called once per request.

`upriver.latency.LatencySums` adds up in advance what stays equal from request to request. A
`ServerConditions` holds what changes. Among several servers the decision takes the one with the least
predicted seconds. A decision may also leave all stages to the device, which wins ties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from upriver.cost import Array
from upriver.errors import ConfigError
from upriver.latency import LatencySums, last_of_least
from upriver.types import BANDWIDTH, require_finite

DEFAULT_POLICY = "inference"
"""Ours: LoADPart's sum plus all other times of a request."""


SWEEP_BYTES_PER_S = tuple(2.0**power for power in range(14, 31))
"""Links that a device may have: 131 kbit/s to 8.6 Gbit/s in doublings."""

SWEEP_LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Loads up to a server that is hardly worth asking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConditions:
    """Present state of a server and of the link to it.

    Attributes:
        upload_bytes_per_s: Upload bandwidth, above 0.
        download_bytes_per_s: Download bandwidth; None where unknown, which counts the answer as free to
            fetch.
        rtt_s: Time of a request apart from its bytes and the server's work.
        load: The server's factor k.
        slowed: The last request's factor where it was much larger than k; else 1.
        wait_s: Time that a request would wait in the server's queue.
    """

    upload_bytes_per_s: float
    download_bytes_per_s: float | None = None
    rtt_s: float = 0.0
    load: float = 1.0
    slowed: float = 1.0
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        BANDWIDTH.check("upload_bytes_per_s", self.upload_bytes_per_s)
        if self.download_bytes_per_s is not None:
            BANDWIDTH.check("download_bytes_per_s", self.download_bytes_per_s)
        require_finite("rtt_s", self.rtt_s)
        require_finite("load", self.load, at_least=1.0)
        require_finite("slowed", self.slowed, at_least=1.0)
        require_finite("wait_s", self.wait_s)


Estimate = Callable[[LatencySums, ServerConditions], Array]
"""Seconds of a request at each cut."""


def _inference(sums: LatencySums, now: ServerConditions) -> Array:
    return sums.request_s(
        upload=now.upload_bytes_per_s,
        download=now.download_bytes_per_s,
        load=max(now.load, now.slowed),
        rtt_s=now.rtt_s,
        wait_s=now.wait_s,
    )


def _loadpart(sums: LatencySums, now: ServerConditions) -> Array:
    return sums.paper_s(upload=now.upload_bytes_per_s, load=now.load)


def _neurosurgeon(sums: LatencySums, now: ServerConditions) -> Array:
    return sums.paper_s(upload=now.upload_bytes_per_s)


ESTIMATES: Mapping[str, Estimate] = MappingProxyType(
    {
        "inference": _inference,
        "loadpart": _loadpart,
        "neurosurgeon": _neurosurgeon,
        "local": _inference,
        "remote": _inference,
    }
)
"""Policies by name. LoADPart is compared with ``neurosurgeon``, which is the same without k. ``local`` and
``remote`` have no choice of a cut and use the seconds to choose among servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionRule:
    """Rule by which requests are cut.

    Attributes:
        policy: One of `ESTIMATES`.
        cut: The only allowed cut; None where the policy chooses.
    """

    policy: str = DEFAULT_POLICY
    cut: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in ESTIMATES:
            raise ConfigError(f"policy must be one of {', '.join(ESTIMATES)}, got {self.policy!r}")

    def cut_of(self, num_stages: int) -> int | None:
        """Return the only allowed cut of a network of so many stages; None where the policy chooses."""
        only = {"local": num_stages, "remote": 0}.get(self.policy)
        return self.cut if only is None else only

    @property
    def must(self) -> bool:
        """Return whether to ask a server even where its seconds are unknown."""
        return self.policy == "remote" or self.cut is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class CutChoice:
    """A chosen cut.

    Attributes:
        cut: Number of stages that the device runs.
        server: Index of the offered server that runs the other stages; None where there are none.
        seconds: Predicted seconds of the request; infinite where unknown.
    """

    cut: int
    server: int | None
    seconds: float


def choose(
    rule: PartitionRule,
    device_s: float,
    num_stages: int,
    offers: Sequence[tuple[LatencySums, ServerConditions | None]],
    *,
    deadline_s: float = np.inf,
) -> CutChoice:
    """Return the cut and the server with the least predicted seconds; the device alone wins ties.

    A server that is predicted to miss the deadline is not chosen. The device would compute the rest after it,
    and the whole would take longer than without the server.

    Args:
        device_s: Seconds of all stages on the device.
        num_stages: Stages of the network; also the cut at which no server is asked.
        offers: For each available server, the sums of its stages and its present state, if known.
        deadline_s: Time after which the device goes on by itself. It is ignored where a server must be asked.
    """
    only = rule.cut_of(num_stages)
    best = CutChoice(cut=num_stages, server=None, seconds=device_s)
    if only == num_stages:
        return best
    if only is not None:
        best = CutChoice(cut=num_stages, server=None, seconds=np.inf)
    for server, (sums, now) in enumerate(offers):
        if now is None:
            if rule.must and best.server is None:
                best = CutChoice(cut=only or 0, server=server, seconds=np.inf)
            continue
        seconds = ESTIMATES[rule.policy](sums, now)
        if not rule.must:
            seconds[:-1][seconds[:-1] > deadline_s] = np.inf
        cut = last_of_least(seconds) if only is None else only
        if cut < num_stages and seconds[cut] < best.seconds:
            best = CutChoice(cut=cut, server=server, seconds=float(seconds[cut]))
    if best.server is None:
        return CutChoice(cut=num_stages, server=None, seconds=device_s)
    return best


def kept_away(
    rule: PartitionRule,
    choice: CutChoice,
    offers: Sequence[tuple[LatencySums, ServerConditions | None]],
    *,
    deadline_s: float = np.inf,
) -> list[int]:
    """Return the servers that would be faster than the choice if they were idle; only for our own policy.

    ``choice`` is the result of `choose` for the same offers and deadline.
    """
    if rule.policy != DEFAULT_POLICY or rule.cut is not None:
        return []
    found = []
    for server, (sums, now) in enumerate(offers):
        if server == choice.server or now is None:
            continue
        free = replace(now, load=1.0, slowed=1.0, wait_s=0.0)
        if free == now:
            continue
        seconds = _inference(sums, free)[:-1]
        if seconds.size and seconds.min() < min(choice.seconds, deadline_s):
            found.append(server)
    return found


def likely(rule: PartitionRule, sums: LatencySums, *, most: int) -> tuple[int, ...]:
    """Return the cuts that win anywhere over a sweep of bandwidths and loads, most frequent winners first.

    Args:
        sums: Sums of the network, the device and a server.
        most: Largest number of cuts. The cut at which no server is asked is never returned.
    """
    last = len(sums.device_s) - 1
    only = rule.cut_of(last)
    if only is not None:
        return (only,) if only < last else ()
    estimate = ESTIMATES[rule.policy]
    won = Counter(
        last_of_least(estimate(sums, ServerConditions(upload_bytes_per_s=rate, load=load)))
        for rate in SWEEP_BYTES_PER_S
        for load in SWEEP_LOADS
    )
    return tuple(cut for cut, _ in won.most_common() if cut < last)[:most]
