"""Predict the worker seconds of work from those of earlier work."""

from __future__ import annotations

from collections import OrderedDict

FIRST_GUESS_S = 0.1
"""Seconds of compute for unknown work: a micro-batch of a small network."""

MAX_COSTS = 1024
"""Kinds of work whose seconds are remembered."""

SMOOTH = 0.3
"""Weight of the newest value in the moving mean of a kind's seconds."""


class ServiceCosts:
    """Track recent seconds of compute by kind of work."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, float] = OrderedDict()

    def of(self, work: object) -> float:
        """Return the expected seconds; for unknown work, the mean over the known kinds."""
        if work in self._known:
            return self._known[work]
        return sum(self._known.values()) / len(self._known) if self._known else FIRST_GUESS_S

    def saw(self, work: object, seconds: float) -> None:
        """Record the seconds of some work."""
        before = self._known.get(work, seconds)
        self._known[work] = before + SMOOTH * (seconds - before)
        self._known.move_to_end(work)
        if len(self._known) > MAX_COSTS:
            self._known.popitem(last=False)
