"""Decide the next request's cut and server: pure functions, called once per request.

`upriver.latency.LatencySums` adds up in advance what stays equal from request to request. A
`ServerConditions` holds what changes. Among several servers the decision takes the one with the least
predicted seconds. A decision may also leave all stages to the device, which wins ties.

Our own policy bounds the regret. L is the time of the device alone, F that of full offload, and "behind" is
more than `BEHIND` above the lesser one.

- *The last answer counts.* If the choice by the usual estimates would be behind by the figures of the last
  answer, those figures decide. So after one late answer the next choice is not behind, as far as that answer
  tells the truth.
- *A late answer is hedged.* From `LATE` times the predicted seconds the device computes the rest, too. The
  choice was predicted at L or less, so no answer takes more than 2.5 L.
- *A server that lost is only tried.* After an answer that shows the device to be the better place, or none
  before the device's own, requests stay on the device. Some are trials: at the cut that is best while the
  server is idle, and the device computes as well from the start. A trial is not behind at any load: the cut
  has less work for the server than full offload has, so load adds no more to it than to F. And the device's
  own answer comes after L.
- *Trials are cheap.* The first one comes at once, as one late answer may be chance. Later ones come after
  `TRIAL_S`, and take no more than `upriver.link.PROBE_SHARE` of the link's time.
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
from upriver.link import PROBE_SHARE
from upriver.types import BANDWIDTH, require_finite

DEFAULT_POLICY = "inference"
"""Ours: LoADPart's sum plus all other times of a request."""

BEHIND = 0.03
"""Share above the better one of local and full offload from which a request is behind: the goal of
``benchmarks/load_aware``. A hedge may cost the device no more than that."""

LATE = 1.5
"""Factor over the predicted seconds from which an answer is late. Jitter of a fifth both ways makes 1.5."""

HAND_OVER_S = 2e-4
"""Cost of a hedge apart from packing: the request is handed to a second thread."""

TRIAL_S = 30.0
"""Least time between two trials of a server that lost: the longest pause after a failure, too."""

LONGER = 4.0
"""Largest ratio of stretches for which a factor below the told one holds. A stretch of a millisecond escapes
a scheduler that makes one of half a second nine times as long."""

SAME = 1.25
"""Factor, either way, within which a told load is the one that was told with the last answer. Another one is
news of a later time, and the answer's own factor is out of date."""

SWEEP_BYTES_PER_S = tuple(2.0**power for power in range(14, 31))
"""Links that a device may have: 131 kbit/s to 8.6 Gbit/s in doublings."""

SWEEP_LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Loads up to a server that is hardly worth asking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoad:
    """Slowdown of the last request's own stages on the server.

    Attributes:
        load: Their seconds over those on the idle server.
        server_s: The latter.
        told: The factor k that the server told with its answer.
    """

    load: float
    server_s: float
    told: float

    def is_current(self, told: float) -> bool:
        """Return whether a told factor is no later news."""
        return max(told, self.told) <= SAME * min(told, self.told)

    def at_cuts(self, sums: LatencySums, told: float) -> float | Array:
        """Return the factor at each cut; ``told`` where this one says too little."""
        if self.load >= told:
            return self.load
        return np.where(sums.server_s <= LONGER * self.server_s, self.load, told)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConditions:
    """Present state of a server and of the link to it.

    Attributes:
        upload_bytes_per_s: Upload bandwidth, above 0.
        download_bytes_per_s: Download bandwidth; None where unknown, which counts the answer as free to
            fetch.
        rtt_s: Time of a request apart from its bytes and the server's work.
        load: The server's factor k, as the server tells it.
        own: The factor of the last answer; None before one.
        wait_s: Time that a request would wait in the server's queue.
        misses: Requests in a row to which the device had, or would have had, the better answer.
        silent_s: Time since the server was last asked.
        old: Whether link or load have not been measured for so long that they may be others.
    """

    upload_bytes_per_s: float
    download_bytes_per_s: float | None = None
    rtt_s: float = 0.0
    load: float = 1.0
    own: OwnLoad | None = None
    wait_s: float = 0.0
    misses: int = 0
    silent_s: float = 0.0
    old: bool = False

    def __post_init__(self) -> None:
        BANDWIDTH.check("upload_bytes_per_s", self.upload_bytes_per_s)
        if self.download_bytes_per_s is not None:
            BANDWIDTH.check("download_bytes_per_s", self.download_bytes_per_s)
        require_finite("rtt_s", self.rtt_s)
        require_finite("load", self.load, at_least=1.0)
        require_finite("wait_s", self.wait_s)

    @property
    def idle(self) -> ServerConditions:
        """The same link to the same server with nothing to do."""
        return replace(self, load=1.0, own=None, wait_s=0.0)


Estimate = Callable[[LatencySums, ServerConditions], Array]
"""Seconds of a request at each cut."""


def _inference(sums: LatencySums, now: ServerConditions) -> Array:
    """Return the seconds by the told load, or by the last answer's if the choice would be behind by that."""
    told = _request_s(sums, now, now.load)
    if now.own is None or not now.own.is_current(now.load):
        return told
    own = _request_s(sums, now, now.own.at_cuts(sums, now.load))
    return own if _is_behind(told, own) else told


def _request_s(sums: LatencySums, now: ServerConditions, load: float | Array) -> Array:
    return sums.request_s(
        upload=now.upload_bytes_per_s,
        download=now.download_bytes_per_s,
        load=load,
        rtt_s=now.rtt_s,
        wait_s=now.wait_s,
    )


