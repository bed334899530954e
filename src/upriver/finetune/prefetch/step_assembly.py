"""Regroup micro-batches into training steps: the same samples in the same order, for any two sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from upriver.finetune.prefetch.sampler import EpochOrder
from upriver.types import MicroBatch

Values = tuple[torch.Tensor, ...]
"""All values that cross the freeze point, for some samples."""


class CrossingForm(Protocol):
    """The sample dimensions of the values that cross the freeze point; a tail's ``values`` implements it."""

    def select(self, values: Sequence[torch.Tensor], rows: Sequence[int]) -> Values:
        """Return the values of some of the samples."""

    def concatenate(self, parts: Sequence[Sequence[torch.Tensor]]) -> Values:
        """Return the values of several groups of samples, one group after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """A micro-batch at the freeze point.

    Attributes:
        start: Position of its first sample in the epoch.
        skipped: Ids of skipped samples, whose rows are padding.
        values: Values of a full micro-batch, with padding at the end.
    """

    start: int
    ids: tuple[int, ...]
    skipped: frozenset[int]
    values: Values

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    def rows(self, start: int, stop: int) -> Sequence[int]:
        """Return the rows of its samples in [start, stop) of the epoch, without skipped ones."""
        stretch = range(max(start, self.start) - self.start, min(stop, self.stop) - self.start)
        kept = [row for row in stretch if self.ids[row] not in self.skipped]
        return stretch if len(kept) == len(stretch) else kept


def first_micro_batch(order: EpochOrder, step: int) -> int:
    """Return the index of the micro-batch with a step's first sample; past the last one after the epoch."""
    if step >= order.num_steps:
        return len(order.micro_batches)
    return order.step(step)[0] // order.micro_batch


def steps(
    batches: Iterator[MicroBatch],
    order: EpochOrder,
    *,
    form: CrossingForm,
    finish: Callable[[MicroBatch], Values],
    first: int = 0,
) -> Iterator[tuple[Values | None, list[int]]]:
    """Regroup an epoch's micro-batches into training steps.

    Args:
        batches: Micro-batches in order, from :func:`first_micro_batch` of ``first`` on.
        finish: Returns the values at the freeze point of a micro-batch.

    Yields:
        Values and sample ids of each step; None and no ids if every sample in the step was skipped.
    """
    pending: list[_Finished] = []
    fetched = first_micro_batch(order, first) * order.micro_batch
    for step in range(first, order.num_steps):
        start, stop = order.step(step)
        while fetched < stop:
            batch = next(batches)
            values = finish(batch)
            pending.append(
                _Finished(start=fetched, ids=batch.ids, skipped=frozenset(batch.skipped), values=values)
            )
            fetched += len(batch.ids)
        taken = [(done, rows) for done in pending if (rows := done.rows(start, stop))]
        ids = [done.ids[row] for done, rows in taken for row in rows]
        parts = [form.select(done.values, rows) for done, rows in taken]
        pending = [done for done in pending if done.stop > stop]
        yield (form.concatenate(parts) if parts else None), ids
