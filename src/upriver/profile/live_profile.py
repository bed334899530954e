"""Track a running job: each answer's timings go in, an up-to-date profile comes out.

Measurements from before the job age: other jobs arrive, links change, caches warm up. Medians over a short
window follow these changes and ignore single slow micro-batches. A stage that now runs elsewhere is not seen.
It is assumed to have changed like the stages seen on its tier, since it was last seen or measured.

Seconds of stages include no waiting. Where servers also work for others, a job's micro-batches wait for
theirs. The servers report this wait with each answer, and it becomes a factor on the storage tier's load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeVar

from upriver.types import Cluster, Profile, StageProfile, Tier, Timings, require_finite

WINDOW = 24
"""Micro-batches in the window of a stage's seconds. On a shared machine a processor may be a fifth slower for
seconds; a plan that followed this would change all the time."""

ENOUGH = 4
"""Micro-batches from which on a stage's times in the job replace the earlier measurement."""

STEPS = 8
"""Training steps in the window of the tail's seconds: a single slow one does not show."""

UNSEEN = 4
"""A stage counts as not seen after this many windows of its tier's micro-batches without it: a route with a
small share has few."""

LINK_WINDOW = 5
"""Latest bandwidths whose median counts: a meter has smoothed them already, and three that agree are no
accident."""

TOLD_WINDOW = 3
"""Latest waits reported apart from answers whose median counts: each shows a single moment."""

MOST_SLOWED = 1000.0
"""Largest slowdown. More makes no difference: such a tier gets no work."""

LEAST_S = 1e-9
"""Shortest believable worker time of a micro-batch; shorter ones carry no information."""

APART = ("receive", "queue", "read", "weights")
"""Phases in which a micro-batch does not keep a server's worker from others: transfer, waiting, reading. A
worker may also wait for `weights` of a program that is still being read, but only once."""

_Sums = deque[float]
_Line = tuple[float, float]
_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Seen:
    """A stage on one tier.

    Attributes:
        seconds: Seconds per sample in the last micro-batches.
        last: Number of micro-batches on its tier when the stage was last seen.
        beside: Seconds of all stages that ran on its tier at that time.
    """

    seconds: _Sums
    last: int = 0
    beside: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AtServers:
    """A job's load on servers, to separate its own micro-batches from others' in a wait.

    Attributes:
        in_flight: Micro-batches of the job at one server, all ranks together.
        at_once: Micro-batches that one server computes at once.
        slowed: Slowdown by others' work when the profile was measured; the cluster's load includes it.
        micro_batch_s: Worker seconds of one of the job's micro-batches at that time; 0 where unknown.
    """

    in_flight: float = 1.0
    at_once: float = 1.0
    slowed: float = 1.0
    micro_batch_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("in_flight", "at_once", "slowed"):
            require_finite(f"at_servers.{name}", getattr(self, name), positive=True)
        require_finite("at_servers.micro_batch_s", self.micro_batch_s)

    def slowed_by(self, wait_s: float, micro_batch_s: float) -> float:
        """Return the slowdown, relative to a job alone, where one more micro-batch would wait this long.

        That wait includes the job's own micro-batches, at most all but the newest. These are no reason to go
        elsewhere. The remaining wait is others' work, which counts once for all of the job's micro-batches
        there.
        """
        each = micro_batch_s / self.at_once
        others = wait_s - max(0.0, self.in_flight - 1.0) * each
        return min(MOST_SLOWED, 1.0 + max(0.0, others) / (self.in_flight * each))

    def slowed_at_first(self, wait_s: float, micro_batch_s: float) -> float:
        """Return the slowdown where the job has no micro-batch there: each would wait for all others' turns.

        Where the others' requests are its own tenant's, the result is too high. The job then stays elsewhere
        for a little longer.
        """
        return min(MOST_SLOWED, 1.0 + wait_s * self.at_once / micro_batch_s)


