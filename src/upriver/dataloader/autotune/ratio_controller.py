"""The share that is made elsewhere, kept right while a job runs, by what handing out batches waits for.

Seen over a window of batches, at no cost: the waits are those that there are.

    T       MB/s of the batches handed out
    h, e    parts of the time spent waiting for what is made here, and for what is made elsewhere (`Waits`)
    f       share of what was to be made elsewhere that came back to be made here

Known of each side, A here and B elsewhere: the MB/s that it makes, from the last window in which it was late;
at first as measured for the decision.

The law, for a ratio r
    1. Here is late where h / (1 - r) is more than e / r: one sample fewer there spares more time than one
       fewer elsewhere. It is late by b = h - e (1 - r) / r. The other way round for elsewhere. Where b is
       within BAND r stays.
    2. The side that is late makes all it can: A = (1 - s) T, or B = s T, where s is the share that was made
       elsewhere, which is r but for what `Evened` has moved. The other one makes no less than it
       has just made, and maybe more: with each window in which it is not late again it is taken to make some
       more than it was seen to (DOUBT), and after many of them much more.
    3. r goes GAIN of the way to B / (A + B), where both are done at once; but gives away no more than b of
       what the side that is late has to do, n times that in the nth window in a row.

Why capacities, and not the waits alone: batches that were made ahead hide for long which side is too slow,
and where both are slower than the model the waits jump from one side to the other however near r is to its
best. Following them alone swings. With step 2 r rests near its best, and leaves it only by the doubt, until
the other side shows what it can do.

Besides
    f > FAILED    r falls by f r / 2, to PROBE at least, so that a machine that comes back is noticed; what
                  was known of workers counts again as soon as nothing comes back.
    T fell        by WORSE since another ratio was in force, and r goes away from that: it is tried again. If
                  it gives more, what was waited for has misled (waiting for one sample on its way is no lack
                  of workers); it stays there the next time that this happens, for PATIENCE windows, and twice
                  as many each time after that. If not, the job has changed.
    no waits      for PATIENCE windows: r falls by EASE, to find out whether workers are needed. Each time
                  that they were PATIENCE is doubled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from upriver.dataloader.epoch import Waits

GAIN = 0.5
"""Of the way to the ratio that seems right, at a time."""

BAND = 0.02
"""Of the time; waits below it are left alone."""

FINEST = 0.02
"""Of what the side with less to do has; smaller steps are not taken."""

DOUBT, DOUBLES, SURE = 0.005, 4, 8
"""What a side that is not late is taken to do beyond what is known, with one more window: DOUBT of it, twice
as much after DOUBLES windows, and twice as much with each one after SURE of them: batches that were made
ahead do not hide a side for so long."""

FAILED, PROBE = 0.1, 0.01

WORSE, APART = 0.1, 0.05
"""Throughputs and ratios, of the side with less to do, that differ by more are not the same."""

NONE = 0.002
"""A share below it is none, of either side."""

EASE, PATIENCE, MOST_PATIENCE = 0.02, 4, 64

WINDOW, MOST_WINDOW = 16, 40
"""Batches."""

WINDOW_S = 0.8
"""Seconds, at least: a machine that pauses for a moment is no trend."""

PER_WINDOW = 2
"""Batches of either side that a window should hold, where they are made whole."""

LACKING = 0.1
"""Of what was promised: more is looked into."""

WINDOWS = 2
"""In which it lacks, one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStep:
    """What was seen from one ask for a batch to the next.

    Attributes:
        waited_s: Until it was there.
        consumed_s: From then on.
        nbytes: Of the batch.
        waits: What was waited for.
    """

    waited_s: float
    consumed_s: float
    nbytes: int
    waits: Waits

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.waited_s + self.consumed_s


