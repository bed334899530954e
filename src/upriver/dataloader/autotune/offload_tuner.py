"""Decide while training runs whether to offload; every batch that is made for measuring is handed out.

The metrics are FastFlow's (PVLDB 16(5), Table 1 and section 5.1), with what the loader sees of the training
loop: how long it waits for a batch, and how long its consumer takes to ask for the next.

    Pcycle, Ocycle   CPU seconds of this process and its loader processes while some batches are prepared and
                     nothing is trained
    Gthp             throughput while these are consumed, and none are prepared
    Lthp, Rthp       throughput while both go on, with everything made here, and everything offloaded

Departures
    - The model is not run on a copy: the timed steps are the user's own, on batches that are ready.
    - As in the paper, a candidate is measured only if training stalls. Candidates can be left out by name.
    - Pcycle and each Ocycle come from different batches of the job, as no batch is made twice.
    - Samples that the training node made in place of a worker do not count as the workers' throughput. If
      they are more than a tenth of a measurement, it is repeated; after `TRIES` the candidate is left out.
    - Samples that the training node keeps cost it little. When far more are kept than before, it is measured
      again as an epoch begins; what was measured of workers stays.
    - Where a batch shows no bytes (a class of the user's, PIL images), each of its samples counts as 1 MB.
      Decisions depend only on ratios of throughputs.

An epoch's unfinished measurements continue in the next epoch. `upriver.control.share_controller` follows the
job from then on. If the job falls too far short of a promise, everything is measured again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from upriver.control.share_controller import FAILED, HERE, BatchStep, ShareController
from upriver.dataloader.epoch import Epoch
from upriver.dataloader.local.cpu_seconds import CpuSeconds
from upriver.dataloader.prefetch_limit import num_bytes
from upriver.dataloader.remote.worker_choice import faults_text
from upriver.dataloader.share import OffloadShare
from upriver.policies import OFFLOAD_POLICIES, OffloadDecision, OffloadPolicy, stalls
from upriver.profile.throughput import SPEEDUP_THRESHOLD, Candidate, Metrics

MOST_STEPS = 50
"""Maximum number of steps per throughput: FastFlow found 50 to 100 steps to be enough (section 5.1)."""

LEAST_STEPS = 8
SETTLED = 0.02
"""Relative standard error of a step's seconds below which fewer than `MOST_STEPS` steps suffice."""

FAR_SLOWER = 3.0
"""Ratio of the model's speed to the workers' beyond which training waits for the workers alone.

The speed at which the batches were prepared is then also the speed at which they arrive.
"""

SKIPPED = 2
"""Steps after a change that do not count, as their batches were under way before it."""

PREPARED = 8
"""Batches prepared while nothing is trained."""

TRIES = 3
"""Measurements of a candidate, in which the training node made too much itself, before it is left out."""

REST = 50
"""Batches between measurements, for each batch handed out for measuring: at most 2 % are measured.

The number doubles each time that a new measurement changes nothing.
"""

MOST_REST = 1600

KEPT_MORE = 0.25
"""Difference in the share of kept samples beyond which this machine is measured anew."""

SAME = 0.1
"""Difference in ratio below which a new measurement has changed nothing."""

MEGA = 1e6

NOTHING: Mapping[str, str] = MappingProxyType({})

Course = Generator[None, BatchStep | None, None]
"""Generator that stops where a batch is to be handed out.

It is sent the step of that batch, or None if the dataset failed.
"""


@dataclass(eq=False, slots=True)
class TimedSteps:
    """Timed steps.

    Attributes:
        seconds: Seconds of each step, counting only the part that is timed.
        nbytes: Bytes of each step's batch, without those that workers were given and did not make.
        returned: Share of each step's samples meant for workers that they did not make.
    """

    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)

    def add(self, seconds: float, nbytes: int, returned: float = 0.0) -> None:
        """Add a step."""
        self.seconds.append(seconds)
        self.nbytes.append(round(nbytes * (1 - returned)))
        self.returned.append(returned)

    @property
    def spoilt(self) -> bool:
        """Return whether the workers made too little for the steps to measure them."""
        return len(self.returned) >= LEAST_STEPS and statistics.fmean(self.returned) > FAILED

    def enough(self, alone: float = 0.0) -> bool:
        """Return whether further steps would change little.

        Args:
            alone: MB/s that the training node makes meanwhile, if the steps measure what others make. The
                others add to it, so the slower they are, the less precisely they need to be known.
        """
        if len(self.seconds) >= MOST_STEPS:
            return True
        if len(self.seconds) < LEAST_STEPS:
            return False
        error = statistics.stdev(self.seconds) / len(self.seconds) ** 0.5
        settled = SETTLED * max(1.0, alone / _positive(self.throughput))
        return bool(error <= settled * statistics.fmean(self.seconds))

    @property
    def throughput(self) -> float:
        """Return the throughput in MB/s; 0 without steps."""
        total_s = sum(self.seconds)
        return sum(self.nbytes) / total_s / MEGA if total_s > 0 else 0.0


