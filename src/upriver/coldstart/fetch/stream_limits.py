"""Bound a stream's use of link and memory."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.errors import ConfigError
from upriver.types import Limits

MIB = 1 << 20

LEAST_BYTES = 64
"""Least bytes of a request: tensors in a published file are that far apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLimits:
    """Bounds on a stream's use of link and memory.

    Attributes:
        request_bytes: Most bytes of one request. Stores serve 8 to 16 MB well. Smaller requests are many;
            with larger ones a wrong byte or a cancel is noticed late.
        concurrency: Most requests in flight.
        in_flight_bytes: Most bytes that are requested and not yet written.
        bandwidth_bytes_per_s: Bandwidth cap; infinite for all that the link gives.
        timeout_s: Longest time for which a request may bring no byte.
    """

    request_bytes: int = 16 * MIB
    concurrency: int = 8
    in_flight_bytes: int = 128 * MIB
    bandwidth_bytes_per_s: float = float("inf")
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is no number or out of range."""
        for name, limits in _LIMITS.items():
            limits.check(name, getattr(self, name))
        for name in ("request_bytes", "concurrency", "in_flight_bytes"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if self.in_flight_bytes < self.request_bytes:
            raise ConfigError(
                f"in_flight_bytes must be at least request_bytes ({self.request_bytes}), got "
                f"{self.in_flight_bytes}"
            )


_LIMITS = {
    "request_bytes": Limits(least=LEAST_BYTES, most=1024 * MIB),
    "concurrency": Limits(least=1, most=1024),
    "in_flight_bytes": Limits(least=LEAST_BYTES, most=10**15),
    "bandwidth_bytes_per_s": Limits(most=10**15, positive=True, or_infinite=True),
    "timeout_s": Limits(most=10**6, positive=True),
}

DEFAULT_LIMITS = StreamLimits()
"""Limits of a stream unless the caller gives others."""
