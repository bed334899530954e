"""Keep a share at every prefix of the samples: FastFlow's counters (PVLDB 16(5), section 5.3).

`upriver.control.share_controller` decides the share, or the user does. The counters continue when the share
changes, so that a small share is not rounded away.
"""

from __future__ import annotations

from typing import NamedTuple

from upriver.dataloader.offload_stretch import OffloadStretch
from upriver.types import DONE, START, require_finite

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


class OffloadShare:
    """Split that makes a share of the samples elsewhere.

    After any number of samples, or of batches where batches are made whole, the count is less than one from
    the share. If the share has changed, it is less than one from the sum of each part's share.

    An evened split also compensates for a side that is slower than usual for a while: workers should hold
    their share of the samples under way, too. If they hold more, by over half a batch, they are given less
    than the share says; if they hold less, they are given more. Nothing of that is paid back later. Distant
    workers have more under way without being slower: half a batch of that is ignored, and the ratio has to
    absorb the rest.

    Args:
        ratio: Share, 0 to 1.
        stretch: Stages that run elsewhere. If it is whole, each batch goes to one side as a whole; otherwise
            each sample does.

    Raises:
        ConfigError: If the ratio is not in 0..1.
    """

    def __init__(self, ratio: float, stretch: OffloadStretch, *, even: bool = False) -> None:
        self.stretch, self.even = stretch, even
        self._due = 0.0
        self.turn(ratio)

    @classmethod
    def none(cls) -> OffloadShare:
        """Return a split that makes no sample elsewhere."""
        return cls(0.0, OffloadStretch(start=START, stop=DONE, whole=True))

    def turn(self, ratio: float) -> None:
        """Set the share from now on."""
        require_finite("ratio", ratio, at_most=1)
        self.ratio = ratio

    def split(self, count: int, backlog: Backlog) -> list[bool]:
        """Return for each of the next ``count`` samples whether it is made elsewhere."""
        whole = self.stretch.whole
        goes = [self._next()] * count if whole else [self._next() for _ in range(count)]
        if not self.even or not 0 < self.ratio < 1:
            return goes
        ahead = backlog.elsewhere - self.ratio * sum(backlog)
        excess = abs(ahead) - count / 2
        if excess <= 0:
            return goes
        moved = count if whole else round(excess)
        given = min(count, max(0, sum(goes) + (moved if ahead < 0 else -moved)))
        return [True] * given + [False] * (count - given)

    def _next(self) -> bool:
        self._due += self.ratio
        goes = self._due >= 1 - ROUNDING
        self._due -= goes
        return goes