@dataclass(eq=False, slots=True)
class TimedPath:
    """Timings of one way to make batches.

    Attributes:
        cpu_s: CPU seconds for the batches prepared while nothing was trained.
        prepared: Number of these batches.
        prepared_s: Seconds in which they were prepared.
        alone: Steps of the consumer alone.
        both: Steps of making and consuming at once.
        short: Whether an epoch had too few batches to warm up with.
        returned: Number of prepared batches, in fractions, that workers were given and did not make.
        tries: Number of measurements in which workers made too little.
        away: Whether no worker could be asked in the last one.
        came: Whether a worker could be asked after that.
    """

    cpu_s: float = 0.0
    prepared: int = 0
    prepared_s: float = 0.0
    alone: TimedSteps = field(default_factory=TimedSteps)
    both: TimedSteps = field(default_factory=TimedSteps)
    short: bool = False
    returned: float = 0.0
    tries: int = 0
    away: bool = False
    came: bool = False

    @property
    def useless(self) -> bool:
        """Return whether the candidate cannot be measured."""
        return self.tries >= TRIES

    @property
    def exact(self) -> bool:
        """Return whether workers made everything that they were given."""
        return not self.returned and not any(self.both.returned)

    @property
    def lacking(self) -> int:
        """Return the number of batches still to prepare."""
        return PREPARED - min(self.prepared, len(self.alone.seconds))

    @property
    def prepared_throughput(self) -> float:
        """Return the throughput of preparing in MB/s, assuming batches of about equal size."""
        nbytes = (self.prepared - self.returned) * statistics.fmean(self.alone.nbytes)
        return nbytes / _positive(self.prepared_s) / MEGA

    def ocycle(self, pcycle: float) -> float:
        """Return the CPU seconds of a batch that workers make, without those of samples they did not make."""
        return max(0.0, self.cpu_s - self.returned * pcycle) / (self.prepared - self.returned)

    @property
    def throughput(self) -> float:
        """Return the MB/s of making and consuming at once, or of preparing where that was not timed."""
        return self.both.throughput if self.both.seconds else self.prepared_throughput


