"""Counters that hold a share at every prefix, not only in the end.

FastFlow keeps counters of what it offloaded and what it did not (PVLDB 16(5), section 5.3). With more than
two places counters are apportionment, seat by seat: the quota method (Balinski and Young, "The Quota Method
of Apportionment", American Mathematical Monthly 82(7), 1975) keeps each within one of its share at every
prefix.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from upriver.dataloader.plan import Stretch
from upriver.errors import ConfigError
from upriver.pipeline.mapstyle import DONE, START
from upriver.types import require_finite

Place = TypeVar("Place", bound=Hashable)


class Shares(Generic[Place]):
    """Deals one thing after another to places, each of which is due a share.

    After any number of things every place has less than one above or below its share of them.

    Args:
        shares: Of every place, in any unit; what counts is one over their sum. The first of equals wins.

    Raises:
        ConfigError: If one is negative or not finite, or all are 0.
    """

    def __init__(self, shares: Mapping[Place, float]) -> None:
        for place, share in shares.items():
            require_finite(f"share of {place}", share)
        total = sum(shares.values())
        if not total > 0:
            raise ConfigError(f"one place at least must have a share, got {dict(shares)}")
        self.shares = {place: share / total for place, share in shares.items()}
        self.counts = dict.fromkeys(shares, 0)
        self._dealt = 0

    def next(self) -> Place:
        """Who gets the next one: of those that may have one more, whoever must have it soonest."""
        number = self._dealt = self._dealt + 1
        may = [place for place, share in self.shares.items() if self.counts[place] < share * number]
        place = min(may or self.shares, key=self._due)
        self.counts[place] += 1
        return place

    def _due(self, place: Place) -> float:
        """After how many things in all a place has a right to its next one; then it is late."""
        share = self.shares[place]
        return (self.counts[place] + 1) / share if share else float("inf")


class AllHere:
    """No sample is made elsewhere."""

    stretch = Stretch(start=START, stop=DONE, whole=True)

    def __call__(self, count: int) -> list[bool]:
        """For each of ``count`` samples that it is not."""
        return [False] * count


class Part:
    """A share of the samples is made elsewhere.

    Args:
        ratio: The share, 0 to 1.
        stretch: Their stages that are. Where it is whole, whole batches are made here or elsewhere, and
            samples one by one otherwise.
    """

    def __init__(self, ratio: float, stretch: Stretch) -> None:
        require_finite("ratio", ratio, at_most=1)
        self.ratio, self.stretch = ratio, stretch
        self._shares = Shares({True: ratio, False: 1 - ratio})

    def __call__(self, count: int) -> list[bool]:
        """For each of ``count`` samples whether it is."""
        return (
            [self._shares.next()] * count
            if self.stretch.whole
            else [self._shares.next() for _ in range(count)]
        )
