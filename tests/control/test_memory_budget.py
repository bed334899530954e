"""Test that what is reserved of a memory budget never exceeds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.memory_budget import BASE, MemoryBudget, MemoryHold
from upriver.errors import DoesNotFit, Overloaded

OWNERS = ("alice", "bob", "carol")


def test_no_more_is_held_than_there_is() -> None:
    budget = MemoryBudget(100)
    first = budget.hold(60, owner="alice")
    with pytest.raises(Overloaded, match="it takes 41 B, and of 100 B only 40 B are free"):
        budget.hold(41, owner="bob")
    assert (budget.reserved_bytes, budget.free_bytes, budget.held_by("bob")) == (60, 40, 0)
    second = budget.hold(40, owner="bob")
    assert budget.free_bytes == 0
    first.release()
    second.release()
    assert (budget.reserved_bytes, budget.free_bytes, budget.most_reserved_bytes) == (0, 100, 100)


def test_a_hold_is_released_once_and_at_the_end_of_its_block() -> None:
    budget = MemoryBudget(100)
    other = budget.hold(10, owner="alice")
    with pytest.raises(KeyError), budget.hold(60, owner="alice") as hold:
        assert (hold.nbytes, hold.owner, budget.held_by("alice")) == (60, "alice", 70)
        raise KeyError
    hold.release()
    assert (hold.nbytes, budget.reserved_bytes, budget.held_by("alice")) == (0, 10, 10)
    other.release()


def test_what_never_can_be_held_is_told_from_what_cannot_be_held_now() -> None:
    budget = MemoryBudget(100)
    base = budget.hold(30, owner=BASE)
    hold = budget.hold(40, owner="alice")
    with pytest.raises(Overloaded):
        budget.hold(70, owner="bob")
    with pytest.raises(DoesNotFit, match="this takes 71 B of memory, and the server has 70 B"):
        budget.hold(71, owner="bob")
    with pytest.raises(DoesNotFit, match="takes 71 B"):
        hold.resize(71)
    budget.check_fits(40, beside=30)
    with pytest.raises(DoesNotFit, match="takes 71 B"):
        budget.check_fits(40, beside=31)
    assert (hold.nbytes, budget.reserved_bytes) == (40, 70)
    base.release()
    hold.resize(71)


def test_a_hold_grows_and_shrinks() -> None:
    budget = MemoryBudget(100)
    hold = budget.hold(60, owner="alice")
    hold.resize(100)
    assert (hold.nbytes, budget.free_bytes) == (100, 0)
    with pytest.raises(DoesNotFit):
        hold.resize(101)
    assert (hold.nbytes, budget.free_bytes) == (100, 0)
    hold.resize(5)
    assert (hold.nbytes, budget.free_bytes, budget.held_by("alice")) == (5, 95, 5)
    hold.release()
    with pytest.raises(Overloaded, match="was released"):
        hold.resize(1)
    assert budget.reserved_bytes == 0


def test_bytes_are_no_less_than_none() -> None:
    budget = MemoryBudget(100)
    with pytest.raises(ValueError, match=">= 0, got -1"):
        budget.hold(-1, owner="alice")
    with budget.hold(10, owner="alice") as hold, pytest.raises(ValueError, match=">= 0, got -2"):
        hold.resize(-2)
    assert budget.reserved_bytes == 0


def test_listeners_are_told_when_bytes_have_come_back_and_only_then() -> None:
    budget = MemoryBudget(100)
    seen: list[int] = []
    budget.add_listener(lambda: seen.append(budget.free_bytes))
    hold = budget.hold(60, owner="alice")
    hold.resize(80)
    assert seen == []
    hold.resize(80)
    assert seen == []
    hold.resize(30)
    assert seen == [70]
    hold.release()
    hold.release()
    assert seen == [70, 100]


def test_a_listener_may_take_what_came_back() -> None:
    budget = MemoryBudget(100)
    taken: list[MemoryHold] = []

    def take() -> None:
        if not taken:
            taken.append(budget.hold(100, owner="bob"))

    budget.add_listener(take)
    budget.hold(100, owner="alice").release()
    assert (budget.held_by("alice"), budget.held_by("bob"), budget.free_bytes) == (0, 100, 0)


step = st.tuples(
    st.sampled_from(["hold", "resize", "release"]),
    st.integers(0, 7),
    st.integers(0, 130),
    st.sampled_from(OWNERS),
)


@given(steps=st.lists(step, max_size=60))
def test_whatever_happens_what_is_reserved_is_what_is_held(steps: list[tuple[str, int, int, str]]) -> None:
    budget, holds, most = MemoryBudget(100), [], 0
    told, back = 0, 0

    def listen() -> None:
        nonlocal told
        told += 1

    budget.add_listener(listen)
    released: set[int] = set()
    for kind, which, nbytes, owner in steps:
        before = budget.reserved_bytes
        try:
            if kind == "hold":
                holds.append(budget.hold(nbytes, owner=owner))
            elif holds and kind == "resize":
                holds[which % len(holds)].resize(nbytes)
            elif holds:
                back += which % len(holds) not in released
                released.add(which % len(holds))
                holds[which % len(holds)].release()
        except DoesNotFit:
            assert nbytes > budget.total_bytes
            assert budget.reserved_bytes == before
        except Overloaded:
            over = kind == "hold" or which % len(holds) not in released
            assert budget.reserved_bytes == before
            assert not over or nbytes > budget.free_bytes
        if kind == "resize" and budget.reserved_bytes < before:
            back += 1
        sums: Counter[str] = Counter()
        for hold in holds:
            sums[hold.owner] += hold.nbytes
        most = max(most, budget.reserved_bytes)
        assert budget.reserved_bytes == sum(sums.values()) <= budget.total_bytes
        assert budget.free_bytes == budget.total_bytes - budget.reserved_bytes
        assert [budget.held_by(each) for each in OWNERS] == [sums[each] for each in OWNERS]
        assert budget.most_reserved_bytes == most
        assert told == back
