"""For how long what has failed is left alone."""

from __future__ import annotations

import math
import time

from upriver.errors import UpriverError
from upriver.retry import Backoff


class Rest:
    """Pauses that grow from failure to failure, until something has gone well again.

    Not thread-safe.

    Args:
        backoff: How long they are.

    Attributes:
        error: What is held against it; None where nothing is.
        failures: In a row.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.error: UpriverError | None = None
        self.failures = 0
        self._backoff = backoff
        self._until_s = -math.inf

    @property
    def left_s(self) -> float:
        """Until the pause is over; 0 where there is none."""
        return max(0.0, self._until_s - time.monotonic())

    def begin(self, error: UpriverError, *, least_s: float = 0.0) -> None:
        """It has failed, once more.

        Args:
            error: By this.
            least_s: The pause is that long at least.
        """
        self.failures += 1
        self._until_s = time.monotonic() + max(least_s, self._backoff.wait_s(self.failures))
        self.error = error

    def answered(self) -> None:
        """It has done what it was asked for: the next pause is a short one."""
        self.failures = 0
        if not self.left_s:
            self.error = None
