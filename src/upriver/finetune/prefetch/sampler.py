"""Compute the order of an epoch, a pure function of (seed, epoch), by rank, micro-batch and step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from upriver.pipeline import Draw

_ORDER_STAGE = 1 << 20
"""Stage number of the draw that seeds an epoch's order; larger than any input stage's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """The samples of an epoch, in order.

    Micro-batches divide the whole epoch, not each training batch. A micro-batch therefore holds the same
    samples wherever a job is resumed.

    Attributes:
        ids: Rows of the dataset's index.
        batch_size: Samples of a training step.
        micro_batch: Samples that the frozen stages see at once.
    """

    ids: tuple[int, ...]
    batch_size: int
    micro_batch: int

    @property
    def num_steps(self) -> int:
        """Number of training steps."""
        return -(-len(self.ids) // self.batch_size)

    @property
    def micro_batches(self) -> list[tuple[int, ...]]:
        """The epoch's micro-batches; the last one may be short."""
        return [self.ids[i : i + self.micro_batch] for i in range(0, len(self.ids), self.micro_batch)]

    def step(self, step: int) -> tuple[int, int]:
        """Return the range [start, stop) of the epoch that a training step covers."""
        start = step * self.batch_size
        return start, min(start + self.batch_size, len(self.ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochWork:
    """The rest of an epoch: the micro-batches to compute, and the samples whose rows are kept.

    Attributes:
        micro_batches: Sample ids of every micro-batch to compute.
        first: Index of the first one that is missing.
        positions: Position in the epoch of each sample to compute, from micro-batch ``first`` on.
        kept: Samples that need no computation.
        stored: Indices of micro-batches whose rows servers have kept.
    """

    micro_batches: Sequence[tuple[int, ...]]
    first: int
    positions: Sequence[int]
    kept: Collection[int] = frozenset()
    stored: Collection[int] = frozenset()

    @property
    def is_packed(self) -> bool:
        """Return whether the micro-batches are others than those of the epoch."""
        return bool(self.kept or self.stored)

    @classmethod
    def of(
        cls,
        order: EpochOrder,
        *,
        step: int = 0,
        kept: Collection[int] = frozenset(),
        stored: Collection[int] = frozenset(),
    ) -> EpochWork:
        """Return the work of an epoch from a training step on.

        Missing samples are packed into full micro-batches in the order of the epoch. Without kept rows these
        are the epoch's own micro-batches.

        Args:
            stored: Samples whose rows servers have kept: they are packed apart from the others.
        """
        start, size = min(step * order.batch_size, len(order.ids)), order.micro_batch
        if not kept and not stored:
            micro_batches = order.micro_batches
            first = len(micro_batches) if step >= order.num_steps else start // size
            return cls(
                micro_batches=micro_batches,
                first=first,
                positions=range(min(first * size, len(order.ids)), len(order.ids)),
            )
        missing = [at for at in range(start, len(order.ids)) if order.ids[at] not in kept]
        groups = [[at for at in missing if (order.ids[at] in stored) is there] for there in (True, False)]
        packs = [each[i : i + size] for each in groups for i in range(0, len(each), size)]
        packs.sort(key=lambda pack: pack[0])  # in which order steps need them
        return cls(
            micro_batches=[tuple(order.ids[at] for at in pack) for pack in packs],
            first=0,
            positions=[at for pack in packs for at in pack],
            kept=kept,
            stored={index for index, pack in enumerate(packs) if order.ids[pack[0]] in stored},
        )


def epoch_order(
    num_samples: int,
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    micro_batch: int,
    shuffle: bool,
    drop_last: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> EpochOrder:
    """Return the order of one epoch, or one rank's shard of it.

    Args:
        batch_size: Samples of a training step, on each rank.
        shuffle: Permute the samples, with a permutation drawn from (seed, epoch).
        drop_last: Leave out the samples of a last, short training batch.
        num_ranks: Processes that train on one epoch together. Each gets every ``num_ranks``-th sample of the
            same order, and all get equally many. To make that possible the first samples are repeated at the
            end of the order (none with ``drop_last``).
    """
    if shuffle:
        draw = Draw(seed=seed, epoch=epoch, sample=0, stage=_ORDER_STAGE)
        generator = torch.Generator().manual_seed(int(draw.uniforms(1)[0] * 2**53))
        ids = torch.randperm(num_samples, generator=generator, device="cpu").tolist()
    else:
        ids = list(range(num_samples))
    if drop_last:
        ids = ids[: num_samples - num_samples % (batch_size * num_ranks)]
    shard = _shard(ids, rank, num_ranks)
    return EpochOrder(ids=shard, batch_size=batch_size, micro_batch=micro_batch)


def _shard(ids: Sequence[int], rank: int, num_ranks: int) -> tuple[int, ...]:
    """Return a rank's part of the order; the order wraps around so that ranks have equally many steps."""
    each = -(-len(ids) // num_ranks)
    return tuple(ids[(rank + number * num_ranks) % len(ids)] for number in range(each))
