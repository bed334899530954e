"""From micro-batches to training steps: the same rows in the same order, whatever the two sizes are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from upriver.client.order import EpochOrder
from upriver.types import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """A micro-batch at the freeze point.

    Attributes:
        start: Where its first row stands in the epoch.
        ids: Its samples.
        skipped: Those of them that are padding.
        features: One row a sample, padding behind.
    """

    start: int
    ids: tuple[int, ...]
    skipped: frozenset[int]
    features: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, list[int]]:
        """Features and ids of its samples that stand in [start, stop) of the epoch, without skipped ones."""
        first, last = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        kept = [row for row in range(first, last) if self.ids[row] not in self.skipped]
        if len(kept) == last - first:
            return self.features[first:last], list(self.ids[first:last])
        index = torch.tensor(kept, dtype=torch.int64, device=self.features.device)
        return self.features.index_select(0, index), [self.ids[row] for row in kept]


def first_micro_batch(order: EpochOrder, step: int) -> int:
    """Index of the micro-batch that a step's first sample is in; past the last one when the epoch is over."""
    if step >= order.num_steps:
        return len(order.micro_batches)
    return order.step(step)[0] // order.micro_batch


def steps(
    batches: Iterator[MicroBatch],
    order: EpochOrder,
    *,
    finish: Callable[[MicroBatch], torch.Tensor],
    first: int = 0,
) -> Iterator[tuple[torch.Tensor | None, list[int]]]:
    """Regroup an epoch's micro-batches into training steps.

    Args:
        batches: Micro-batches in order, from :func:`first_micro_batch` of ``first`` on.
        finish: Runs what is left of the prefix on one of them and gives its features.
        first: The step to begin with.

    Yields:
        Features and sample ids of each step; None and no ids where every sample of it was skipped.
    """
    pending: list[_Finished] = []
    fetched = first_micro_batch(order, first) * order.micro_batch
    for step in range(first, order.num_steps):
        start, stop = order.step(step)
        while fetched < stop:
            batch = next(batches)
            features = finish(batch)
            pending.append(
                _Finished(start=fetched, ids=batch.ids, skipped=frozenset(batch.skipped), features=features)
            )
            fetched += len(batch.ids)
        parts = [done.rows(start, stop) for done in pending]
        ids = [sample for _, part in parts for sample in part]
        features_of_step = torch.cat([part for part, _ in parts]) if ids else None
        pending = [done for done in pending if done.stop > stop]
        yield features_of_step, ids