def _is_behind(expected: Array, seen: Array) -> bool:
    """Return whether the choice by some seconds is behind the best one by others."""
    return bool(seen[last_of_least(expected)] > (1 + BEHIND) * seen.min())


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

    @property
    def is_ours(self) -> bool:
        """Return whether our own policy chooses the cut."""
        return self.policy == DEFAULT_POLICY and self.cut is None


@dataclass(frozen=True, kw_only=True, slots=True)
class CutChoice:
    """A chosen cut.

    Attributes:
        cut: Number of stages that the device runs.
        server: Index of the offered server that runs the other stages; None where there are none.
        seconds: Predicted seconds of the request; infinite where unknown.
        hedge_s: Time from sending until the device computes the rest, too; None for never, 0 for a trial.
    """

    cut: int
    server: int | None
    seconds: float
    hedge_s: float | None = None


Offers = Sequence[tuple[LatencySums, ServerConditions | None]]
"""For each available server, the sums of its stages and its present state, if known."""


def choose(
    rule: PartitionRule,
    device_s: float,
    num_stages: int,
    offers: Offers,
    *,
    deadline_s: float = np.inf,
    hedges: bool = True,
) -> CutChoice:
    """Return the cut and the server with the least predicted seconds; the device alone wins ties.

    A server that is predicted to miss the deadline is not chosen. The device would compute the rest after it,
    and the whole would take longer than without the server.

    Args:
        device_s: Seconds of all stages on the device.
        num_stages: Stages of the network; also the cut at which no server is asked.
        offers: The servers.
        deadline_s: Time after which the device goes on by itself. It is ignored where a server must be asked.
        hedges: Whether the device may compute while a server does. Our own policy alone wants that.
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
        if cut == num_stages or seconds[cut] >= best.seconds:
            continue
        hedge_s = None
        if rule.is_ours and _can_hedge(sums, cut):
            if now.misses:
                continue
            if hedges:
                hedge_s = 0.0 if now.old else LATE * float(seconds[cut] - sums.device_s[cut])
        best = CutChoice(cut=cut, server=server, seconds=float(seconds[cut]), hedge_s=hedge_s)
    if rule.is_ours and hedges:
        best = _trial(best, offers, deadline_s) or best
    if best.server is None:
        return CutChoice(cut=num_stages, server=None, seconds=device_s)
    return best


def _can_hedge(sums: LatencySums, cut: int) -> bool:
    """Return whether a request from a cut leaves the device enough time for its own computation."""
    return bool(sums.handling_s[cut] + HAND_OVER_S <= BEHIND * sums.device_s[-1])


def _trial(best: CutChoice, offers: Offers, deadline_s: float) -> CutChoice | None:
    """Return a trial of a server that would be better than the choice if it were idle; None if none is due.

    A first miss is tried again at once, unless another server is chosen: in a trial only the device stands in
    for the server.
    """
    for server, (sums, now) in enumerate(offers):
        if now is None or server == best.server:
            continue
        again = now.misses == 1 and best.server is None
        if not again and now.silent_s < TRIAL_S:
            continue
        seconds = _inference(sums, now.idle)
        cut = last_of_least(seconds[:-1]) if len(seconds) > 1 else 0
        sent_s = float(sums.sent_bytes[cut]) / now.upload_bytes_per_s
        gains = seconds[cut] * (1 + BEHIND) < best.seconds and seconds[cut] <= deadline_s
        if gains and _can_hedge(sums, cut) and (again or sent_s <= PROBE_SHARE * now.silent_s):
            return CutChoice(cut=cut, server=server, seconds=float(seconds[cut]), hedge_s=0.0)
    return None


def link_has_changed(sums: LatencySums, now: ServerConditions, upload_bytes_per_s: float) -> bool:
    """Return whether the choice would be behind if the upload were as the last transfer shows it."""
    return _is_behind(
        _inference(sums, now), _inference(sums, replace(now, upload_bytes_per_s=upload_bytes_per_s))
    )


def device_is_better(sums: LatencySums, now: ServerConditions) -> bool:
    """Return whether the device alone takes no more than any cut."""
    seconds = _inference(sums, now)
    return last_of_least(seconds) == len(seconds) - 1


def kept_away(
    rule: PartitionRule, choice: CutChoice, offers: Offers, *, deadline_s: float = np.inf
) -> list[int]:
    """Return the servers that would be faster than the choice if they were idle; only for our own policy.

    ``choice`` is the result of `choose` for the same offers and deadline.
    """
    if not rule.is_ours:
        return []
    found = []
    for server, (sums, now) in enumerate(offers):
        if server == choice.server or now is None or (now == now.idle and not now.misses):
            continue
        if _takes_less(sums, now.idle, min(choice.seconds, deadline_s)):
            found.append(server)
    return found


def kept_away_by_link(
    rule: PartitionRule, choice: CutChoice, offers: Offers, *, deadline_s: float = np.inf
) -> list[int]:
    """Return the servers that would be faster than the device alone over a wide link; see `kept_away`.

    None where a server is chosen: its link is known by requests.
    """
    if not rule.is_ours or choice.server is not None:
        return []
    most_s = min(choice.seconds, deadline_s)
    return [
        server
        for server, (sums, now) in enumerate(offers)
        if now is not None and _takes_less(sums, replace(now, upload_bytes_per_s=BANDWIDTH.most), most_s)
    ]


def _takes_less(sums: LatencySums, now: ServerConditions, seconds: float) -> bool:
    """Return whether a request to the server would take less than these seconds."""
    there = _inference(sums, now)[:-1]
    return bool(there.size and there.min() < seconds)


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