@dataclass(eq=False, slots=True)
class TunerMeasurements:
    """Measurements so far; an epoch that ends early leaves the rest to the next.

    Attributes:
        gthp: MB/s of the consumer alone.
        lthp: MB/s of making and consuming at once, with everything made here.
        pcycle: CPU seconds of a batch made here.
        pseconds: Seconds of a batch at ``lthp``.
        ocycles: CPU seconds here of a batch that a candidate makes, by candidate.
        rthp: MB/s of making and consuming at once, with everything offloaded, by candidate.
        decision: Decision, once there is one, with the ratio in force.
        controller: Controller that follows the job; None before a decision, and where a policy decides once.
        anew: Whether everything is being measured again.
        waiting: Whether candidates were not measured because no worker could be asked.
        timed: Unfinished timings, by candidate.
        spent: Number of batches handed out for measuring.
        since: Number of batches handed out since then.
        rest: Batches before the next measurement, for each batch handed out for measuring.
        by_samples: Whether sizes are numbers of samples; None before the first batch.
        kept: Share of the samples that were kept here when this machine was measured.
    """

    gthp: float | None = None
    lthp: float | None = None
    pcycle: float | None = None
    pseconds: float | None = None
    ocycles: dict[str, float] = field(default_factory=dict)
    rthp: dict[str, float] = field(default_factory=dict)
    decision: OffloadDecision | None = None
    controller: ShareController | None = None
    anew: bool = False
    waiting: bool = False
    timed: dict[str, TimedPath] = field(default_factory=dict)
    spent: int = 0
    since: int = 0
    rest: int = REST
    by_samples: bool | None = None
    kept: float = 0.0

    def size_of(self, batch: Any, samples: int) -> int:
        """Return the bytes of a batch; if the first batch shows none, samples count from then on."""
        nbytes = num_bytes(batch)
        if self.by_samples is None:
            self.by_samples = nbytes == 0
        return int(MEGA) * samples if self.by_samples else nbytes

    @property
    def measuring(self) -> bool:
        """Return whether the next batch is handed out for measuring."""
        return self.decision is None or self.anew

    @property
    def settled(self) -> bool:
        """Return whether the decision is final."""
        return self.decision is not None and (self.controller is None or self.controller.settled)

    @property
    def in_force(self) -> tuple[str | None, float]:
        """Return the candidate by which batches are planned now, None for nothing, and its share."""
        if self.controller is not None and not self.controller.settled:
            current = self.controller.current
            return current.name or None, current.ratio
        return (None, 0.0) if self.decision is None else (self.decision.candidate, self.decision.ratio)

    def forget(self) -> None:
        """Discard all measurements; the decision holds until the next one."""
        self.gthp = self.lthp = self.pcycle = self.pseconds = None
        self.ocycles, self.rthp, self.timed, self.controller = {}, {}, {}, None
        self.anew, self.spent = True, 0

    def forget_candidates(self) -> None:
        """Discard measurements of workers after these have changed; the decision holds until the next."""
        self.rthp.clear()
        self.ocycles.clear()
        self.timed = {name: timed for name, timed in self.timed.items() if name == HERE}
        self.controller = None
        self.anew, self.spent = True, 0

    def count_kept(self, share: float, here: Collection[str]) -> bool:
        """Discard this machine's figures if far more or fewer samples are kept than when they were taken.

        Kept samples cost this machine little. The decision holds until the next one.

        Args:
            share: Share of the samples that are kept, 0 to 1.
            here: Candidates whose first stages run here.

        Returns:
            Whether the figures are discarded.
        """
        if abs(share - self.kept) < KEPT_MORE:
            return False
        more, self.kept = share > self.kept, share
        if more and self.decision is not None and not self.decision.offload:
            return False  # nothing stalls, and more kept samples stall nothing
        self.lthp = self.pcycle = self.pseconds = self.controller = None
        for name in (HERE, *here):
            self.timed.pop(name, None)
            self.rthp.pop(name, None)
            self.ocycles.pop(name, None)
        self.anew, self.spent = self.decision is not None, 0
        return True

    @property
    def useless(self) -> list[str]:
        """Return the candidates that could not be measured, as workers made too little."""
        return [name for name, timed in self.timed.items() if timed.useless]

    @property
    def nobody(self) -> bool:
        """Return whether no candidate could be measured."""
        return bool(self.useless) and not self.rthp

    def decide(
        self,
        policy: OffloadPolicy,
        threshold: float,
        names: Sequence[str],
        why_not: Mapping[str, str] = NOTHING,
    ) -> None:
        """Decide by the policy.

        Args:
            names: Names of the candidates.
            why_not: Failures of workers, by address.
        """
        metrics, before = self.metrics(threshold, names), self.decision
        found = self.decision = self._told(policy.decide(metrics), names, why_not)
        if before is not None:
            as_before = found.candidate == before.candidate and abs(found.ratio - before.ratio) < SAME
            self.rest = min(MOST_REST, 2 * self.rest) if as_before else REST
        self.controller = ShareController.of(policy, metrics, found, tries=bool(self.spent))
        self.anew, self.since = False, 0

    def _told(
        self, found: OffloadDecision, names: Sequence[str], why_not: Mapping[str, str]
    ) -> OffloadDecision:
        """Add to a decision's reason the candidates that could not be measured, and why."""
        if not self.useless:
            return found
        faults = faults_text(why_not) or "what they were given has come back"
        if self.nobody:
            return replace(found, why=f"nothing is offloaded, as no worker could be used ({faults})")
        names = ", ".join(name for name in names if name not in self.rthp)
        return replace(found, why=f"{found.why}; not {names}, which workers could not be used for ({faults})")

    def follow(self, step: BatchStep) -> bool:
        """Give a step to the controller, and return whether it has completed a window."""
        controller, was_settled = self.controller, self.settled
        if controller is None or not controller.add(step):
            return False
        if controller.settled:
            self.decision = controller.decision
            if not was_settled:
                for name, factor in controller.corrections().items():
                    self.rthp[name] *= factor
        return True

    def metrics(self, threshold: float, names: Sequence[str]) -> Metrics:
        """Return the measurements as the policy needs them, without candidates that were not measured."""
        candidates = tuple(
            Candidate(name=name, rthp=self.rthp[name], ocycle=self.ocycles[name])
            for name in names
            if name in self.rthp
        )
        return Metrics(
            gthp=_positive(self.gthp),
            lthp=_positive(self.lthp),
            pcycle=_positive(self.pcycle),
            pseconds=self.pseconds or None,
            speedup_threshold=threshold,
            candidates=candidates,
        )


