"""How long a job may measure before its first iteration, and how long it did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from upriver.profile.stage_timing import REPEATS, WARM_UPS

SHARE = 0.03
"""Of the first epochs, as predicted from what is known so far, goes into measuring at most."""

EPOCHS = 10
"""How many epochs those are: fine-tuning runs about as many."""

LEAST_REPEATS = 2
"""Runs that count at each size: with fewer, one that was disturbed is all there is."""


class Stopwatch:
    """Adds up the seconds of some parts; of nested ones each has its own alone.

    Attributes:
        seconds: Part to its seconds so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is of this part."""
        began, before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began - inside


def allowed_s(epoch_s: float) -> float:
    """Seconds that measuring may take in all, for epochs of so many."""
    return SHARE * EPOCHS * epoch_s


def affordable_repeats(allowed: float, *, once_s: float, turn_s: float) -> int | None:
    """How many runs that count fit beside the warm-up: at most as many as are wanted; None if too few do.

    Args:
        allowed: Seconds that may be spent.
        once_s: What is spent whatever the number of runs.
        turn_s: One run of each program on each tier.
    """
    left = allowed - once_s
    if left < (WARM_UPS + LEAST_REPEATS) * turn_s or left <= 0:
        return None
    return REPEATS if left >= (WARM_UPS + REPEATS) * turn_s else int(left / turn_s) - WARM_UPS
