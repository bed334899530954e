"""Where the next request is cut, and which server runs what is behind the cut: pure, once per request.

What does not change from request to request is added up before (`upriver.latency.Sums`); what does is a
`Now`. Of several servers the one with the least predicted seconds is asked. Every decision may also leave all
to the device, which wins where they are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from upriver.cost import Array
from upriver.errors import ConfigError
from upriver.latency import Sums, last_of_least
from upriver.types import BANDWIDTH, require_finite

DEFAULT_POLICY = "inference"
"""Ours: LoADPart's sum with all else that a request takes."""


SWEEP_BYTES_PER_S = tuple(2.0**power for power in range(14, 31))
"""From 131 kbit/s to 8.6 Gbit/s in doublings: links that a device may have."""

SWEEP_LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Up to where hardly a server is worth asking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Now:
    """What is known at this moment of a server and of the way there.

    Attributes:
        upload_bytes_per_s: Above 0.
        download_bytes_per_s: None where an answer is free to fetch, as far as anybody knows.
        rtt_s: What a request takes beside its bytes and the work there.
        load: The server's factor k.
        slowed: The factor of the last request there, where that was much more than k; else 1.
        wait_s: What a request would wait there for others.
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


Estimate = Callable[[Sums, Now], Array]
"""Seconds of a request at each cut."""


def _inference(sums: Sums, now: Now) -> Array:
    return sums.request_s(
        upload=now.upload_bytes_per_s,
        download=now.download_bytes_per_s,
        load=max(now.load, now.slowed),
        rtt_s=now.rtt_s,
        wait_s=now.wait_s,
    )


def _loadpart(sums: Sums, now: Now) -> Array:
    return sums.paper_s(upload=now.upload_bytes_per_s, load=now.load)


def _neurosurgeon(sums: Sums, now: Now) -> Array:
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
"""Policies by name. ``neurosurgeon`` is what LoADPart is compared with: the same without k. The last two have
no choice of a cut, and look at the seconds to choose among servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How requests are cut.

    Attributes:
        policy: One of `ESTIMATES`.
        cut: The only cut that may be taken; None where the policy chooses.
    """

    policy: str = DEFAULT_POLICY
    cut: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in ESTIMATES:
            raise ConfigError(f"policy must be one of {', '.join(ESTIMATES)}, got {self.policy!r}")

    def cut_of(self, num_stages: int) -> int | None:
        """The only cut that may be taken of a network with so many stages."""
        only = {"local": num_stages, "remote": 0}.get(self.policy)
        return self.cut if only is None else only

    @property
    def must(self) -> bool:
        """Whether a server is to be asked even where nobody knows yet how long that takes."""
        return self.policy == "remote" or self.cut is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A cut.

    Attributes:
        server: Which of those that were offered runs what is behind it; None where nothing is.
        seconds: Predicted for the request; infinite where nobody knows.
    """

    cut: int
    server: int | None
    seconds: float


def choose(
    rule: Rule,
    device_s: float,
    num_stages: int,
    offers: Sequence[tuple[Sums, Now | None]],
    *,
    deadline_s: float = np.inf,
) -> Choice:
    """The cut and the server with the least predicted seconds of a request, the device alone among equals.

    A server that is predicted to be late is asked in vain: the device then does the rest, and all of it takes
    longer than without.

    Args:
        rule: How it is cut.
        device_s: Seconds of all stages on the device.
        num_stages: Of the network; also the cut at which no server is asked.
        offers: For each server that may be asked what its stages add up to, and how it stands now, if that
            is known.
        deadline_s: When the device goes on by itself. Where a server must be asked it is asked all the same.
    """
    only = rule.cut_of(num_stages)
    best = Choice(cut=num_stages, server=None, seconds=device_s)
    if only == num_stages:
        return best
    if only is not None:
        best = Choice(cut=num_stages, server=None, seconds=np.inf)
    for server, (sums, now) in enumerate(offers):
        if now is None:
            if rule.must and best.server is None:
                best = Choice(cut=only or 0, server=server, seconds=np.inf)
            continue
        seconds = ESTIMATES[rule.policy](sums, now)
        if not rule.must:
            seconds[:-1][seconds[:-1] > deadline_s] = np.inf
        cut = last_of_least(seconds) if only is None else only
        if cut < num_stages and seconds[cut] < best.seconds:
            best = Choice(cut=cut, server=server, seconds=float(seconds[cut]))
    if best.server is None:
        return Choice(cut=num_stages, server=None, seconds=device_s)
    return best


def kept_away(
    rule: Rule, choice: Choice, offers: Sequence[tuple[Sums, Now | None]], *, deadline_s: float = np.inf
) -> list[int]:
    """Servers that would be faster than what was chosen if they were free; only our own policy looks.

    Args:
        rule: How the request is cut.
        choice: What `choose` has made of the same offers and deadline.
        offers: As there.
        deadline_s: As there.
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


def likely(rule: Rule, sums: Sums, *, most: int) -> tuple[int, ...]:
    """The cuts that win anywhere over a sweep of bandwidths and loads, those that win most often first.

    Args:
        rule: How requests are cut.
        sums: Of the network, the device and a server.
        most: So many at most. The cut at which no server is asked is none of them.
    """
    last = len(sums.device_s) - 1
    only = rule.cut_of(last)
    if only is not None:
        return (only,) if only < last else ()
    estimate = ESTIMATES[rule.policy]
    won = Counter(
        last_of_least(estimate(sums, Now(upload_bytes_per_s=rate, load=load)))
        for rate in SWEEP_BYTES_PER_S
        for load in SWEEP_LOADS
    )
    return tuple(cut for cut, _ in won.most_common() if cut < last)[:most]
