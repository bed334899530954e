"""Adjust the share made elsewhere while a job runs, by the waits of handing out batches.

The waits are those that occur anyway, summed over a window of batches.

    T       MB/s of the batches handed out
    h, e    share of the time spent waiting for samples made here, and for samples made elsewhere
    (`EpochWaits`) f       share of the samples meant to be made elsewhere that came back to be made here

Each side, A here and B elsewhere, has a known capacity in MB/s. It comes from the last window in which the
side was late; at first it is as measured for the decision.

The law, for a ratio r
    1. Here is late if h / (1 - r) is more than e / r: one sample fewer here saves more time than one fewer
       elsewhere. It is late by b = h - e (1 - r) / r. For elsewhere the rule is mirrored. If b is within
       BAND, r stays.
    2. The late side makes all it can: A = (1 - s) T, or B = s T, where s is the share that was made
       elsewhere. s is r, except for samples that `EvenedShare` has moved. The other side can make at least as
       much as it just made, and perhaps more: with each window in which it is again not late it is assumed to
       make slightly more than seen (DOUBT), and after many of them much more.
    3. r goes GAIN of the way to B / (A + B), where both finish at once. It takes at most b of the late side's
       work away, and n times that in the nth window in a row.

Capacities are needed besides the waits: batches that were made ahead hide for long which side is too slow.
Where both sides are slower than the model, the waits jump between the sides however near r is to its best. A
ratio that follows waits alone swings. With step 2 r rests near its best, and leaves it only by the doubt,
until the other side shows its capacity.

Further rules
    f > FAILED    r falls by f r / 2, to PROBE at least, so that a machine that recovers is noticed. The
                  workers' known capacity counts again as soon as nothing comes back.
    T fell        by WORSE since another ratio was in force, and r moves away from that ratio: it is tried
                  again. If it gives more, the waits have misled (waiting for one sample in transit is no lack
                  of workers). The next time, r stays there for PATIENCE windows, and twice as many each time
                  after that. If it does not, the job has changed.
    no waits      for PATIENCE windows: r falls by EASE, to find out whether workers are needed. Each time
                  they are, PATIENCE doubles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from upriver.dataloader.epoch import EpochWaits

GAIN = 0.5
"""Share of the way to the ratio that seems right, per step."""

BAND = 0.02
"""Share of the time; smaller waits are ignored."""

FINEST = 0.02
"""Relative to the share of the side with less to do; smaller steps are not taken."""

DOUBT, DOUBLES, SURE = 0.005, 4, 8
"""Growth of the assumed capacity of a side that is not late, per window.

