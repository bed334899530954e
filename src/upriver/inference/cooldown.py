"""Compute the pauses of a failed server or network."""

from __future__ import annotations

import math
import time

from upriver.errors import UpriverError
from upriver.retry import Backoff


class Cooldown:
    """Growing pauses from failure to failure, until a success. Not thread-safe.

    Args:
        backoff: Length of the pauses.

    Attributes:
        error: The last failure; None after a success.
        failures: Failures in a row.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.error: UpriverError | None = None
        self.failures = 0
        self._backoff = backoff
        self._until_s = -math.inf

    @property
    def left_s(self) -> float:
        """Seconds until the pause ends; 0 where there is none."""
        return max(0.0, self._until_s - time.monotonic())

    def begin(self, error: UpriverError, *, least_s: float = 0.0) -> None:
        """Begin a pause after a failure.

        Args:
            error: The failure.
            least_s: Shortest length of the pause.
        """
        self.failures += 1
        self._until_s = time.monotonic() + max(least_s, self._backoff.wait_s(self.failures))
        self.error = error

    def answered(self) -> None:
        """Note a success: the next pause is short again."""
        self.failures = 0
        if not self.left_s:
            self.error = None
