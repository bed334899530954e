"""Record where each micro-batch was computed, and have it computed there again.

With ``exact="numeric"`` the low bits of a run depend on which server made which micro-batch. A job keeps that
as data, :class:`Placed`. A later job that gets this data sends the same work to the same servers.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from upriver.control.delivery_table import Pin, Way
from upriver.errors import ConfigError
from upriver.finetune.prefetch.fetch_threads import LOCAL
from upriver.text import printable

log = logging.getLogger("upriver")

_NOWHERE = -1
"""Marks a micro-batch that did not arrive: it lies before the step at which a job was resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """One micro-batch's route: its source and cut.

    The fields are plain numbers and text: ``[dataclasses.asdict(placed) for placed in job.placed]`` can be
    written as JSON.

    Attributes:
        epoch: Epoch of the job, from 0.
        index: Index of the micro-batch in its epoch.
        source: Server URL, or ``local``.
        cut: Position up to which the source ran it; 0 for ``local``, which reads it in this process.
    """

    epoch: int
    index: int
    source: str
    cut: int


class PlacementLog:
    """Record where a job's micro-batches were computed, in 4 bytes each; the last time counts."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}
        self._epochs: dict[int, array[int]] = {}
        self._rows: dict[int, int] = {}

    def note(self, *, epoch: int, index: int, source: str, cut: int) -> None:
        """Record a micro-batch's source, and the cut up to which the source ran it."""
        places = self._epochs.setdefault(epoch, array("i"))
        places.extend([_NOWHERE] * (index + 1 - len(places)))
        places[index] = self._known.setdefault((source, cut), len(self._known))

    def note_rows(self, ids: Sequence[int], *, source: str, cut: int) -> None:
        """Record where the rows of samples were computed, for epochs in which they are kept."""
        place = self._known.setdefault((source, cut), len(self._known))
        self._rows.update(dict.fromkeys(ids, place))

    def note_kept(self, micro_batches: Sequence[Sequence[int]], *, epoch: int) -> None:
        """Record the micro-batches of an epoch whose rows were all computed at one place."""
        known = list(self._known)
        for index, ids in enumerate(micro_batches):
            places = {self._rows.get(sample, _NOWHERE) for sample in ids}
            if len(places) == 1 and (place := places.pop()) != _NOWHERE:
                source, cut = known[place]
                self.note(epoch=epoch, index=index, source=source, cut=cut)

    def all(self) -> tuple[Placed, ...]:
        """Return every micro-batch once, in the order of epochs and indices."""
        known = list(self._known)
        return tuple(
            Placed(epoch=epoch, index=index, source=known[place][0], cut=known[place][1])
            for epoch in sorted(self._epochs)
            for index, place in enumerate(self._epochs[epoch])
            if place != _NOWHERE
        )


class Routes:
    """The routes of an earlier run, to replay in a new job; empty if there are none."""

    def __init__(self, placed: Sequence[Placed | Mapping[str, Any]] | None = None) -> None:
        """Check the caller's routes.

        Raises:
            ConfigError: If the value is no list of routes, or names a micro-batch twice; says which entry.
        """
        if isinstance(placed, str | bytes | Mapping) or not isinstance(placed, Sequence | None):
            raise ConfigError(f"replay must be the list that job.placed gives, got {_shown(placed)}")
        self._placed: dict[tuple[int, int], Placed] = {}
        for number, given in enumerate(placed or ()):
            entry = _checked(number, given)
            if (entry.epoch, entry.index) in self._placed:
                raise ConfigError(
                    f"replay[{number}] names micro-batch {entry.index} of epoch {entry.epoch} once more"
                )
            self._placed[entry.epoch, entry.index] = entry

    def __bool__(self) -> bool:
        return bool(self._placed)

    @property
    def sources(self) -> tuple[str, ...]:
        """Servers that take part, in the order of their first micro-batch."""
        return tuple(dict.fromkeys(p.source for p in self._placed.values() if p.source != LOCAL))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Cuts at which servers were asked, most frequent first."""
        cuts = [p.cut for p in self._placed.values() if p.source != LOCAL]
        return tuple(sorted(set(cuts), key=lambda cut: (-cuts.count(cut), cut)))

    def on(self, urls: Sequence[str]) -> Routes:
        """Return the same routes on these servers; a single server may have another address now.

        Raises:
            ConfigError: If a server that took part is not among them.
        """
        missing = [source for source in self.sources if source not in urls]
        if not missing:
            return self
        if len(self.sources) != 1 or len(urls) != 1:
            raise ConfigError(
                f"the run to replay used {', '.join(missing)}; "
                f"this job's servers are {', '.join(urls) or 'none'}"
            )
        log.info("replaying on %s what came from %s", urls[0], missing[0])
        moved = Routes()
        moved._placed = {
            key: p if p.source == LOCAL else replace(p, source=urls[0]) for key, p in self._placed.items()
        }
        return moved

    def pins(self, epoch: int) -> dict[int, Pin]:
        """Return where each micro-batch of an epoch must come from, by index."""
        return {
            p.index: Pin(way=Way.LOCAL if p.source == LOCAL else Way.REMOTE, source=p.source, cut=p.cut)
            for p in self._placed.values()
            if p.epoch == epoch
        }


def _checked(number: int, given: object) -> Placed:
    if isinstance(given, Placed):
        return given
    wanted = {"epoch": int, "index": int, "source": str, "cut": int}
    if (
        not isinstance(given, Mapping)
        or set(given) != {field.name for field in fields(Placed)}
        or any(type(given[name]) is not kind for name, kind in wanted.items())
        or min(given["epoch"], given["index"]) < 0
    ):
        raise ConfigError(
            f"replay[{number}] must have whole numbers epoch, index and cut and a text source, "
            f"got {_shown(given)}"
        )
    return Placed(**given)


def _shown(value: object) -> str:
    return printable(repr(value), 100)
