"""What of an input pipeline runs elsewhere, and for how many samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upriver.errors import ConfigError
from upriver.text import printable
from upriver.types import require_finite

CANDIDATES = ("p1", "p2", "p3")
"""FastFlow's ways to offload (Figure 5): what is read here is computed there; samples are read and computed
there one by one; batches are made there whole."""

COLLATE = "collate"
"""The last stage of every input pipeline: from samples to a batch."""

TO = ".."


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """A decision.

    Attributes:
        candidate: Which stages: ``p1``, ``p2`` or ``p3``, or the first and the last by their names, such as
            ``read..decode`` or ``decode..collate``.
        ratio: For what share of the samples, 0 to 1.

    Raises:
        ConfigError: If that is no candidate, or the ratio is none.
    """

    candidate: str
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.candidate, str) or not (self.candidate in CANDIDATES or TO in self.candidate):
            raise ConfigError(
                f"candidate must be one of {', '.join(CANDIDATES)}, or the first and the last stage as in "
                f"'read..decode'; got {printable(repr(self.candidate), 80)}"
            )
        require_finite("ratio", self.ratio, at_most=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Stages that run elsewhere.

    Attributes:
        start: Position from which on; what comes before is done here.
        stop: Position up to which; what comes after is done here.
        whole: Whether batches are collated there, too.
    """

    start: int
    stop: int
    whole: bool = False


def stretch_of(candidate: str, positions: Sequence[int], stages: Sequence[str]) -> Stretch:
    """The stages that a candidate names.

    Args:
        candidate: As in `Offloading`.
        positions: Where a sample can stand, in order.
        stages: What leads from each to the next.

    Raises:
        ConfigError: If the dataset has no such stages.
    """
    if candidate in CANDIDATES:
        if candidate == "p1" and len(stages) == 1:
            raise ConfigError(
                "p1 is for a dataset that is read in one step and computed in another: read(index) and "
                "transform(raw)"
            )
        return Stretch(start=positions[candidate == "p1"], stop=positions[-1], whole=candidate == "p3")
    first, _, last = candidate.partition(TO)
    names = [*stages, COLLATE]
    for name in (first, last):
        if name not in names:
            raise ConfigError(
                f"candidate {printable(candidate, 80)!r}: there is no stage {printable(name, 40)!r}, only "
                f"{', '.join(names)}"
            )
    start, stop = names.index(first), names.index(last) + 1
    if start >= min(stop, len(stages)):
        raise ConfigError(f"candidate {candidate!r}: {first} must come before {last} and not be {COLLATE}")
    return Stretch(start=positions[start], stop=positions[min(stop, len(stages))], whole=stop == len(names))


def name_of_stretch(start: int, stop: int, positions: Sequence[int], stages: Sequence[str]) -> str:
    """How `Offloading` names the stages between two positions, none of which collates."""
    return f"{stages[positions.index(start)]}{TO}{stages[positions.index(stop) - 1]}"
