"""Regroup micro-batches into training steps: the same samples in the same order, for any two sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from upriver.finetune.prefetch.sampler import EpochOrder, EpochWork
from upriver.types import MicroBatch

Values = tuple[torch.Tensor, ...]
"""All values that cross the freeze point, for some samples."""


class CrossingForm(Protocol):
    """The sample dimensions of the values that cross the freeze point; a tail's ``values`` implements it."""

    def select(self, values: Sequence[torch.Tensor], rows: Sequence[int]) -> Values:
        """Return the values of some of the samples."""

    def concatenate(self, parts: Sequence[Sequence[torch.Tensor]]) -> Values:
        """Return the values of several groups of samples, one group after the other."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Finished:
    """A micro-batch at the freeze point.

    Attributes:
        positions: Position of each sample in the epoch, ascending.
        skipped: Ids of skipped samples, whose rows are padding.
        values: Values of a full micro-batch, with padding at the end.
    """

    positions: Sequence[int]
    ids: tuple[int, ...]
    skipped: frozenset[int]
    values: Values


KeptRows = Callable[[Sequence[int]], Values]
"""Returns the values at the freeze point of samples whose rows are kept."""


def steps(
    batches: Iterator[MicroBatch],
    order: EpochOrder,
    work: EpochWork,
    *,
    form: CrossingForm,
    finish: Callable[[MicroBatch], Values],
    kept: KeptRows | None = None,
    first: int = 0,
) -> Iterator[tuple[Values | None, list[int]]]:
    """Regroup an epoch's micro-batches and kept rows into training steps.

    Args:
        batches: The micro-batches of ``work``, in order.
        finish: Returns the values at the freeze point of a micro-batch.
        kept: Used for samples that ``work`` does not compute.
        first: First step; ``work`` begins with it.

    Yields:
        Values and sample ids of each step; None and no ids if every sample in the step was skipped.
    """
    pending: list[_Finished] = []
    fetched = 0
    for step in range(first, order.num_steps):
        start, stop = order.step(step)
        while fetched < len(work.positions) and work.positions[fetched] < stop:
            batch = next(batches)
            positions = work.positions[fetched : fetched + len(batch.ids)]
            pending.append(
                _Finished(
                    positions=positions,
                    ids=batch.ids,
                    skipped=frozenset(batch.skipped),
                    values=finish(batch),
                )
            )
            fetched += len(batch.ids)
        parts, ids = _of_step(order, range(start, stop), pending, form, kept)
        pending = [done for done in pending if done.positions[-1] >= stop]
        yield (form.concatenate(parts) if parts else None), ids


def _of_step(
    order: EpochOrder,
    stretch: range,
    pending: Sequence[_Finished],
    form: CrossingForm,
    kept: KeptRows | None,
) -> tuple[list[Values], list[int]]:
    """Return the values and the ids of the samples in a stretch of the epoch, without skipped ones."""
    computed = {
        at: (done, row)
        for done in pending
        for row, at in enumerate(done.positions)
        if stretch.start <= at < stretch.stop
    }
    missing = [at for at in stretch if at not in computed]
    values = kept([order.ids[at] for at in missing]) if kept is not None and missing else ()
    row_of = {at: row for row, at in enumerate(missing)}
    parts: list[Values] = []
    ids: list[int] = []
    for done, run in groupby(stretch, key=lambda at: computed[at][0] if at in computed else None):
        places = list(run)
        if done is None:
            chosen = [row_of[at] for at in places]
            parts += [form.select(values, chosen)] if values else []
            ids += (order.ids[at] for at in places)
            continue
        chosen = [computed[at][1] for at in places if order.ids[at] not in done.skipped]
        if chosen:
            parts.append(form.select(done.values, chosen))
            ids += (done.ids[row] for row in chosen)
    return parts, ids
