"""Check orders and steps: every sample once and in order, for all sizes, from any point of a resumed job.

Two values cross the freeze point here: one with samples in its second dimension, one that all samples share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from upriver.finetune.prefetch.sampler import EpochOrder, EpochWork, epoch_order
from upriver.finetune.prefetch.step_assembly import steps
from upriver.types import MicroBatch

SIZES = {
    "num_samples": st.integers(1, 60),
    "batch_size": st.integers(1, 20),
    "micro_batch": st.integers(1, 20),
}


Values = tuple[torch.Tensor, ...]

SHARED = torch.arange(3.0)


class Columns:
    """Return samples as columns of the first value, and a second value that all samples share."""

    def select(self, values: Sequence[torch.Tensor], rows: Sequence[int]) -> Values:
        assert len(rows) > 0
        return values[0][:, list(rows)], values[1]

    def concatenate(self, parts: Sequence[Sequence[torch.Tensor]]) -> Values:
        return torch.cat([part[0] for part in parts], dim=1), parts[0][1]


def values_of(batch: MicroBatch) -> Values:
    return batch.tensors


def columns_of(ids: Sequence[int], size: int) -> Values:
    rows = torch.full((size,), -1.0)
    rows[: len(ids)] = torch.tensor([float(sample) for sample in ids])
    return torch.stack([rows, -rows]), SHARED


def delivered(
    order: EpochOrder,
    first: int,
    bad: frozenset[int],
    kept: frozenset[int] = frozenset(),
    stored: frozenset[int] = frozenset(),
) -> list[tuple[list[float], list[int]]]:
    work = EpochWork.of(order, step=first, kept=kept, stored=stored)
    batches = []
    for ids in work.micro_batches[work.first :]:
        skipped = tuple(sample for sample in ids if sample in bad)
        tensors = columns_of(ids, order.micro_batch)
        batches.append(MicroBatch(ids=ids, position=1, tensors=tensors, skipped=skipped))
    taken = iter(batches)
    found = [
        (numbers(values), ids)
        for values, ids in steps(
            taken,
            order,
            work,
            form=Columns(),
            finish=values_of,
            kept=lambda ids: columns_of(ids, len(ids)),
            first=first,
        )
    ]
    assert not list(taken)
    return found


def numbers(values: Values | None) -> list[float]:
    if values is None:
        return []
    assert torch.equal(values[0][1], -values[0][0])
    assert values[1] is SHARED
    return values[0][0].tolist()


@settings(max_examples=examples(200), deadline=None)
@given(**SIZES, seed=st.integers(0, 9), epoch=st.integers(0, 3), drop_last=st.booleans(), data=st.data())
def test_steps_take_every_sample_once_and_in_order(
    num_samples: int,
    batch_size: int,
    micro_batch: int,
    seed: int,
    epoch: int,
    drop_last: bool,
    data: st.DataObject,
) -> None:
    order = epoch_order(
        num_samples,
        seed=seed,
        epoch=epoch,
        batch_size=batch_size,
        micro_batch=micro_batch,
        shuffle=True,
        drop_last=drop_last,
    )
    kept = num_samples - (num_samples % batch_size if drop_last else 0)
    bad = data.draw(st.frozensets(st.integers(0, num_samples - 1), max_size=5))
    first = data.draw(st.integers(0, order.num_steps))
    found = data.draw(st.frozensets(st.integers(0, num_samples - 1))) - bad
    stored = data.draw(st.frozensets(st.integers(0, num_samples - 1)))
    got = delivered(order, first, bad, found, stored)
    wanted = [
        [sample for sample in order.ids[start:stop] if sample not in bad]
        for start, stop in map(order.step, range(first, order.num_steps))
    ]
    assert len(order.ids) == kept
    assert EpochWork.of(order, step=order.num_steps).first == len(order.micro_batches)
    assert [ids for _, ids in got] == wanted
    assert [rows for rows, _ in got] == [[float(sample) for sample in ids] for ids in wanted]
    if first == 0 and not bad and not drop_last:
        assert Counter(sample for _, ids in got for sample in ids) == Counter(range(num_samples))


@given(**SIZES, data=st.data())
def test_epoch_work_with_kept_rows_packs_the_others_into_full_micro_batches(
    num_samples: int, batch_size: int, micro_batch: int, data: st.DataObject
) -> None:
    order = epoch_order(
        num_samples, seed=3, epoch=1, batch_size=batch_size, micro_batch=micro_batch, shuffle=True
    )
    step = data.draw(st.integers(0, order.num_steps))
    kept = data.draw(st.frozensets(st.integers(0, num_samples - 1), min_size=1))
    work = EpochWork.of(order, step=step, kept=kept)
    missing = [sample for sample in order.ids[order.step(step)[0] :] if sample not in kept]
    assert [sample for pack in work.micro_batches for sample in pack] == missing
    assert [order.ids[at] for at in work.positions] == missing
    assert all(len(pack) == micro_batch for pack in work.micro_batches[:-1])


@given(**SIZES)
def test_an_order_depends_on_seed_and_epoch_alone(
    num_samples: int, batch_size: int, micro_batch: int
) -> None:
    def ids(seed: int, epoch: int, batch: int, micro: int) -> tuple[int, ...]:
        return epoch_order(
            num_samples, seed=seed, epoch=epoch, batch_size=batch, micro_batch=micro, shuffle=True
        ).ids

    assert ids(1, 2, batch_size, micro_batch) == ids(1, 2, 1, 1)
    if num_samples > 20:
        assert len({ids(1, 2, 1, 1), ids(2, 1, 1, 1), ids(1, 3, 1, 1)}) == 3


def test_an_order_is_the_same_in_every_version() -> None:
    """A permutation that changes between versions would break every resumed job."""
    order = epoch_order(10, seed=0, epoch=0, batch_size=4, micro_batch=4, shuffle=True)
    assert order.ids == PINNED


PINNED = (8, 3, 7, 6, 1, 4, 0, 9, 2, 5)


@settings(max_examples=examples(200), deadline=None)
@given(**SIZES, num_ranks=st.integers(1, 5), shuffle=st.booleans(), drop_last=st.booleans())
def test_the_ranks_shards_are_one_epoch_dealt_out(
    num_samples: int, batch_size: int, micro_batch: int, num_ranks: int, shuffle: bool, drop_last: bool
) -> None:
    options = {"seed": 5, "epoch": 2, "micro_batch": micro_batch, "shuffle": shuffle}
    whole = epoch_order(num_samples, batch_size=batch_size * num_ranks, drop_last=drop_last, **options)
    shards = [
        epoch_order(
            num_samples,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=rank,
            num_ranks=num_ranks,
            **options,
        )
        for rank in range(num_ranks)
    ]
    assert len({shard.num_steps for shard in shards}) == 1
    assert shards[0].num_steps == whole.num_steps
    dealt = [sample for row in zip(*(shard.ids for shard in shards), strict=True) for sample in row]
    assert tuple(dealt[: len(whole.ids)]) == whole.ids
    repeated = dealt[len(whole.ids) :]
    assert repeated == [whole.ids[i % len(whole.ids)] for i in range(len(repeated))]
    assert len(repeated) < num_ranks
    assert not (drop_last and repeated)
