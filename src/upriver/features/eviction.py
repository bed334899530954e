"""Decide what gives way within a budget: the least useful first, by the seconds that a byte saves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")

CLEARLY = 1.25
"""Factor by which new rows must be more useful than those that give way. Seconds of a stage differ by a fifth
from one measurement to the next, and rows of one job must not push each other out in turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPart(Generic[Name]):
    """Rows that are kept, and can only be removed together.

    Attributes:
        name: Whatever tells the caller which rows these are.
        saved_s_per_byte: Seconds that a byte of them saves each time it is read.
        last_used: Time of the last use; only its order counts.
        unused: True if nobody reads them any more. They give way to anything.
    """

    name: Name
    num_bytes: int
    saved_s_per_byte: float
    last_used: float
    unused: bool = False


def gives_way(old_s_per_byte: float, new_s_per_byte: float) -> bool:
    """Return whether kept rows are so much less useful than new ones that they give way."""
    return new_s_per_byte > CLEARLY * old_s_per_byte


def to_remove(
    parts: Iterable[KeptPart[Name]], num_bytes: int, saved_s_per_byte: float
) -> list[KeptPart[Name]]:
    """Choose what to remove for new rows, in order: unused parts first, then by use, then by age.

    Equals stay. Jobs read their rows in rounds; if the oldest gave way to each new row, none would be there
    when its turn comes.

    Args:
        num_bytes: Bytes to free.
        saved_s_per_byte: Use of the new rows; infinite if the parts must shrink anyway.

    Returns:
        Parts of at least `num_bytes` together, or all that may go.
    """
    going = [part for part in parts if part.unused or gives_way(part.saved_s_per_byte, saved_s_per_byte)]
    going.sort(key=lambda part: (not part.unused, part.saved_s_per_byte, part.last_used))
    chosen, freed = list[KeptPart[Name]](), 0
    for part in going:
        if freed >= num_bytes:
            break
        chosen.append(part)
        freed += part.num_bytes
    return chosen
