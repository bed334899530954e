"""Limit and count the time that a job spends on measuring before its first iteration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from upriver.profile.stage_timing import REPEATS, WARM_UPS

SHARE = 0.03
"""Largest share of the first epochs' predicted time that goes into measuring."""

EPOCHS = 10
"""Number of epochs in the budget; a typical fine-tuning run has about as many."""

LEAST_REPEATS = 2
"""Fewest counted runs at each size: with only one, a disturbed run would be the only value."""


class Stopwatch:
    """Add up the seconds of named parts; a nested part's seconds count for that part alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block's seconds for this part."""
        began, before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began - inside


def allowed_s(epoch_s: float) -> float:
    """Return the seconds that measuring may take in total, given the seconds of an epoch."""
    return SHARE * EPOCHS * epoch_s


def affordable_repeats(allowed: float, *, once_s: float, turn_s: float) -> int | None:
    """Return how many counted runs fit after the warm-up, at most `REPEATS`; None if too few do.

    Args:
        allowed: Seconds that may be spent.
        once_s: Seconds spent whatever the number of runs.
        turn_s: Seconds of one run of each program on each tier.
    """
    left = allowed - once_s
    if left < (WARM_UPS + LEAST_REPEATS) * turn_s or left <= 0:
        return None
    return REPEATS if left >= (WARM_UPS + REPEATS) * turn_s else int(left / turn_s) - WARM_UPS
