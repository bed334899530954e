"""Check rows in memory: copies within a budget, of which the less useful give way."""

from __future__ import annotations

import random
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.features.keeping import assert_same, key, row
from upriver.features import MemoryFeatures
from upriver.features.memory import OBJECT_NBYTES

ROW = 320 + 2 * OBJECT_NBYTES
"""Bytes of one row of two tensors."""


def put(features: MemoryFeatures, stretch: str, numbers: range, saved_s: float = 1.0) -> list[bool]:
    return [features.put(stretch, key(n), row(n), saved_s=saved_s) for n in numbers]


def kept(features: MemoryFeatures, stretch: str, numbers: range) -> list[int]:
    found = features.get(stretch, [key(n) for n in numbers])
    for number, each in zip(numbers, found, strict=True):
        if each is not None:
            assert_same(each, row(number))
    return [number for number, each in zip(numbers, found, strict=True) if each is not None]


def test_memory_gives_what_was_put() -> None:
    features = MemoryFeatures(100 * ROW)
    assert all(put(features, "a", range(5)))
    assert kept(features, "a", range(10)) == list(range(5))
    assert kept(features, "b", range(10)) == []
    assert features.used_bytes == 5 * ROW
    assert all(put(features, "a", range(5))) and features.used_bytes == 5 * ROW
    features.clear("a")
    features.clear("b")
    assert kept(features, "a", range(10)) == [] and features.used_bytes == 0


def test_memory_row_is_a_copy_that_holds_no_batch() -> None:
    features = MemoryFeatures(1 << 20)
    batch = torch.arange(4000.0).reshape(100, 40)
    assert features.put("a", key(1), (batch[1:2],), saved_s=1.0)
    batch.zero_()
    (found,) = features.get("a", [key(1)])
    assert found is not None and torch.equal(found[0], torch.arange(40.0, 80.0)[None])
    assert found[0].untyped_storage().nbytes() <= 192
    assert features.used_bytes == 192 + OBJECT_NBYTES


def test_memory_row_of_the_same_stretch_stays_and_the_new_one_is_not_kept() -> None:
    features = MemoryFeatures(3 * ROW)
    for _ in range(3):
        put(features, "a", range(6))
        assert kept(features, "a", range(6)) == [0, 1, 2]


def test_memory_less_useful_stretch_gives_way_from_its_oldest_row() -> None:
    features = MemoryFeatures(4 * ROW)
    put(features, "low", range(2), 1.0)
    put(features, "mid", range(2), 2.0)
    kept(features, "low", range(1))  # the other one is now the oldest
    assert put(features, "high", range(1), 9.0) == [True]
    assert kept(features, "low", range(2)) == [0]
    assert put(features, "high", range(1, 4), 9.0) == [True] * 3
    assert kept(features, "low", range(2)) == kept(features, "mid", range(2)) == []
    assert put(features, "high", range(4, 5), 9.0) == [False]
    assert put(features, "low", range(1), 1.0) == [False]
    assert features.used_bytes == 4 * ROW


def test_memory_equal_stretches_stay_so_that_rounds_find_them() -> None:
    features = MemoryFeatures(4 * ROW)
    for _ in range(3):
        for view in ("a", "b", "c"):
            put(features, view, range(2))
        assert [kept(features, view, range(2)) for view in ("a", "b", "c")] == [[0, 1], [0, 1], []]


def test_memory_of_less_useful_stretches_the_one_used_longest_ago_goes_first() -> None:
    features = MemoryFeatures(2 * ROW)
    put(features, "a", range(1)), put(features, "b", range(1))
    kept(features, "a", range(1))
    put(features, "c", range(1), 5.0)
    assert [kept(features, name, range(1)) for name in "abc"] == [[0], [], [0]]


def test_memory_row_that_never_fits_pushes_nothing_out() -> None:
    features = MemoryFeatures(3 * ROW)
    put(features, "a", range(3))
    assert not features.put("b", key(0), row(0, 1 << 16), saved_s=1e9)
    assert kept(features, "a", range(3)) == [0, 1, 2]
    assert put(MemoryFeatures(0), "a", range(2)) == [False, False]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3).to(torch.float8_e4m3fn), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()],
)
def test_memory_row_that_has_no_form_is_not_kept(tensor: torch.Tensor) -> None:
    features = MemoryFeatures(1 << 20)
    assert not features.put("a", key(0), (tensor,), saved_s=1.0)
    assert features.used_bytes == 0


@given(
    budget=st.integers(0, 6 * ROW),
    steps=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 8),
            st.sampled_from([16, 256, 2048]),
            st.sampled_from([1.0, 2.0]),
        )
    ),
)
def test_memory_is_never_above_the_budget_and_counts_all(
    budget: int, steps: list[tuple[str, int, int, float]]
) -> None:
    features = MemoryFeatures(budget)
    for stretch, number, nbytes, saved_s in steps:
        done = features.put(stretch, key(number), row(number, nbytes), saved_s=saved_s)
        found = features.get(stretch, [key(number)])
        assert (found[0] is not None) == done
        assert features.used_bytes <= budget
    held = [features.get(name, [key(n) for n in range(9)]) for name in "abc"]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for g in held for r in g if r for t in r
    }
    tensors = sum(len(each) for group in held for each in group if each)
    assert features.used_bytes == sum(storages.values()) + OBJECT_NBYTES * tensors


def test_memory_threads_put_get_and_clear_at_once() -> None:
    features, faults = MemoryFeatures(20 * ROW), list[BaseException]()

    def work(seed: int) -> None:
        chances = random.Random(seed)
        try:
            for _ in range(300):
                stretch, number = chances.choice("ab"), chances.randrange(30)
                features.put(stretch, key(number), row(number), saved_s=chances.random())
                kept(features, stretch, range(number, number + 5))
                assert features.used_bytes <= 20 * ROW
                if chances.random() < 0.02:
                    features.clear(stretch)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    features.clear("a"), features.clear("b")
    assert features.used_bytes == 0
