"""A profile that follows the running job: every answer's own timings go in, a fresh profile comes out.

What was measured before the job starts ages: other jobs come, links change, caches warm up. Medians over a
short window follow that and forget single slow micro-batches. A stage that runs elsewhere now is not seen; it
is taken to have become slower or faster as the stages beside it have since it was seen, or measured.

Seconds of stages hold no waiting. Where servers work for others, too, a job's micro-batches wait for theirs;
what that comes to follows from what servers say with each answer, and is a factor on the storage tier's load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeVar

from upriver.types import Cluster, Profile, StageProfile, Tier, Timings, require_finite

WINDOW = 24
"""Micro-batches that a stage's seconds look back on: on a machine that others use, too, a processor may be a
fifth slower for seconds, and a plan that follows that changes all the time."""

ENOUGH = 4
"""Micro-batches before what a stage takes in the job counts for more than what was measured before it."""

STEPS = 8
"""Training steps that a figure looks back on: an odd slow one shows in none of them."""

UNSEEN = 4
"""Windows of its tier's micro-batches after which a stage that ran in none of them counts as not seen now: a
route with a small share has few."""

LINK_WINDOW = 5
"""Of the bandwidths told, the median of so many counts: a meter has smoothed them already, and three that
agree are no accident."""

TOLD_WINDOW = 3
"""Of the waits told apart from answers, the median of so many counts: each is a look at one moment."""

MOST_SLOWED = 1000.0
"""More makes no difference: a tier that takes so many times as long gets nothing to do."""

LEAST_S = 1e-9
"""A worker that took less for a micro-batch tells nothing of it."""

APART = ("receive", "queue", "read", "weights")
"""Phases in which a micro-batch keeps no other one from a server's workers: it comes, waits, or is read. A
worker may wait, too, for `weights` of a program that is still being read, but only once."""

_Sums = deque[float]
_Line = tuple[float, float]
_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Seen:
    """A stage on one tier.

    Attributes:
        seconds: Of a sample, in the last micro-batches.
        last: How many micro-batches its tier had run when it was seen last.
        beside: Seconds of the stages that ran on its tier at that time.
    """

    seconds: _Sums
    last: int = 0
    beside: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AtServers:
    """What a job has at servers at once, to tell its own micro-batches from others' in what one waits for.

    Attributes:
        in_flight: Micro-batches of the job at one server, all ranks together.
        at_once: Micro-batches that one server computes at once.
        slowed: By others' work, how many times as long micro-batches took when the profile was measured; the
            cluster's load holds that.
        micro_batch_s: What one of the job's took a worker then; 0 where nobody knows.
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
        """How many times as long as alone work takes where one more micro-batch would wait so long.

        This job's own are part of that wait, at most all but the one that has just come, and no reason to go
        elsewhere. What is left is others' work, which comes once for all that this job has there.
        """
        each = micro_batch_s / self.at_once
        others = wait_s - max(0.0, self.in_flight - 1.0) * each
        return min(MOST_SLOWED, 1.0 + max(0.0, others) / (self.in_flight * each))

    def slowed_at_first(self, wait_s: float, micro_batch_s: float) -> float:
        """The same where the job has none there: each that it sent would wait for a turn of everybody else.

        Where others' requests are its own tenant's that is too much, and it goes on elsewhere for a little
        longer.
        """
        return min(MOST_SLOWED, 1.0 + wait_s * self.at_once / micro_batch_s)


class LiveProfile:
    """What is known now of a chain and its machines.

    Args:
        profile: As measured before the job started.
        cluster: Likewise.
        samples: Of a micro-batch: what the seconds of a `Timings` are for.
        at_servers: What the job has there at once.
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
        """Take in one micro-batch.

        Args:
            tier: Where it ran.
            sent_bytes: What crossed the link for it, for the seconds a byte takes to encode.
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
        """Take in what a server says that a micro-batch would wait there, while this job has none there."""
        require_finite("wait_s", wait_s)
        self._waits.clear()
        self._told_waits.append(wait_s)

    @property
    def answers(self) -> int:
        """Micro-batches that servers have made so far."""
        return self._ran[Tier.STORAGE]

    @property
    def slowed(self) -> float:
        """How many times as long as alone micro-batches take at servers now, by the work of others there."""
        took_s = fmean(self._took) if self._took else self._at.micro_batch_s
        if took_s >= LEAST_S and len(self._waits) >= min(ENOUGH, self._window):
            return self._at.slowed_by(median(self._waits), took_s)
        if took_s >= LEAST_S and self._told_waits:
            return self._at.slowed_at_first(median(self._told_waits), took_s)
        return self._at.slowed

    def trained(self, seconds: float, samples: int) -> None:
        """Take in one training step: the tail, the optimizer, and whatever else the loop does."""
        if samples > 0:
            self._steps.append(seconds / samples)

    def carried(self, bandwidth_bytes_per_s: float) -> None:
        """Take in what the link has lately carried."""
        require_finite("bandwidth_bytes_per_s", bandwidth_bytes_per_s, positive=True)
        self._bandwidths.append(bandwidth_bytes_per_s)

    def recent_bandwidths(self, most: int) -> tuple[float, ...]:
        """What the link has carried, as told the last ``most`` times."""
        return tuple(self._bandwidths)[-most:]

    def now(self) -> tuple[Profile, Cluster]:
        """The profile and the cluster as they are now."""
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
        """What a server says with answers counts for more than what it said before, once it is enough."""
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
        """What stages take on a tier now: those that run as seen, others as those beside them."""
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
        """What was seen of a stage, once that says more than what was measured."""
        seen = self._stages.get((tier, position))
        return seen if seen is not None and len(seen.seconds) >= min(ENOUGH, self._window) else None

    def _fresh_cluster(self) -> Cluster:
        cluster = self._cluster
        rates = dict(cluster.storage.seconds_per_byte)
        rates |= {phase: median(seen) for (_, phase), seen in self._phases.items()}
        link = cluster.link
        if self._bandwidths:
            link = replace(link, bandwidth_bytes_per_s=median(self.recent_bandwidths(LINK_WINDOW)))
        # What was waited for when the profile was measured is in the load already.
        load = cluster.storage.load * (self.slowed / self._at.slowed)
        storage = replace(cluster.storage, load=load, seconds_per_byte=rates)
        return replace(cluster, link=link, storage=storage)


def worker_s(timings: Timings) -> float:
    """For how long a micro-batch kept a server's worker from all others."""
    return sum(seconds for phase, seconds in timings.phases.items() if phase not in APART)


def _key(tier: Tier, seconds: Mapping[str, _Line]) -> str:
    """Under which name a stage has its seconds on a tier; empty where it has none."""
    return next((key for key in (str(tier), f"{tier}.cpu") if key in seconds), "")


def _change(now: Mapping[int, float], before: Mapping[int, float]) -> float:
    """How many times as long as before the stages take that are in both; 1 where there are none."""
    both = now.keys() & before.keys()
    was = sum(before[position] for position in both)
    return sum(now[position] for position in both) / was if was > 0 else 1.0
