"""What of an input pipeline runs elsewhere, and for how many samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from upriver.errors import ConfigError
from upriver.types import require_finite

Candidate = Literal["p1", "p2", "p3"]
"""FastFlow's ways to offload (Figure 5): what is read here is computed there; samples are read and computed
there one by one; batches are made there whole."""

CANDIDATES: tuple[Candidate, ...] = ("p1", "p2", "p3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """A decision.

    Attributes:
        candidate: Which stages.
        ratio: For what share of the samples, 0 to 1.

    Raises:
        ConfigError: If there is no such candidate, or the ratio is none.
    """

    candidate: Candidate
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.candidate not in CANDIDATES:
            raise ConfigError(f"candidate must be one of {', '.join(CANDIDATES)}, got {self.candidate!r}")
        require_finite("ratio", self.ratio, at_most=1)
