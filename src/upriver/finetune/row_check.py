"""Compute some kept rows anew, in other places of other micro-batches, to compare them before any is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from upriver.engine.clock import Clock
from upriver.features import Row
from upriver.features.kept import CHECKED_ROWS, KeptStretch
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.pipeline import Dataset
from upriver.types import MicroBatch

NOBODY = -1
"""Number in the place of a sample that no dataset has."""

RowsOf = Callable[[Sequence[int], Sequence[torch.Tensor]], dict[int, Row]]
"""Returns the row of each sample, given their ids and their values at the freeze point."""


class RowCheck:
    """Compute rows as they must be.

    Args:
        source: Returns a source of a dataset's samples, given the epoch as which its input stages draw.
        finish: Runs the frozen part on a micro-batch at the model's input.
    """

    def __init__(
        self,
        micro_batch: int,
        *,
        source: Callable[[Dataset, int], LocalSource],
        finish: Callable[[MicroBatch, Dataset], MicroBatch],
        rows_of: RowsOf,
    ) -> None:
        self._micro_batch, self._source, self._finish, self._rows_of = micro_batch, source, finish, rows_of
        self._noted: tuple[KeptStretch, Dataset, MicroBatch] | None = None

    def some(self, groups: Sequence[frozenset[int]], read: Sequence[tuple[int, ...]] = ()) -> list[int]:
        """Return the samples whose kept rows are computed anew before any is used, in whole micro-batches.

        Args:
            groups: Samples whose rows were written at once. One of each is taken at least.
            read: Micro-batches that were read ahead. If they have enough of the samples, those are taken.
        """
        found = frozenset[int]().union(*groups)
        passes = max(1, CHECKED_ROWS // self._micro_batch, -(-len(groups) // self._at_once))
        count = min(len(found), passes * self._at_once)
        there = [sample for ids in read[:passes] for sample in ids[: self._at_once] if sample in found]
        if count and len(there) == count and all(not group.isdisjoint(there) for group in groups):
            return there
        spread = [sorted(group)[:: max(1, len(group) // count)] for group in groups]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*spread))
        return [sample for sample in turns if sample is not None][:count]

    def anew(
        self, dataset: Dataset, ids: Sequence[int], drawn: int, *, position: int | None = None
    ) -> dict[int, Row]:
        """Return rows of samples, computed in other places of other micro-batches than before.

        Args:
            drawn: Epoch as which the input stages draw.
            position: Cut at which the rows stand; None for the freeze point.

        Raises:
            UpriverError: As `LocalSource`.
        """
        rows: dict[int, Row] = {}
        source, at_once = self._source(dataset, drawn), self._at_once
        for at in range(0, len(ids), at_once):
            some = tuple(reversed(ids[at : at + at_once]))
            if position is None:
                batch, _ = source(some)
                rows |= self._moved(batch, dataset)
            else:
                batch = source.begun(some, position, Clock())
                rows |= {sample: (value,) for sample, value in zip(some, batch.tensors, strict=True)}
        return rows

    def note(self, stretch: KeptStretch, dataset: Dataset, batch: MicroBatch) -> None:
        """Note the first micro-batch at the model's input, of which rows will be computed anew."""
        if self._noted is None and stretch.needs_check:
            given = tuple(value.clone() for value in batch.tensors)  # the model may write into them
            self._noted = stretch, dataset, replace(batch, tensors=given)

    def noted(self, stretch: KeptStretch, dataset: Dataset, found: frozenset[int]) -> dict[int, Row]:
        """Return rows of the noted micro-batch, computed in other places; none if it is gone."""
        if self._noted is None or self._noted[0] is not stretch or self._noted[1] is not dataset:
            return {}
        (_, _, batch), self._noted = self._noted, None
        return {sample: row for sample, row in self._moved(batch, dataset).items() if sample in found}

    def rows_of(self, batch: MicroBatch) -> dict[int, Row]:
        """Return the row of each sample of a micro-batch at the freeze point that was not skipped."""
        rows = self._rows_of(batch.ids, batch.tensors)
        return {sample: row for sample, row in rows.items() if sample not in batch.skipped}

    @property
    def _at_once(self) -> int:
        """Samples that are computed anew in a micro-batch: one place is left for a row of zeros."""
        return max(1, self._micro_batch - 1)

    def _moved(self, batch: MicroBatch, dataset: Dataset) -> dict[int, Row]:
        """Return the rows of a micro-batch whose samples stand a place later, after a row of zeros.

        So no row has its old place, or its old neighbours. If its bits depend on either, they differ now.
        """
        if self._micro_batch > 1:
            [given], ids = batch.tensors, batch.ids[: self._at_once]
            moved = torch.zeros_like(given)
            moved[1 : len(ids) + 1] = given[: len(ids)]
            skipped = (NOBODY, *batch.skipped)
            batch = replace(batch, ids=(NOBODY, *ids), tensors=(moved,), skipped=skipped)
        return self.rows_of(self._finish(batch, dataset))
