"""Check which kept rows are computed anew: some of all, and one at least of those of each shard."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from upriver.features.kept import CHECKED_ROWS
from upriver.finetune.row_check import RowCheck

UNUSED: Any = None


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    micro_batch=st.sampled_from([1, 2, 8, 16, 64]),
    ahead=st.integers(0, 3),
    seed=st.randoms(use_true_random=False),
)
def test_samples_to_check_are_of_each_shard_and_fill_whole_micro_batches(
    sizes: list[int], micro_batch: int, ahead: int, seed: Any
) -> None:
    samples = list(range(sum(sizes)))
    seed.shuffle(samples)
    rest = iter(samples)
    groups = [frozenset(itertools.islice(rest, size)) for size in sizes]
    read = [tuple(samples[at * micro_batch : (at + 1) * micro_batch]) for at in range(ahead)]
    check = RowCheck(micro_batch, source=UNUSED, finish=UNUSED, rows_of=UNUSED)
    found = check.some(groups, read)
    assert len(set(found)) == len(found) and set(found) <= set(samples)
    assert all(not group.isdisjoint(found) for group in groups)
    at_once = max(1, micro_batch - 1)
    assert len(found) == len(samples) or len(found) % at_once == 0
    assert len(found) >= min(len(samples), CHECKED_ROWS - CHECKED_ROWS // micro_batch, len(groups))


def test_samples_that_were_read_ahead_are_checked_if_they_are_of_all_shards() -> None:
    check = RowCheck(4, source=UNUSED, finish=UNUSED, rows_of=UNUSED)
    read = [(0, 5, 1, 6), (2, 7, 3, 8), (4, 9, 10, 11), (12, 13, 14, 15), (16, 17, 18, 19)]
    taken = [0, 5, 1, 2, 7, 3, 4, 9, 10, 12, 13, 14]
    assert check.some([frozenset(range(40))], read) == taken
    assert check.some([frozenset(range(5)), frozenset(range(5, 40))], read) == taken
    assert check.some([frozenset(range(30)), frozenset(range(30, 40))], read) != taken