class LiveProfile:
    """Keep an up-to-date profile of a chain and its machines.

    Args:
        profile: Profile measured before the job.
        cluster: Cluster measured before the job.
        samples: Samples of a micro-batch, which the seconds of a `Timings` cover.
        window: Micro-batches in the window of a stage's seconds.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        samples: int,
        window: int = WINDOW,
        at_servers: AtServers | None = None,
    ) -> None:
        require_finite("samples", samples, at_least=1)
        require_finite("window", window, at_least=1)
        self._profile, self._cluster = profile, cluster
        self._samples, self._window = samples, window
        self._at = at_servers or AtServers()
        self._waits: _Sums = deque(maxlen=window)
        self._took: _Sums = deque(maxlen=window)
        self._told_waits: _Sums = deque(maxlen=TOLD_WINDOW)
        self._stages: dict[tuple[Tier, int], _Seen] = {}
        self._ran = dict.fromkeys((Tier.STORAGE, Tier.COMPUTE), 0)
        self._phases: dict[tuple[Tier, str], _Sums] = {}
        self._steps: _Sums = deque(maxlen=STEPS)
        self._bandwidths: _Sums = deque(maxlen=window)

    def saw(self, tier: Tier, timings: Timings, *, sent_bytes: float = 0.0) -> None:
        """Record one micro-batch.

        Args:
            sent_bytes: Bytes that crossed the link for it, for the encoding seconds per byte.
        """
        self._ran[tier] += 1
        for position, seconds in timings.stages.items():
            seen = self._stages.setdefault((tier, position), _Seen(deque(maxlen=self._window)))
            seen.seconds.append(seconds / self._samples)
            seen.last = self._ran[tier]
        if tier is Tier.STORAGE:
            stored = self._profile.input.stored_bytes * self._samples
            for phase, num_bytes in (("read", stored), ("encode", sent_bytes)):
                if phase in timings.phases and num_bytes > 0:
                    self._note(self._phases, (tier, phase), timings.phases[phase] / num_bytes)
            self._waited(timings)

    def waits(self, wait_s: float) -> None:
        """Record the wait that a server predicts for a micro-batch, while the job has none there."""
        require_finite("wait_s", wait_s)
        self._waits.clear()
        self._told_waits.append(wait_s)

    @property
    def answers(self) -> int:
        """Number of micro-batches that servers have returned so far."""
        return self._ran[Tier.STORAGE]

    @property
    def slowed(self) -> float:
        """Present slowdown of micro-batches at servers by others' work, relative to a job alone."""
        took_s = fmean(self._took) if self._took else self._at.micro_batch_s
        if took_s >= LEAST_S and len(self._waits) >= min(ENOUGH, self._window):
            return self._at.slowed_by(median(self._waits), took_s)
        if took_s >= LEAST_S and self._told_waits:
            return self._at.slowed_at_first(median(self._told_waits), took_s)
        return self._at.slowed

    def trained(self, seconds: float, samples: int) -> None:
        """Record one training step: the tail, the optimizer, and the rest of the loop."""
        if samples > 0:
            self._steps.append(seconds / samples)

    def carried(self, bandwidth_bytes_per_s: float) -> None:
        """Record a recent bandwidth of the link."""
        require_finite("bandwidth_bytes_per_s", bandwidth_bytes_per_s, positive=True)
        self._bandwidths.append(bandwidth_bytes_per_s)

    def recent_bandwidths(self, most: int) -> tuple[float, ...]:
        """Return the last ``most`` recorded bandwidths."""
        return tuple(self._bandwidths)[-most:]

    def now(self) -> tuple[Profile, Cluster]:
        """Return the present profile and cluster."""
        tail = self._profile.tail
        if len(self._steps) == STEPS:  # the first steps warm up
            tail = replace(tail, seconds=(0.0, median(self._steps)))
        profile = replace(
            self._profile,
            stages=self._fresh(self._profile.stages, 1, self._profile.freeze),
            input_stages=self._fresh(self._profile.input_stages, self._profile.unsplit + 1, 0),
            tail=tail,
        )
        return profile, self._fresh_cluster()

    def _waited(self, timings: Timings) -> None:
        """Record the wait reported with an answer. Enough of these replace other reported waits."""
        self._waits.append(timings.expected_wait_s)
        self._took.append(worker_s(timings))
        if len(self._waits) >= min(ENOUGH, self._window):
            self._told_waits.clear()

    def _note(self, kept: dict[_Key, _Sums], key: _Key, value: float) -> None:
        kept.setdefault(key, deque(maxlen=self._window)).append(value)

    def _fresh(self, stages: tuple[StageProfile, ...], first: int, last: int) -> tuple[StageProfile, ...]:
        measured = dict(enumerate(stages[: last - first + 1], start=first))
        seconds = {position: dict(stage.seconds) for position, stage in measured.items()}
        for tier in (Tier.STORAGE, Tier.COMPUTE):
            keys = {position: key for position, given in seconds.items() if (key := _key(tier, given))}
            lines = self._lines(tier, {position: seconds[position][key] for position, key in keys.items()})
            for position, line in lines.items():
                seconds[position][keys[position]] = line
        fresh = (replace(stage, seconds=seconds[position]) for position, stage in measured.items())
        return (*fresh, *stages[len(measured) :])

    def _lines(self, tier: Tier, measured: Mapping[int, _Line]) -> dict[int, _Line]:
        """Return the present lines of stages on a tier: running stages as seen, others scaled like those."""
        told = {at: seen for at in measured if (seen := self._told(tier, at)) is not None}
        seconds = {at: median(seen.seconds) for at, seen in told.items()}
        recent = self._ran[tier] - UNSEEN * self._window
        running = {at: seconds[at] for at, seen in told.items() if seen.last >= recent}
        for at in running:
            told[at].beside = running
        was = {at: fixed / self._samples + each for at, (fixed, each) in measured.items()}
        factor = _change(running or seconds, was)
        lines = {at: (fixed * factor, each * factor) for at, (fixed, each) in measured.items()}
        return lines | {at: (0.0, seconds[at] * _change(running, told[at].beside)) for at in told}

    def _told(self, tier: Tier, position: int) -> _Seen | None:
        """Return the observations of a stage once there are enough to replace the measurement, else None."""
        seen = self._stages.get((tier, position))
        return seen if seen is not None and len(seen.seconds) >= min(ENOUGH, self._window) else None

    def _fresh_cluster(self) -> Cluster:
        cluster = self._cluster
        rates = dict(cluster.storage.seconds_per_byte)
        rates |= {phase: median(seen) for (_, phase), seen in self._phases.items()}
        link = cluster.link
        if self._bandwidths:
            link = replace(link, bandwidth_bytes_per_s=median(self.recent_bandwidths(LINK_WINDOW)))
        # The load already includes the wait during the measurement.
        load = cluster.storage.load * (self.slowed / self._at.slowed)
        storage = replace(cluster.storage, load=load, seconds_per_byte=rates)
        return replace(cluster, link=link, storage=storage)


def worker_s(timings: Timings) -> float:
    """Return the seconds for which a micro-batch kept a server's worker from others."""
    return sum(seconds for phase, seconds in timings.phases.items() if phase not in APART)


def _key(tier: Tier, seconds: Mapping[str, _Line]) -> str:
    """Return the resource name of a stage's seconds on a tier; empty where it has none."""
    return next((key for key in (str(tier), f"{tier}.cpu") if key in seconds), "")


def _change(now: Mapping[int, float], before: Mapping[int, float]) -> float:
    """Return the ratio of present to earlier seconds over common stages; 1 where there are none."""
    both = now.keys() & before.keys()
    was = sum(before[position] for position in both)
    return sum(now[position] for position in both) / was if was > 0 else 1.0
