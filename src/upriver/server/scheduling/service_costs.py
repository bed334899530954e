"""What work takes of a worker's time, from what it took."""

from __future__ import annotations

from collections import OrderedDict

FIRST_GUESS_S = 0.1
"""Of compute, for work that was never done here: a micro-batch of a small network."""

MAX_COSTS = 1024
"""Kinds of work whose seconds are remembered."""

SMOOTH = 0.3
"""Weight of the newest in the mean of what work of a kind takes."""


class ServiceCosts:
    """Seconds of compute by kind of work, as they were of late."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, float] = OrderedDict()

    def of(self, work: object) -> float:
        """What it will take: of unknown work, what a kind takes in the mean."""
        if work in self._known:
            return self._known[work]
        return sum(self._known.values()) / len(self._known) if self._known else FIRST_GUESS_S

    def saw(self, work: object, seconds: float) -> None:
        """It took so long."""
        before = self._known.get(work, seconds)
        self._known[work] = before + SMOOTH * (seconds - before)
        self._known.move_to_end(work)
        if len(self._known) > MAX_COSTS:
            self._known.popitem(last=False)
