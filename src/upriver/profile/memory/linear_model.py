"""Describe a run's memory by lines in the number of samples, from two runs that differ only in that number.

While an operator is called, ``fixed + growing x samples`` bytes are held. Two runs of the same calls give
each call's line. Whatever the number of samples, no call holds more than the largest ``fixed`` and the
largest ``growing`` of all calls together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upriver.profile.memory.ledger import LedgerCall


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes as a line in the number of samples."""

    fixed: float
    growing: float

    @classmethod
    def through(cls, once: float, twice: float, samples: int) -> MemoryLine:
        """Return the line through the bytes of ``samples`` and of twice as many.

        Memory that grows faster than the samples (each compared with each other) counts as proportional: a
        bound below that number.
        """
        fixed = min(once, max(0.0, 2 * once - twice))
        return cls(fixed, (once - fixed) / samples)

    def above(self, other: MemoryLine) -> MemoryLine:
        """Return the sum of two lines."""
        return MemoryLine(self.fixed + other.fixed, self.growing + other.growing)

    def at(self, samples: int) -> float:
        """Return the bytes for a number of samples."""
        return self.fixed + self.growing * samples


def same_calls(once: Sequence[LedgerCall], twice: Sequence[LedgerCall]) -> bool:
    """Return whether two runs called the same operators in the same order."""
    return [moment.name for moment in once] == [moment.name for moment in twice]


def high_lines(once: Sequence[LedgerCall], twice: Sequence[LedgerCall], samples: int) -> list[MemoryLine]:
    """Return each call's line with its workspace, for both kernels where few samples change it."""
    lines = []
    for first, second in zip(once, twice, strict=True):
        live = MemoryLine.through(first.live, second.live, samples)
        seen = MemoryLine.through(first.taken.nbytes, second.taken.nbytes, samples)
        fixed = max(seen.fixed, first.taken.fixed, second.taken.few)
        lines.append(live.above(MemoryLine(fixed, max(seen.growing, first.taken.growing / samples))))
    return lines
