"""Decide while a loader runs which samples other machines make: a candidate set of stages, and its share.

A loader gives each batch that it hands out to `ShareController.add`, and plans by `ShareController.current`.
How the first figures are measured, and how a share becomes samples, is `upriver.dataloader`'s.

Over a window of batches
    T       MB/s of the batches handed out
    h, e    share of the time spent waiting for samples made here, and for samples made elsewhere
    s       share of the samples that were meant to be made elsewhere
    f       share of these that came back to be made here

The law, for a ratio r. A and B are the MB/s that this side and the other one are known to make.
    1. Here is late if h / (1 - r) is more than e / r: one sample fewer here saves more time than one fewer
       elsewhere. It is late by h - e (1 - r) / r. For elsewhere the rule is mirrored. No side is late by less
       than BAND.
    2. The late side makes all it can: A = (1 - s) T, or B = s T. The other side can make at least what it
       made, and perhaps more: with each window it is assumed to make DOUBT more than before. After SURE
       windows with the same side late, DOUBT doubles with each, up to twice the capacity: batches made ahead
       do not hide a side for so long.
    3. r goes half of the way to B / (A + B), where both sides finish at once.
    4. Where f exceeds FAILED, r falls by f r / 2 instead, to PROBE at least, so that workers that recover are
       noticed. A and B stay as known.
    5. Where nobody waits for PATIENCE windows, r falls by EASE, to find out whether workers are needed.

Waits alone do not do: batches that were made ahead hide for long which side is too slow, so a ratio that
follows waits swings. By its capacities r rests near the best ratio, and leaves it only by the doubt, until
the other side shows what it can make.

Candidates that promise about as much are tried in turns first, and offloading nothing is one of them.
Candidates measured one after another are not measured at the same moment, and shared machines gain and lose a
third of their speed meanwhile. Each candidate follows the law in its own turns.

The constants are from simulations (``tests/control/plants.py``, ``tests/dataloader/world.py``). With a DOUBT
of 0.05 the ratio swings twice as far, as it does with a SURE of 6, or all the way to B / (A + B). Without
SURE a ratio that is far off takes a thousand batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median

from upriver.policies import OffloadDecision, OffloadPolicy
from upriver.profile.throughput import Metrics

HERE = ""
"""Name of the candidate that offloads nothing."""

BAND = 0.02
"""Share of the time; smaller waits are ignored."""

DOUBT, SURE = 0.02, 12
DOUBLED = 6
"""Doublings of the doubt after which it is twice the capacity."""

FAILED, PROBE = 0.1, 0.01

NONE = 0.002
"""Share of either side below which it counts as none."""

EASE, PATIENCE = 0.02, 4

NEAR = 0.7
"""Share of the largest promise below which a candidate is not tried."""

TURNS, MORE_TURNS = 3, 6
"""Turns of each candidate, of one window each; and turns of those still near the best one after that."""

UNSURE = 0.1
"""Relative shortfall from the best throughput after `TURNS` beyond which a candidate has no further turns."""

SAME = 0.05
"""Relative shortfall from the best throughput up to which a candidate counts as equally good."""

WINDOW, MOST_WINDOW = 16, 40
"""Number of batches in a window, and where one of the sides has made few of them."""

FEW = 2
"""Batches of either side that a window should hold."""

WINDOW_S = 0.8
"""Minimum seconds of a window: a machine that pauses for a moment is no trend."""

LACKING, WINDOWS = 0.1, 2
"""Relative shortfall from the promise, and the number of consecutive windows in which it is missed."""


@dataclass(eq=False, slots=True)
class EpochWaits:
    """Seconds that handing out has waited so far, and counts of the samples meant to be made elsewhere.

    Attributes:
        here_s: Seconds in which the next batch lacked only samples that this machine makes.
        elsewhere_s: Seconds in which it lacked only samples that others make, with nothing else left to do
            here.
        both_s: Seconds in which it lacked both, or the training thread made samples of later batches while
            others worked on the next one.
        samples: Number of samples handed out.
        given: Number of these that were meant to be made elsewhere.
        returned: Number of these that no machine accepted or made.
    """

    here_s: float = 0.0
    elsewhere_s: float = 0.0
    both_s: float = 0.0
    samples: int = 0
    given: int = 0
    returned: int = 0

    @property
    def failed(self) -> float:
        """Return the share of samples meant to be made elsewhere that were not."""
        return self.returned / self.given if self.given else 0.0

    def __add__(self, more: EpochWaits) -> EpochWaits:
        return EpochWaits(*(getattr(self, each.name) + getattr(more, each.name) for each in fields(self)))

    def __sub__(self, before: EpochWaits) -> EpochWaits:
        return EpochWaits(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStep:
    """Observations from one request for a batch to the next.

    Attributes:
        waited_s: Seconds until the batch was ready.
        consumed_s: Seconds from then on.
    """

    waited_s: float
    consumed_s: float
    nbytes: int
    waits: EpochWaits

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.waited_s + self.consumed_s


@dataclass(eq=False, slots=True)
class StepWindow:
    """Sum of consecutive steps.

    Attributes:
        here_steps: Number of batches with samples made here.
        elsewhere_steps: Number of batches with samples meant to be made elsewhere.
        waited_s: Seconds until batches were ready.
    """

    steps: int = 0
    here_steps: int = 0
    elsewhere_steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0
    waits: EpochWaits = field(default_factory=EpochWaits)

    def add(self, step: BatchStep) -> None:
        """Add a step."""
        self.steps += 1
        self.here_steps += step.waits.given < step.waits.samples
        self.elsewhere_steps += step.waits.given > 0
        self.seconds += step.seconds
        self.waited_s += step.waited_s
        self.nbytes += step.nbytes
        self.waits = self.waits + step.waits

    def enough(self, ratio: float) -> bool:
        """Return whether the window tells enough about a ratio: batches, time, and some of both sides."""
        both = 0 < ratio < 1 and min(self.here_steps, self.elsewhere_steps) < FEW
        return self.steps >= (MOST_WINDOW if both else WINDOW) and self.seconds >= WINDOW_S

    @property
    def here(self) -> float:
        """Return h: the share of the time spent waiting for samples made here."""
        return self._part(self.waits.here_s)

    @property
    def elsewhere(self) -> float:
        """Return e: the share of the time spent waiting for samples made elsewhere."""
        return self._part(self.waits.elsewhere_s)

    @property
    def waited(self) -> float:
        """Return the share of the time in which the model had no batch."""
        return self._part(self.waited_s)

    def share(self, ratio: float) -> float:
        """Return s, which is the ratio in force if they differ by at most one batch."""
        samples, given = self.waits.samples, self.waits.given
        if not samples or abs(given - ratio * samples) <= samples / self.steps:
            return ratio
        return given / samples

    @property
    def throughput(self) -> float:
        """Return T in MB/s."""
        return self.nbytes / self.seconds / 1e6 if self.seconds > 0 else 0.0

    def _part(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass(eq=False, slots=True, kw_only=True)
class ShareCandidate:
    """Candidate set of stages to offload, with its ratio and the capacities of both sides.

    Attributes:
        name: Name of the stages that run elsewhere; `HERE` for none.
        ratio: Share of the samples made elsewhere.
        here: A, as known.
        elsewhere: B, as known.
        promise: MB/s that it should give.
        ocycle: CPU seconds that a batch made elsewhere costs the training node.
        turns: MB/s in each of its turns.
    """

    name: str = HERE
    ratio: float = 0.0
    here: float = 0.0
    elsewhere: float = 0.0
    promise: float = 0.0
    ocycle: float = 0.0
    turns: list[float] = field(default_factory=list)
    _late: str = field(default="", init=False)
    _again: int = field(default=0, init=False)
    _quiet: int = field(default=0, init=False)

    def follow(self, seen: StepWindow) -> None:
        """Set the ratio by the law, after a window with the current one."""
        ratio = self.ratio
        if not ratio or not seen.waits.given:
            return  # the window says nothing about workers
        if seen.waits.failed > FAILED:
            self._set(max(ratio * (1 - seen.waits.failed / 2), min(ratio, PROBE)))
            return
        late = _late_side(seen, ratio)
        if late:
            self._learn(seen, late)
            both = self.here + self.elsewhere
            self._set((ratio + self.elsewhere / both) / 2 if both > 0 else ratio)
        else:
            self._ease(seen)

    def _learn(self, seen: StepWindow, late: str) -> None:
        """Update what both sides are known to make."""
        self._again = self._again + 1 if late == self._late else 0
        self._late = late
        more = 1 + min(1.0, DOUBT * 2.0 ** min(max(0, self._again - SURE), DOUBLED))
        share = seen.share(self.ratio)
        here, elsewhere = (1 - share) * seen.throughput, share * seen.throughput
        most = seen.throughput / NONE**2
        if late == "here":
            self.here, self.elsewhere = here, _doubted(max(self.elsewhere, elsewhere), more, most)
        else:
            self.here, self.elsewhere = _doubted(max(self.here, here), more, most), elsewhere

    def _ease(self, seen: StepWindow) -> None:
        """Lower the ratio where nobody waits, and samples made here are in time, too."""
        in_time = seen.waited <= BAND and (seen.waits.given < seen.waits.samples or self.ratio == 1)
        self._quiet = self._quiet + 1 if in_time else 0
        if self._quiet >= PATIENCE:
            self._quiet = 0
            self._set(self.ratio - min(EASE, max((1 - self.ratio) / 4, NONE)))

    def _set(self, ratio: float) -> None:
        self.ratio = 0.0 if ratio < NONE else ratio if ratio <= 1 - NONE else 1.0


def _doubted(known: float, more: float, most: float) -> float:
    """Return what a side in time may make: more than is known, as long as that is believable."""
    return max(known, min(known * more, most))


def _late_side(seen: StepWindow, ratio: float) -> str:
    """Return ``here`` or ``elsewhere``, or nothing if no side is late."""
    here = seen.here / (1 - ratio) if ratio < 1 else 0.0
    elsewhere = seen.elsewhere / ratio
    if (here - elsewhere) * (1 - ratio) > BAND:
        return "here"
    return "elsewhere" if (elsewhere - here) * ratio > BAND else ""


class ShareController:
    """Controller of a job's candidate and ratio.

    Args:
        decision: The policy's decision, by figures measured before.
        candidates: Candidates to try in turns, of equal ones the first wins; or the only one, which is kept.
        alone: MB/s with nothing offloaded, as measured before.
        most: MB/s of the model alone.

    Attributes:
        decision: Decision in force, with its reason; while candidates are tried, the policy's.
        current: Candidate by which batches are to be planned now, with its ratio.
        settled: Whether the candidates have been tried.
        promised: MB/s that the job should give.
    """

    def __init__(
        self, decision: OffloadDecision, candidates: Sequence[ShareCandidate], *, alone: float, most: float
    ) -> None:
        self.decision, self._candidates, self._alone, self._most = decision, candidates, alone, most
        self._why, self._window, self._missed = decision.why, StepWindow(), 0
        self.settled = len(candidates) == 1
        self.current = candidates[0]
        self.promised = self.current.promise
        self._waited = 1 - self.promised / most

    @classmethod
    def of(
        cls, policy: OffloadPolicy, metrics: Metrics, decision: OffloadDecision, *, tries: bool
    ) -> ShareController | None:
        """Return the controller of a policy's decision; None where the policy decides once.

        Args:
            tries: Whether candidates that promise about as much are tried.
        """
        if policy.promise is None:
            return None
        alone = min(metrics.gthp, metrics.lthp)
        candidates = [ShareCandidate(promise=alone)]
        if decision.candidate is not None:
            for each in sorted(metrics.candidates, key=lambda each: each.name != decision.candidate):
                by_itself = replace(metrics, candidates=(each,))
                found = policy.decide(by_itself)
                candidate = ShareCandidate(
                    name=each.name,
                    ratio=found.ratio or decision.ratio,  # also where it promises nothing
                    here=metrics.lthp,
                    elsewhere=each.rthp,
                    promise=policy.promise(by_itself, found),
                    ocycle=each.ocycle,
                )
                candidates.append(candidate)
            least = NEAR * max(each.promise for each in candidates)
            near = [each for each in candidates if each.promise >= least]
            if tries and len(near) > 1:
                candidates = near
            else:
                chosen, promise = candidates[1], policy.promise(metrics, decision)
                candidates = [replace(chosen, ratio=decision.ratio, promise=promise)]
        return cls(decision, candidates, alone=alone, most=metrics.gthp)

    def add(self, step: BatchStep) -> bool:
        """Add a step planned by `current`, and return whether a window is complete, which may change it."""
        self._window.add(step)
        if not self._window.enough(self.current.ratio):
            return False
        window, self._window = self._window, StepWindow()
        if self.settled:
            self._missed = self._missed + 1 if self._misses(window) else 0
            self._follow(window)
        else:
            self.current.turns.append(window.throughput)
            self.current.follow(window)
            self._take_turn()
        return True

    @property
    def lacks(self) -> bool:
        """Return whether the promise has been missed for too many windows."""
        return self._missed >= WINDOWS

    def corrections(self) -> dict[str, float]:
        """Return, by candidate, the factor on its Rthp that makes its promise match its turns.

        It is relative to the best candidate's promise, as turns are of another moment than Gthp and Lthp. A
        promise's excess over Lthp grows with Rthp.
        """
        best, found = self.current, dict[str, float]()
        most = self._throughput(best)
        for each in self._candidates:
            gain = each.promise - self._alone
            if each.name == HERE:
                continue
            if not each.ratio:
                found[each.name] = 0.0
            elif gain > 0 and most > 0:
                shown = best.promise * self._throughput(each) / most
                found[each.name] = max(0.0, shown - self._alone) / gain
        return found

    def _follow(self, window: StepWindow) -> None:
        before = self.current.ratio
        self.current.follow(window)
        ratio = self.current.ratio
        if ratio == before:
            return
        self.decision = replace(
            self.decision,
            offload=ratio > 0,
            candidate=self.current.name if ratio else None,
            ratio=ratio,
            why=f"{self._why}; steered to {ratio:.0%}, where {window.here:.0%} of the time was waited for "
            f"samples made here and {window.elsewhere:.0%} for samples made elsewhere",
        )
        if not ratio:
            self._waited = 0.0

    def _misses(self, window: StepWindow) -> bool:
        """Return whether a window is below the promise.

        With offloading it is if throughput is and the model waits. Without offloading it is if the model
        waits more than expected.
        """
        if self.current.ratio:
            return window.throughput < (1 - LACKING) * self.promised and window.waited > BAND
        return window.waited > self._waited + LACKING

    # ---------------------------------------------------------------------------------------- turns

    @property
    def _useful(self) -> list[ShareCandidate]:
        """Return the candidates that the law has not brought to a ratio of 0."""
        return [each for each in self._candidates if each.name == HERE or each.ratio]

    def _take_turn(self) -> None:
        """Let the next candidate have a turn; keep the best once all had theirs, or one is far ahead."""
        useful = self._useful
        if any(each.ratio for each in useful):
            for tried, turns in ((useful, TURNS), (self._near(1 - UNSURE), MORE_TURNS)):
                following = min(tried, key=lambda each: len(each.turns))
                if len(following.turns) < turns and (turns == TURNS or len(tried) > 1):
                    self.current = following
                    return
        self._settle()

    def _settle(self) -> None:
        """Keep the candidate with the least cost here among those near the highest throughput.

        Offloading nothing wins if it is among them. Work elsewhere costs machines and bandwidth, and delays
        an epoch's first batches, when none are made ahead.
        """
        near = self._near(1 - SAME) or [ShareCandidate(promise=self._alone)]
        self.current = near[0] if near[0].name == HERE else min(near, key=lambda each: each.ocycle)
        self.settled, ratio = True, self.current.ratio
        self._why = f"{self._why}; {self._told(len(near) > 1)}"
        self.decision = OffloadDecision(
            offload=ratio > 0, candidate=self.current.name if ratio else None, ratio=ratio, why=self._why
        )
        self.promised = self._throughput(self.current)
        self._waited = 1 - self.promised / self._most

    def _told(self, several: bool) -> str:
        name = self.current.name
        each = ", ".join(f"{each.name or 'nothing'} {self._throughput(each):.4g}" for each in self._useful)
        useless = [f"{each.name} was of no use" for each in self._candidates if each not in self._useful]
        best = f"{name} is taken" if name else "nothing is offloaded"
        if name and several:
            best += ", which costs the least here of those that give as much"
        found = "; ".join(filter(None, [f"{each} MB/s" if each else "", *useless]))
        return f"of those that promise about as much, tried in turns, {best} ({found})"

    def _throughput(self, candidate: ShareCandidate) -> float:
        """Return the median MB/s of a candidate's turns; without turns, the MB/s with nothing offloaded."""
        return median(candidate.turns) if candidate.turns else self._alone

    def _near(self, share: float) -> list[ShareCandidate]:
        """Return the candidates with at least ``share`` of the highest throughput."""
        useful = self._useful
        most = max(map(self._throughput, useful), default=0.0)
        return [each for each in useful if self._throughput(each) >= share * most]