It is DOUBT at first, and twice as much after DOUBLES windows. After SURE windows it doubles with each one:
batches made ahead do not hide a side for so long.
"""

FAILED, PROBE = 0.1, 0.01

WORSE, APART = 0.1, 0.05
"""Relative differences in throughput and in ratio, of the side with less to do, above which values differ."""

NONE = 0.002
"""Share of either side below which it counts as none."""

EASE, PATIENCE, MOST_PATIENCE = 0.02, 4, 64

WINDOW, MOST_WINDOW = 16, 40
"""Number of batches in a window."""

WINDOW_S = 0.8
"""Minimum seconds of a window: a machine that pauses for a moment is no trend."""

PER_WINDOW = 2
"""Batches of either side that a window should hold, where batches are made whole."""

LACKING = 0.1
"""Relative shortfall from the promise above which it is examined."""

WINDOWS = 2
"""Number of consecutive windows with a shortfall before measuring again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStep:
    """Observations from one request for a batch to the next.

    Attributes:
        waited_s: Seconds until the batch was ready.
        consumed_s: Seconds from then on.
        nbytes: Bytes of the batch.
        waits: Causes of the waiting.
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
        waited_s: Seconds until batches were ready.
        waits: Causes of the waiting.
    """

    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0
    waits: EpochWaits = field(default_factory=EpochWaits)

    def add(self, step: BatchStep) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += step.seconds
        self.waited_s += step.waited_s
        self.nbytes += step.nbytes
        self.waits = self.waits + step.waits

    def enough(self, size: int) -> bool:
        """Return whether the window has ``size`` batches and enough time."""
        return self.steps >= size and self.seconds >= WINDOW_S

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

    @property
    def failed(self) -> float:
        """Return f: the share of samples meant to be made elsewhere that came back."""
        return self.waits.failed

    def share(self, ratio: float) -> float:
        """Return the share made elsewhere; the ratio in force, if they differ by at most one batch."""
        samples, given = self.waits.samples, self.waits.given
        if not samples or abs(given - ratio * samples) <= samples / self.steps:
            return ratio
        return given / samples

    @property
    def throughput(self) -> float:
        """Return the throughput in MB/s."""
        return self.nbytes / self.seconds / 1e6 if self.seconds > 0 else 0.0

    def _part(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds > 0 else 0.0


def settling(ratio: float, *, whole: bool) -> int:
    """Return the batches until both sides have made some at a new ratio, where batches are made whole."""
    less = min(ratio, 1 - ratio)
    return min(MOST_WINDOW, math.ceil(PER_WINDOW / less)) if whole and less > 0 else 0


def window_of(ratio: float, *, whole: bool) -> int:
    """Return the batches of a window that includes both sides."""
    return max(WINDOW, settling(ratio, whole=whole))


class RatioPoint(NamedTuple):
    """A ratio, the MB/s that it gave, and the share that was made elsewhere."""

    ratio: float
    throughput: float
    share: float


class RatioController:
    """The controller of the ratio.

    Args:
        ratio: Initial ratio.
        here: MB/s that the training node makes, as measured.
        elsewhere: MB/s that workers make, as measured.

    Attributes:
        ratio: Current ratio.
    """

    def __init__(self, ratio: float, *, here: float, elsewhere: float) -> None:
        self.ratio = ratio
        self._here, self._elsewhere = here, elsewhere
        self._before_failing: float | None = None
        self._late, self._windows = "", 0
        self._quiet, self._patience, self._eased = 0, PATIENCE, False
        self._best: RatioPoint | None = None
        self._left: RatioPoint | None = None
        self._rest = self._next_rest = 0

    def turn(self, seen: StepWindow) -> float:
        """Return the ratio after a window with the current one."""
        if not seen.waits.given or not self.ratio:
            return self.ratio  # the window says nothing about workers
        now = RatioPoint(self.ratio, seen.throughput, seen.share(self.ratio))
        if seen.failed > FAILED:
            self._fail(seen)
        elif self._left is not None:
            self._judge(now, self._left)
        else:
            self._rest -= self._rest > 0
            if not self._rest:
                self._follow(seen)
            self._look_back(now)
        return self.ratio

    def _look_back(self, now: RatioPoint) -> None:
        """Return to the ratio that gave the most, if throughput is lower and the waits do not lead there."""
        best = self._best
        if best is None or now.throughput >= best.throughput:
            self._best = now
        elif now.throughput < (1 - WORSE) * best.throughput:
            if abs(now.ratio - best.ratio) < APART * min(best.ratio, 1 - best.ratio):
                self._best, self._rest = now, 0
            elif (self.ratio - now.ratio) * (best.ratio - now.ratio) <= 0:
                self._left, self.ratio = now, best.ratio

    def _judge(self, now: RatioPoint, left: RatioPoint) -> None:
        """Check whether an earlier ratio still gives more; the next time it is held, and longer each time."""
        self._left, self._late = None, ""
        if now.throughput > (1 + WORSE / 2) * left.throughput:
            self._best, self._rest = now, self._next_rest
            self._next_rest = min(MOST_PATIENCE, max(PATIENCE, 2 * self._next_rest))
            self._here = max(self._here, (1 - now.share) * now.throughput)
            self._elsewhere = max(self._elsewhere, now.share * now.throughput)
        else:  # the job has changed
            self._best, self.ratio = None, left.ratio
            self._rest = self._next_rest = 0

    def _follow(self, seen: StepWindow) -> None:
        """Adjust the ratio by the waits."""
        ratio = self.ratio
        # Share of the time that one sample fewer on a side would save.
        here = seen.here / (1 - ratio) if ratio < 1 else 0.0
        elsewhere = seen.elsewhere / ratio
        if seen.waited > BAND:
            self._quiet = 0
        elif seen.waits.given < seen.waits.samples or ratio == 1:
            self._quiet += 1  # without samples made here it says nothing about this side
        if (late := (here - elsewhere) * (1 - ratio)) > BAND:
            self._rise(seen, late)
        elif (late := (elsewhere - here) * ratio) > BAND:
            self._fall(seen, late)
        elif self._quiet >= self._patience:
            self._quiet, self._eased = 0, True
            self._to(ratio - min(EASE, max((1 - ratio) / 4, NONE)))

    def _rise(self, seen: StepWindow, late: float) -> None:
        if self._eased:
            self._eased, self._patience = False, min(MOST_PATIENCE, 2 * self._patience)
        if self._before_failing is not None:
            self._elsewhere, self._before_failing = self._before_failing, None
        share = seen.share(self.ratio)
        self._here = (1 - share) * seen.throughput
        self._elsewhere = max(self._elsewhere, share * seen.throughput) * self._more("here")
        self._to(self.ratio + min(self._way(), (1 + self._windows) * late * (1 - self.ratio)))

    def _fall(self, seen: StepWindow, late: float) -> None:
        self._eased = False
        share = seen.share(self.ratio)
        self._elsewhere = share * seen.throughput
        self._here = max(self._here, (1 - share) * seen.throughput) * self._more("elsewhere")
        self._to(self.ratio + max(self._way(), -(1 + self._windows) * late * self.ratio))

    def _fail(self, seen: StepWindow) -> None:
        if self._before_failing is None:
            self._before_failing = self._elsewhere
        self._best = self._left = None
        self._to(max(self.ratio * (1 - seen.failed / 2), min(self.ratio, PROBE)))

    def _way(self) -> float:
        """Return the step from the ratio towards the one at which both sides finish at once."""
        both = self._here + self._elsewhere
        return GAIN * (self._elsewhere / both - self.ratio) if both > 0 else 0.0

    def _more(self, late: str) -> float:
        """Return the factor on the capacity of the side that is not late, against the one it last showed."""
        self._windows = self._windows + 1 if late == self._late else 0
        self._late = late
        if not self._windows:
            return 1.0
        slow, fast = min(self._windows, SURE), max(0, self._windows - SURE)
        return 1 + min(1.0, DOUBT * 2 ** (slow / DOUBLES + fast))

    def _to(self, ratio: float) -> None:
        finest = max(NONE / 4, min(NONE, FINEST * min(self.ratio, 1 - self.ratio)))
        if ratio < NONE:
            self.ratio = 0.0
        elif abs(ratio - self.ratio) >= finest:
            self.ratio = ratio if ratio <= 1 - NONE else 1.0


class PromiseWatch:
    """Check whether a job gets the promised throughput.

    Args:
        promised: Promised MB/s.
        waited: Expected share of the time in which the model has no batch.
    """

    def __init__(self, promised: float, waited: float) -> None:
        self._promised, self._waited, self._windows = promised, waited, 0

    def expect(self, *, promised: float, waited: float) -> None:
        """Replace the expectations."""
        self._promised, self._waited = promised, waited

    def lacks(self, seen: StepWindow, *, offloads: bool) -> bool:
        """Return whether the promise has been missed for too many windows.

        With offloading it is missed if throughput is below it and the model waits. Without offloading it is
        missed if the model waits more than expected.
        """
        if offloads:
            short = seen.throughput < (1 - LACKING) * self._promised and seen.waited > BAND
        else:
            short = seen.waited > self._waited + LACKING
        self._windows = self._windows + 1 if short else 0
        return self._windows >= WINDOWS


@dataclass(eq=False, slots=True)
class HeldDecision:
    """A decision that is held to its promise.

    Attributes:
        why: Reason for the decision, as it was made.
        steering: Controller of the ratio; None where nothing is offloaded.
        window: Steps since the ratio was last examined.
        skip: Steps that do not count, as their batches were planned before.
    """

    why: str
    watch: PromiseWatch
    steering: RatioController | None
    window: StepWindow = field(default_factory=StepWindow)
    skip: int = 0

    def filled(self, step: BatchStep, size: int) -> StepWindow | None:
        """Add a step, and return the window if it is complete."""
        if self.skip:
            self.skip -= 1
            return None
        self.window.add(step)
        if not self.window.enough(size):
            return None
        window, self.window = self.window, StepWindow()
        return window
