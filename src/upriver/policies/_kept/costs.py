"""Cost the sources of a sample in an epoch: computed over a cut, or read as a kept row.

The phases of a kept row, added to those of `upriver.cost`:

=======  ================  =====================================================================
tier     resource          seconds per sample
=======  ================  =====================================================================
memory   compute tier      read rate x row
disk     disk              read rate x row
store    storage tier      (read rate + ``encode``) x row
store    link              row / bandwidth
store    compute tier      ``decode`` x row
all      compute tier      ``move`` x what enters the model, stages after the position, the tail
=======  ================  =====================================================================

Writing a row keeps the same resource busy as reading it, by the write rate, and nothing else. It waits for
nothing and nothing waits for it, so fill and drain are those of the sample's source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from upriver.cost import Array, CostModel, Phases
from upriver.policies._kept.decision import KeepingTiers, KeepTier, RowPlace

OPEN = -1
"""Half of a life that may be any source."""

Life: TypeAlias = tuple[int, int]
"""Sources of a sample in the first and in the later epochs; either may be `OPEN`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SourceCosts:
    """Costs of an epoch in which all samples have one source.

    Sources are numbered: first the candidate cuts, then the places of rows.

    Attributes:
        positions: Position at which a sample arrives on the compute tier, by source.
        busy: Seconds for which each resource (row) is busy, by source.
        around_s: Seconds before the busiest resource begins and after it ends, by source.
        storage_s: Seconds for which the storage tier is busy, by source.
        write_busy: Seconds for which each resource is busy longer if all rows are written, by place.
        sample_bytes: Bytes of a sample's rows in all views, by place.
        there: Share of the samples whose rows are there, by place.
        budgets: Bytes that the tier holds, by place.
    """

    num_samples: int
    cuts: range
    places: tuple[RowPlace, ...]
    positions: npt.NDArray[np.intp]
    busy: Array
    around_s: Array
    storage_s: Array
    write_busy: Array
    sample_bytes: Array
    there: Array
    budgets: Array

    def place(self, source: int) -> RowPlace | None:
        """Return the place that a source reads; None for a cut and for no source."""
        return self.places[source - len(self.cuts)] if source >= len(self.cuts) else None

    def cut(self, source: int) -> int | None:
        """Return the cut over which a source computes; None if it reads rows."""
        return self.cuts[source] if source < len(self.cuts) else None

    def writes(self, life: Life) -> bool:
        """Return whether the first epochs of a life write rows."""
        return life[0] != OPEN and life[1] >= len(self.cuts) and life[0] != life[1]


def source_costs(model: CostModel, keeping: KeepingTiers) -> SourceCosts:
    """Return the costs of every candidate cut and every place from which the compute tier can go on.

    Raises:
        ConfigError: If a position lies outside the chain's candidate cuts.
    """
    places = tuple(
        (position, tier)
        for tier in KeepTier
        if tier in keeping.tiers
        for position in sorted(keeping.positions)
    )
    for position in keeping.positions:
        model.index(position)
    rooms = [keeping.tiers[tier] for _, tier in places]
    rows = np.array([_row_bytes(model, keeping, position) for position, _ in places])
    reading = _read_phases(model, places, np.array([room.read_s_per_byte for room in rooms]) * rows, rows)
    in_store = np.array([tier is KeepTier.STORE for _, tier in places], dtype=bool)
    read = model.epochs_of(reading, np.where(in_store, rows, 0.0))
    writing = _phases(places, np.array([room.write_s_per_byte for room in rooms]) * rows)
    nothing = _phases(places, np.zeros(len(places)))
    no_bytes = np.zeros(len(places))
    write_busy = model.epochs_of(writing, no_bytes).busy - model.epochs_of(nothing, no_bytes).busy
    fresh = model.epochs
    views = np.array([keeping.positions[position] for position, _ in places])
    return SourceCosts(
        num_samples=model.workload.num_samples,
        cuts=model.cuts,
        places=places,
        positions=np.array([*model.cuts, *(position for position, _ in places)], dtype=np.intp),
        busy=np.hstack((fresh.busy, read.busy)),
        around_s=np.append(fresh.around_s, read.around_s),
        storage_s=np.append(fresh.storage_s, read.storage_s),
        write_busy=write_busy.clip(0.0),
        sample_bytes=views * rows,
        there=np.array([keeping.there.get(place, 0.0) for place in places]),
        budgets=np.array([room.budget_bytes for room in rooms]),
    )


def _row_bytes(model: CostModel, keeping: KeepingTiers, position: int) -> float:
    size = keeping.row_bytes.get(position)
    return model.profile.cut_bytes(position) if size is None else size


def _phases(places: tuple[RowPlace, ...], spent: Array) -> Phases:
    """Return phases in which each tier's own resource is busy for the seconds of ``spent``."""
    tiers, none = [tier for _, tier in places], np.zeros(len(places))

    def of(kind: KeepTier) -> Array:
        return np.where([tier is kind for tier in tiers], spent, 0.0) if tiers else none

    return Phases(
        storage_parallel=of(KeepTier.STORE),
        storage_forward=none,
        model_load=none,
        network=none,
        compute_receive=of(KeepTier.MEMORY),
        compute_forward=none,
        compute_cpu=none,
        disk=of(KeepTier.DISK),
        round_trip=none,
    )


def _read_phases(model: CostModel, places: tuple[RowPlace, ...], spent: Array, rows: Array) -> Phases:
    """Return the phases of reading rows of ``rows`` bytes in ``spent`` seconds, and of the chain after."""
    positions = np.array([position for position, _ in places], dtype=np.intp)
    at, link = positions - model.cuts.start, model.cluster.link
    sent = np.where([tier is KeepTier.STORE for _, tier in places], rows, 0.0) if places else rows
    storage, compute = model.cluster.storage.seconds_per_byte, model.cluster.compute.seconds_per_byte
    into_model = np.where(positions > 0, rows, model.profile.input.tensor_bytes)
    read, chain = _phases(places, spent), model.all_phases
    return replace(
        read,
        storage_parallel=read.storage_parallel + storage.get("encode", 0.0) * sent,
        network=sent / link.bandwidth_bytes_per_s,
        round_trip=np.array([link.rtt_s if tier is KeepTier.STORE else 0.0 for _, tier in places]),
        compute_receive=read.compute_receive
        + compute.get("decode", 0.0) * sent
        + compute.get("move", 0.0) * into_model,
        compute_forward=chain.compute_forward[at],
        compute_cpu=chain.compute_cpu[at],
    )
