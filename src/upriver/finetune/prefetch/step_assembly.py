"""From micro-batches to training steps: the same samples in the same order, whatever the two sizes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from upriver.finetune.prefetch.sampler import EpochOrder
from upriver.types import MicroBatch

Values = tuple[torch.Tensor, ...]
"""Everything that crosses the freeze point, for some samples."""


class CrossingForm(Protocol):
    """Where the samples lie in what crosses the freeze point: a tail's ``values``."""

    def select(self, values: Sequence[torch.Tensor], rows: Sequence[int]) -> Values:
        """The same values of some of the samples."""

    def concatenate(self, parts: Sequence[Sequence[torch.Tensor]]) -> Values:
        """The values of several groups of samples, one group after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """A micro-batch at the freeze point.

    Attributes:
        start: Where its first sample stands in the epoch.
        ids: Its samples.
        skipped: Those of them that are padding.
        values: For a full micro-batch, padding behind.
    """

    start: int
    ids: tuple[int, ...]
    skipped: frozenset[int]
    values: Values

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    def rows(self, start: int, stop: int) -> Sequence[int]:
        """Its samples that stand in [start, stop) of the epoch, without skipped ones."""
        stretch = range(max(start, self.start) - self.start, min(stop, self.stop) - self.start)
        kept = [row for row in stretch if self.ids[row] not in self.skipped]
        return stretch if len(kept) == len(stretch) else kept


def first_micro_batch(order: EpochOrder, step: int) -> int:
    """Index of the micro-batch that a step's first sample is in; past the last one when the epoch is over."""
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
        form: Knows where the samples lie in the values.
        finish: Gives the values at the freeze point of one of them.
        first: The step to begin with.

    Yields:
        Values and sample ids of each step; None and no ids where every sample of it was skipped.
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
