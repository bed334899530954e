"""Name the stages of an input pipeline that run elsewhere, and the share of samples they run for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from upriver.errors import ConfigError
from upriver.text import printable
from upriver.types import require_finite

CANDIDATES = ("p1", "p2", "p3")
"""FastFlow's candidates (Figure 5).

``p1`` computes on workers what is read here. ``p2`` reads and computes samples on workers, one by one. ``p3``
makes whole batches on workers.
"""

COLLATE = "collate"
"""Last stage of every input pipeline, which makes a batch of samples."""

TO = ".."


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """Choice of the stages that run elsewhere, and for which share of samples.

    Attributes:
        candidate: Stages: ``p1``, ``p2`` or ``p3``, or the names of the first and the last, such as
            ``read..decode`` or ``decode..collate``.
        ratio: Share of the samples, 0 to 1.

    Raises:
        ConfigError: If the candidate is unknown, or the ratio is not in 0..1.
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
class OffloadStretch:
    """Range of stages that run elsewhere.

    Attributes:
        start: Position at which it starts; earlier stages run here.
        stop: Position at which it ends; later stages run here.
        whole: Whether batches are collated there, too.
    """

    start: int
    stop: int
    whole: bool = False

    def of_kept(self, position: int, first: int) -> OffloadStretch | None:
        """Return the range that is left for samples kept at a position; None if nothing is.

        Args:
            first: First position of all. A range that starts there is not changed, as workers read
                themselves.
        """
        if self.start == first or position <= self.start:
            return self
        return replace(self, start=position) if position < self.stop else None


def stretch_of(candidate: str, positions: Sequence[int], stages: Sequence[str]) -> OffloadStretch:
    """Return the stages that a candidate names.

    Args:
        candidate: As in `Offloading`.
        positions: Positions that a sample can have, in order.
        stages: Stage from each position to the next.

    Raises:
        ConfigError: If the dataset has no such stages.
    """
    if candidate in CANDIDATES:
        if candidate == "p1" and len(stages) == 1:
            raise ConfigError(
                "p1 is for a dataset that is read in one step and computed in another: read(index) and "
                "transform(raw)"
            )
        return OffloadStretch(start=positions[candidate == "p1"], stop=positions[-1], whole=candidate == "p3")
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
    return OffloadStretch(
        start=positions[start], stop=positions[min(stop, len(stages))], whole=stop == len(names)
    )


def name_of_stretch(start: int, stop: int, positions: Sequence[int], stages: Sequence[str]) -> str:
    """Return the name in `Offloading` of the stages between two positions, none of which collates."""
    return f"{stages[positions.index(start)]}{TO}{stages[positions.index(stop) - 1]}"
