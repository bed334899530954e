"""Decide on retries: full jitter between attempts, and a budget over all of them.

A client that repeats all failed requests doubles the load of overloaded servers. So each retry costs a token,
and successes return tokens. Without a token the client computes locally.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from upriver.errors import ConfigError
from upriver.types import require_finite


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """Exponential backoff with full jitter: the ``n``-th wait is uniform in ``[0, min(cap, base * 2**n)]``.

    Attributes:
        base_s: Upper bound of the first wait. 0.1 s: a refused connection costs next to nothing.
        cap_s: Upper bound of any wait. 2 s: a restarted server should be used again well within 10 s.
    """

    base_s: float = 0.1
    cap_s: float = 2.0
    rng: random.Random = field(default_factory=random.Random, compare=False, repr=False)

    def __post_init__(self) -> None:
        require_finite("base_s", self.base_s, positive=True)
        require_finite("cap_s", self.cap_s, at_least=self.base_s)

    def wait_s(self, failures: int) -> float:
        """Return the seconds to wait after that many consecutive failures."""
        # Bounded exponent: 2**1100 is no float, and 30 doublings reach every cap.
        return self.rng.uniform(0.0, min(self.cap_s, self.base_s * 2.0 ** min(failures, 30)))


class RetryBudget:
    """Token bucket over retries: each costs one token, each success returns part of one. Thread-safe.

    Args:
        capacity: Tokens at the start and at most. 10: a server that dies with a few requests in flight.
        per_success: Tokens that a success returns. 0.1: in the long run at most one request in ten is a
            retry.
    """

    def __init__(self, capacity: float = 10.0, *, per_success: float = 0.1) -> None:
        if not (capacity >= 0 and per_success >= 0):
            raise ConfigError(f"capacity and per_success must be >= 0, got {capacity} and {per_success}")
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
