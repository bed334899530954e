"""Decide when to retry: growing pauses after failures, and a budget over all retries.

A client that repeats all failed requests doubles the load of overloaded servers. So each retry costs a token,
and successes return tokens. Without a token the client computes locally.

Nothing here reads a clock or sleeps: ``now`` is an argument, by any monotonic clock.
"""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass, field

from upriver.errors import UpriverError


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Exponential backoff: pause up to ``min(cap_s, base_s * 2**(n - 1))`` after ``n`` failures in a row.

    Pauses are random, so that clients that failed together do not retry together. Full jitter causes the
    least work (Brooker: Exponential Backoff And Jitter, AWS Architecture Blog, 2015).

    Attributes:
        base_s: Longest first pause. 0.1 s: a refused connection costs next to nothing.
        cap_s: Longest pause. 2 s: a restarted server should be used again well within 10 s.
        jitter: Share of a pause that is random: 1 for full jitter, 0 where failures are not simultaneous.
        rng: Source of the random share.
    """

    base_s: float = 0.1
    cap_s: float = 2.0
    jitter: float = 1.0
    rng: random.Random = field(default_factory=random.Random, compare=False, repr=False)

    def pause_s(self, failures: int) -> float:
        """Draw the seconds to pause after that many failures in a row; 0 without a failure."""
        if failures < 1:
            return 0.0
        # Bounded exponent: 2**1100 is no float, and 30 doublings reach every cap.
        longest_s = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 30))
        return self.rng.uniform((1 - self.jitter) * longest_s, longest_s)

    def spread_s(self, told_s: float) -> float:
        """Draw one to two times the seconds that a server asks for, so that rejected clients spread out."""
        return self.rng.uniform(told_s, 2 * told_s)


class CircuitBreaker:
    """Say how long not to call a failing server: for an interval that grows from failure to failure.

    A success makes the next pause short again, and does not end a running one. Not thread-safe.

    Args:
        backoff: Length of the pauses.

    Attributes:
        failures: Failures in a row.
        pause_s: Length of the last pause.
        until_s: End of the last pause.
        error: The last failure, as long as it matters to the caller.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.failures = 0
        self.pause_s = 0.0
        self.until_s = -math.inf
        self.error: UpriverError | None = None
        self._backoff = backoff

    def left_s(self, now: float) -> float:
        """Return the seconds until calls are allowed again."""
        return max(0.0, self.until_s - now)

    def fail(self, now: float, error: UpriverError | None = None, *, least_s: float = 0.0) -> None:
        """Begin a pause after a failure. A running pause is never shortened.

        Args:
            now: Present time.
            error: The failure.
            least_s: Shortest pause, whatever the backoff.
        """
        self.failures += 1
        self.error = error
        self.pause_s = max(least_s, self._backoff.pause_s(self.failures))
        self.until_s = max(self.until_s, now + self.pause_s)

    def succeed(self, now: float) -> None:
        """Make the next pause a short one again. A running pause goes on."""
        self.failures = 0
        if now >= self.until_s:
            self.error = None


class RetryBudget:
    """Token bucket over retries: each costs one token, each success returns part of one. Thread-safe.

    Args:
        capacity: Tokens at the start and at most. 10: a server that dies with a few requests in flight.
        per_success: Tokens that a success returns. 0.1: in the long run at most one request in ten is a
            retry.
    """

    def __init__(self, capacity: float = 10.0, *, per_success: float = 0.1) -> None:
        self._capacity = capacity
        self._per_success = per_success
        self._tokens = capacity
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        """Return part of a token after a success."""
        with self._lock:
            self._tokens = min(self._capacity, self._tokens + self._per_success)

    def withdraw(self) -> bool:
        """Take a token for one retry. Return False if there is none."""
        with self._lock:
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True
