"""Counters that hold a share at every prefix, not only in the end: FastFlow's (PVLDB 16(5), section 5.3).

They go on when the share changes, so that no change rounds one away that is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from upriver.dataloader.offload_stretch import Stretch
from upriver.pipeline.mapstyle import DONE, START
from upriver.types import require_finite

ROUNDING = 1e-9
"""Of shares that add up to one thing."""


class Backlog(NamedTuple):
    """Samples that are planned and not made yet.

    Attributes:
        here: Of these, such as are made on the training node.
        elsewhere: Such as are made by workers.
    """

    here: int
    elsewhere: int


class Planning(Protocol):
    """An epoch."""

    @property
    def backlog(self) -> Backlog:
        """As of now."""


class AllHere:
    """No sample is made elsewhere."""

    stretch, ratio = Stretch(start=START, stop=DONE, whole=True), 0.0

    def __call__(self, count: int) -> list[bool]:
        """For each of ``count`` samples that it is not."""
        return [False] * count


class OffloadShare:
    """A share of the samples is made elsewhere.

    After any number of samples, or of batches where these are made whole, less than one above or below the
    share of them is; where the share has changed, the sum of what each was due.

    Args:
        ratio: The share, 0 to 1.
        stretch: Their stages that are. Where it is whole, whole batches are made here or elsewhere, and
            samples one by one otherwise.

    Raises:
        ConfigError: If the share is none.
    """

    def __init__(self, ratio: float, stretch: Stretch) -> None:
        self.stretch = stretch
        self._due = 0.0
        self.turn(ratio)

    def turn(self, ratio: float) -> None:
        """Another share from now on."""
        require_finite("ratio", ratio, at_most=1)
        self.ratio = ratio

    def __call__(self, count: int) -> list[bool]:
        """For each of ``count`` samples whether it is."""
        return [self._next()] * count if self.stretch.whole else [self._next() for _ in range(count)]

    def _next(self) -> bool:
        self._due += self.ratio
        goes = self._due >= 1 - ROUNDING
        self._due -= goes
        return goes


class Evened:
    """A share that makes up for a side which is slower than usual for a while.

    Of what is under way workers should have the share, too. Where they have more, by over half a batch, less
    is given to them than the share says, and the other way round. Nothing of that is paid back later. Workers
    that are far away have more under way without being slower; up to half a batch of that is left alone, for
    the rest the ratio has to make up.

    Args:
        part: The share.
        epoch: Whose batches they are.
    """

    def __init__(self, part: OffloadShare, epoch: Planning) -> None:
        self._part, self._epoch, self.stretch = part, epoch, part.stretch

    @property
    def ratio(self) -> float:
        """The share."""
        return self._part.ratio

    def __call__(self, count: int) -> Sequence[bool]:
        """For each of ``count`` samples whether it is made elsewhere."""
        goes = self._part(count)
        here, elsewhere = self._epoch.backlog
        ahead = elsewhere - self._part.ratio * (here + elsewhere)
        excess = max(0.0, abs(ahead) - count / 2)
        if not excess or not 0 < self._part.ratio < 1:
            return goes
        moved = count if self.stretch.whole else round(excess)
        given = min(count, max(0, sum(goes) + (moved if ahead < 0 else -moved)))
        return [True] * given + [False] * (count - given)