@dataclass(eq=False, slots=True)
class StepWindow:
    """Steps, one after another.

    Attributes:
        waited_s: Until batches were there, all of it.
        waits: What for.
    """

    steps: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    nbytes: int = 0
    waits: Waits = field(default_factory=Waits)

    def add(self, step: BatchStep) -> None:
        """One more."""
        self.steps += 1
        self.seconds += step.seconds
        self.waited_s += step.waited_s
        self.nbytes += step.nbytes
        self.waits = self.waits + step.waits

    def enough(self, size: int) -> bool:
        """Whether so many batches are in it, and so much time."""
        return self.steps >= size and self.seconds >= WINDOW_S

    @property
    def here(self) -> float:
        """Part of the time that was waited for what is made here: h."""
        return self._part(self.waits.here_s)

    @property
    def elsewhere(self) -> float:
        """Part of the time that was waited for what is made elsewhere: e."""
        return self._part(self.waits.elsewhere_s)

    @property
    def waited(self) -> float:
        """Part of the time in which the model had no batch."""
        return self._part(self.waited_s)

    @property
    def failed(self) -> float:
        """Part of what was to be made elsewhere that came back: f."""
        return self.waits.failed

    def share(self, ratio: float) -> float:
        """What was made elsewhere; the ratio in force, where that rounds to no other number of batches."""
        samples, given = self.waits.samples, self.waits.given
        if not samples or abs(given - ratio * samples) <= samples / self.steps:
            return ratio
        return given / samples

    @property
    def throughput(self) -> float:
        """MB/s."""
        return self.nbytes / self.seconds / 1e6 if self.seconds > 0 else 0.0

    def _part(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds > 0 else 0.0


def settling(ratio: float, *, whole: bool) -> int:
    """Batches until both sides have made some by a ratio that is new, where they are made whole."""
    less = min(ratio, 1 - ratio)
    return min(MOST_WINDOW, math.ceil(PER_WINDOW / less)) if whole and less > 0 else 0


def window_of(ratio: float, *, whole: bool) -> int:
    """Batches of a window, so that both sides are in it."""
    return max(WINDOW, settling(ratio, whole=whole))


class Point(NamedTuple):
    """A ratio, and the MB/s that it gave, with the share of them that was made elsewhere."""

    ratio: float
    throughput: float
    share: float


class Steering:
    """The law.

    Args:
        ratio: To begin with.
        here: MB/s that the training node makes, as far as it is known.
        elsewhere: MB/s that workers make.

    Attributes:
        ratio: As it is now.
    """

    def __init__(self, ratio: float, *, here: float, elsewhere: float) -> None:
        self.ratio = ratio
        self._here, self._elsewhere = here, elsewhere
        self._before_failing: float | None = None
        self._late, self._windows = "", 0
        self._quiet, self._patience, self._eased = 0, PATIENCE, False
        self._best: Point | None = None
        self._left: Point | None = None
        self._rest = self._next_rest = 0

    def turn(self, seen: StepWindow) -> float:
        """The ratio after a window in which it was as it is."""
        if not seen.waits.given or not self.ratio:
            return self.ratio  # it tells nothing of workers
        now = Point(self.ratio, seen.throughput, seen.share(self.ratio))
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

    def _look_back(self, now: Point) -> None:
        """To the ratio that gave the most, where there is less now, and what was waited for leads away."""
        best = self._best
        if best is None or now.throughput >= best.throughput:
            self._best = now
        elif now.throughput < (1 - WORSE) * best.throughput:
            if abs(now.ratio - best.ratio) < APART * min(best.ratio, 1 - best.ratio):
                self._best, self._rest = now, 0
            elif (self.ratio - now.ratio) * (best.ratio - now.ratio) <= 0:
                self._left, self.ratio = now, best.ratio

    def _judge(self, now: Point, left: Point) -> None:
        """Whether a ratio that gave more still does; it is rested at the next time, and longer each time."""
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
        """By what was waited for."""
        ratio = self.ratio
        # Of the time, for each sample that is made there: what one fewer would spare.
        here = seen.here / (1 - ratio) if ratio < 1 else 0.0
        elsewhere = seen.elsewhere / ratio
        if seen.waited > BAND:
            self._quiet = 0
        elif seen.waits.given < seen.waits.samples or ratio == 1:
            self._quiet += 1  # where nothing was made here it tells nothing of this side
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
        """From the ratio towards the one with which both sides are done at once."""
        both = self._here + self._elsewhere
        return GAIN * (self._elsewhere / both - self.ratio) if both > 0 else 0.0

    def _more(self, late: str) -> float:
        """How much more the side that is not late is taken to make than it did when it was."""
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
    """Whether a job gets what was promised.

    Args:
        promised: MB/s.
        waited: Part of the time in which the model was to have no batch.
    """

    def __init__(self, promised: float, waited: float) -> None:
        self._promised, self._waited, self._windows = promised, waited, 0

    def expect(self, *, promised: float, waited: float) -> None:
        """Otherwise, from now on."""
        self._promised, self._waited = promised, waited

    def lacks(self, seen: StepWindow, *, offloads: bool) -> bool:
        """Whether this has been a window too many in which it does not.

        Offloading, that is where it is slower than promised, and not because of the model; else where the
        model has waited more than was known.
        """
        if offloads:
            short = seen.throughput < (1 - LACKING) * self._promised and seen.waited > BAND
        else:
            short = seen.waited > self._waited + LACKING
        self._windows = self._windows + 1 if short else 0
        return self._windows >= WINDOWS


@dataclass(eq=False, slots=True)
class HeldDecision:
    """A decision that is held to what it promises.

    Attributes:
        why: Of the decision, as it was made.
        steering: None where nothing is offloaded.
        window: What has been seen since the ratio was last looked at.
        skip: Steps that do not count: their batches were planned before.
    """

    why: str
    watch: PromiseWatch
    steering: Steering | None
    window: StepWindow = field(default_factory=StepWindow)
    skip: int = 0

    def filled(self, step: BatchStep, size: int) -> StepWindow | None:
        """The window, where this step is the last of it."""
        if self.skip:
            self.skip -= 1
            return None
        self.window.add(step)
        if not self.window.enough(size):
            return None
        window, self.window = self.window, StepWindow()
        return window
