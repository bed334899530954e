"""Keep a share at every prefix of the samples: FastFlow's counters (PVLDB 16(5), section 5.3).

`upriver.dataloader.autotune` decides the share, or the user does. The counters continue when the share
changes, so that a small share is not rounded away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from upriver.dataloader.offload_stretch import Stretch
from upriver.pipeline.mapstyle import DONE, START
from upriver.types import require_finite

ROUNDING = 1e-9
"""Tolerance for shares that add up to one sample."""


class Backlog(NamedTuple):
    """Number of samples that are planned and not made yet.

    Attributes:
        here: Samples that the training node makes.
        elsewhere: Samples that workers make.
    """

    here: int
    elsewhere: int


class Planning(Protocol):
    """Epoch whose backlog can be read."""

    @property
    def backlog(self) -> Backlog:
        """Number of samples under way now."""


class AllHere:
    """Split that makes no sample elsewhere."""

    stretch, ratio = Stretch(start=START, stop=DONE, whole=True), 0.0

    def __call__(self, count: int) -> list[bool]:
        """Return False for each of ``count`` samples."""
        return [False] * count


class OffloadShare:
    """Split that makes a share of the samples elsewhere.

    After any number of samples, or of batches where batches are made whole, the count is less than one from
    the share. If the share has changed, it is less than one from the sum of each part's share.

    Args:
        ratio: Share, 0 to 1.
        stretch: Stages that run elsewhere. If it is whole, each batch goes to one side as a whole; otherwise
            each sample does.

    Raises:
        ConfigError: If the ratio is not in 0..1.
    """

    def __init__(self, ratio: float, stretch: Stretch) -> None:
        self.stretch = stretch
        self._due = 0.0
        self.turn(ratio)

    def turn(self, ratio: float) -> None:
        """Set the share from now on."""
        require_finite("ratio", ratio, at_most=1)
        self.ratio = ratio

    def __call__(self, count: int) -> list[bool]:
        """Return for each of ``count`` samples whether it is made elsewhere."""
        return [self._next()] * count if self.stretch.whole else [self._next() for _ in range(count)]

    def _next(self) -> bool:
        self._due += self.ratio
        goes = self._due >= 1 - ROUNDING
        self._due -= goes
        return goes


class EvenedShare:
    """Split that compensates for a side that is slower than usual for a while.

    Workers should also hold their share of the samples under way. If they hold more, by over half a batch,
    they are given less than the share says; if they hold less, they are given more. Nothing of that is paid
    back later. Distant workers have more under way without being slower: half a batch of that is ignored, and
    the ratio has to absorb the rest.

    Args:
        part: Share that is adjusted.
        epoch: Epoch of the batches.
    """

    def __init__(self, part: OffloadShare, epoch: Planning) -> None:
        self._part, self._epoch, self.stretch = part, epoch, part.stretch

    @property
    def ratio(self) -> float:
        """Return the share."""
        return self._part.ratio

    def __call__(self, count: int) -> Sequence[bool]:
        """Return for each of ``count`` samples whether it is made elsewhere."""
        goes = self._part(count)
        here, elsewhere = self._epoch.backlog
        ahead = elsewhere - self._part.ratio * (here + elsewhere)
        excess = max(0.0, abs(ahead) - count / 2)
        if not excess or not 0 < self._part.ratio < 1:
            return goes
        moved = count if self.stretch.whole else round(excess)
        given = min(count, max(0, sum(goes) + (moved if ahead < 0 else -moved)))
        return [True] * given + [False] * (count - given)