def _positive(value: float | None) -> float:
    return max(value or 0.0, 1e-9)


class OffloadTuner(Iterator[Any]):
    """Iterator over an epoch that measures with the first batches how to make the others.

    Args:
        measured: Measurements so far, which are updated.
        part: Return the split for a candidate and a ratio.
        threshold: FastFlow's SpeedUpThreshold.
        warm: Batches to prepare before CPU seconds count, where processes have just begun.
        on_decided: Called after a decision, and when it becomes final.
        why_not: Return the workers' failures so far, by address.
        cpu_s: Return the CPU seconds of this process and its loader processes so far; by default of this
            process alone.
    """

    def __init__(
        self,
        epoch: Epoch,
        measured: TunerMeasurements,
        *,
        candidates: Sequence[str],
        part: Callable[[str, float], OffloadShare],
        policy: OffloadPolicy = OFFLOAD_POLICIES["upriver"],
        threshold: float = SPEEDUP_THRESHOLD,
        warm: int = 0,
        on_decided: Callable[[], object] = lambda: None,
        why_not: Callable[[], Mapping[str, str]] = dict,
        cpu_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._epoch, self._found, self._clock = epoch, measured, clock
        self._last: BatchStep | None = None
        self._handed_s = 0.0
        # The course must not refer to this object, so that a dropped epoch ends at once.
        self._course = _Course(
            epoch=epoch,
            found=measured,
            candidates=candidates,
            part=part,
            policy=policy,
            threshold=threshold,
            warm=warm,
            on_decided=on_decided,
            why_not=why_not,
            cpu_s=cpu_s or CpuSeconds(),
            clock=clock,
        ).run()

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            Exception: The dataset's error for one of the samples. The next call continues after that batch.
        """
        last, self._last = self._last, None
        if last is not None:
            last = replace(last, consumed_s=self._clock() - self._handed_s)
        with suppress(StopIteration):  # it ends only by an error raised in it, such as the death of a process
            self._course.send(last)
        waits, asked_s = copy(self._epoch.waits), self._clock()
        batch = next(self._epoch)
        self._handed_s, waits = self._clock(), self._epoch.waits - waits
        self._last = BatchStep(
            waited_s=self._handed_s - asked_s,
            consumed_s=0.0,
            nbytes=self._found.size_of(batch, waits.samples),
            waits=waits,
        )
        return batch


@dataclass(frozen=True, kw_only=True)
class _Course:
    """Steps between batches: measure, decide, and hold the decision to its promise."""

    epoch: Epoch
    found: TunerMeasurements
    candidates: Sequence[str]
    part: Callable[[str, float], OffloadShare]
    policy: OffloadPolicy
    threshold: float
    warm: int
    on_decided: Callable[[], object]
    why_not: Callable[[], Mapping[str, str]]
    cpu_s: Callable[[], float]
    clock: Callable[[], float]

    @property
    def _least_spent(self) -> int:
        """Return the least number of batches for measuring, as another job may have measured."""
        return (1 + len(self.candidates)) * (PREPARED + LEAST_STEPS)

    @property
    def _patience(self) -> int:
        """Return the batches before absent workers are measured; more if that changed nothing before."""
        found = self.found
        times = found.rest // REST
        return found.spent if times == 1 else times * max(self._least_spent, found.spent)

    def run(self) -> Course:
        """Run for the whole epoch, without an end."""
        planned_before = 0
        while True:
            if self.found.measuring:
                yield from self._measure()
                planned_before = self.epoch.planned
            yield from self._follow(planned_before)
            planned_before = self.epoch.planned

    def _measure(self) -> Course:
        found = self.found
        if found.gthp is None or found.lthp is None or found.pcycle is None:
            timed = yield from self._time(HERE, OffloadShare.none())
            found.pcycle, found.gthp = timed.cpu_s / timed.prepared, timed.alone.throughput
            found.lthp, found.pseconds = timed.both.throughput, statistics.fmean(timed.both.seconds)
        if stalls(found.gthp, found.lthp, self.threshold):
            for name in self.candidates:
                if name not in found.rthp:
                    timed = yield from self._time(name, self.part(name, 1.0), alone=found.lthp)
                    if not timed.useless:
                        found.ocycles[name] = timed.ocycle(found.pcycle)
                        found.rthp[name] = timed.throughput
                    elif not self.epoch.ready:
                        break  # any other candidate would give the same result
        found.decide(self.policy, self.threshold, self.candidates, self.why_not())
        away = any(found.timed[name].away for name in found.useless)
        found.waiting = bool(found.useless) and (away or not self.epoch.ready)
        self.on_decided()

    def _time(
        self, name: str, split: OffloadShare, *, alone: float = 0.0
    ) -> Generator[None, BatchStep | None, TimedPath]:
        """Time one way to make batches, continuing where the last epoch ended."""
        timed = self.found.timed.setdefault(name, TimedPath())
        while timed.lacking > 0 and not timed.useless:
            self.epoch.split = split
            yield from self._prepare(timed)
        self.epoch.hold, self.epoch.split = False, split
        if timed.useless:
            return timed
        skip = SKIPPED
        waits = FAR_SLOWER * timed.prepared_throughput < timed.alone.throughput
        if name != HERE and self.policy.promise is not None and waits and not timed.both.seconds:
            return timed
        while not timed.both.enough(alone) and not timed.useless:
            step = yield
            self.found.spent += 1
            if step is None:
                continue
            if skip:
                skip -= 1
            else:
                timed.both.add(step.seconds, step.nbytes, step.waits.failed)
            if timed.both.spoilt:
                yield from self._again(timed)
                self.epoch.split, skip = split, max(SKIPPED, self.epoch.planned)
        return timed

    def _again(self, timed: TimedPath) -> Course:
        """Discard a measurement in which workers made too little; continue later, or once they are ready."""
        timed.both = TimedSteps()
        timed.tries += 1
        timed.away = not self.epoch.ready
        self.epoch.hold, self.epoch.split = False, OffloadShare.none()
        for _ in range(PREPARED * timed.tries):
            if timed.away and self.epoch.look():
                break
            yield
            self.found.spent += 1
        while self.epoch.coming and not self.epoch.ready:
            yield
        if timed.away and self.epoch.ready and not timed.came:
            timed.came, timed.tries = True, 0  # workers that began late have had no try yet

    def _prepare(self, timed: TimedPath) -> Course:
        """Hand out earlier batches; prepare some; hand these out while none are prepared."""
        for _ in range(self.epoch.planned):
            yield
            self.found.spent += 1
        planned = self.epoch.planned
        warm = self._made(planned or (0 if timed.short else self.warm))
        began_cpu_s, began_s = self.cpu_s(), self.clock()
        count = self._made(warm + timed.lacking) - warm
        returned = self.epoch.returned(warm)
        if max(returned, self.epoch.returned()) > FAILED:
            yield from self._again(timed)
            return
        if count:
            timed.returned += returned * count
            timed.cpu_s += max(0.0, self.cpu_s() - began_cpu_s)
            timed.prepared_s += self.clock() - began_s
        timed.prepared += count
        timed.short = timed.short or (warm > 0 and not planned and not count)
        self.epoch.hold = True
        for _ in range(max(1, warm + count)):  # if none are left, the next request shows it
            step = yield
            self.found.spent += 1
            if step is not None:
                timed.alone.add(step.consumed_s, step.nbytes)
        self.epoch.hold = False

    def _made(self, count: int) -> int:
        """Have ``count`` batches made, and return how many there are.

        Samples that workers give back are not made while nothing is trained.
        """
        return 0 if self.epoch.returned() > FAILED else self.epoch.prepare(count, most_returned=FAILED)

    def _follow(self, planned_before: int) -> Course:
        """Hand out batches as the controller says, until everything is to be measured again.

        Args:
            planned_before: Number of batches under way that were planned otherwise.
        """
        found, self.epoch.hold = self.found, False
        name, ratio = found.in_force
        self.epoch.split = self._share(name, ratio)
        skip = max(SKIPPED, planned_before)
        while True:
            step = yield
            found.since += 1
            if found.waiting and found.settled and found.since >= self._patience and self.epoch.look():
                found.forget_candidates()
                return
            if skip:
                skip -= 1
                continue
            was_settled = found.settled
            if step is None or not found.follow(step):
                continue
            if found.settled and not was_settled:
                self.on_decided()
            lacks = found.controller is not None and found.controller.lacks
            if (lacks or found.nobody) and found.since >= found.rest * max(self._least_spent, found.spent):
                found.forget()
                return
            before, (name, ratio) = (name, ratio), found.in_force
            if (name, ratio) == before and was_settled:
                continue
            if name == before[0]:
                self.epoch.split.turn(ratio)
            else:
                self.epoch.split = self._share(name, ratio)
            # Others' turns count twice: batches are made ahead while those planned before are waited for.
            skip = max(SKIPPED, self.epoch.planned) * (1 if found.settled else 2)

    def _share(self, name: str | None, ratio: float) -> OffloadShare:
        if name is None:
            return OffloadShare.none()
        share = self.part(name, ratio)
        share.even = self.found.controller is not None
        return share
