"""Test the program cache and the memory that it holds."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.memory_budget import MemoryBudget
from upriver.errors import DoesNotFit, Overloaded, StoreError
from upriver.server.programs.cache import ProgramCache


def shelf_of(total=100, most=100, **quotas):
    evicted = []
    budget = MemoryBudget(total)
    return ProgramCache(budget, most_bytes=most, on_evict=evicted.append, quotas=quotas), budget, evicted


def files(key):
    return SimpleNamespace(key=key)


async def load(shelf, key):
    async def read():
        return files(key)

    return await shelf.load(key, read)


def test_a_program_holds_its_memory_once_however_many_use_it():
    async def go():
        shelf, budget, evicted = shelf_of()
        shelf.take("a/1", 40, owner="a")
        shelf.take("a/1", 40, owner="a")
        assert budget.reserved_bytes == 40
        first, second = await asyncio.gather(load(shelf, "a/1"), load(shelf, "a/1"))
        assert first is second
        shelf.give_back("a/1")
        shelf.give_back("a/1")
        assert budget.reserved_bytes == 40 and not evicted  # kept for the next request

    asyncio.run(go())


def test_idle_programs_make_room_least_recently_used_first_and_those_in_use_stay():
    async def go():
        shelf, budget, evicted = shelf_of()
        for key in ("a/1", "a/2", "a/3"):
            shelf.take(key, 30, owner="a")
            await load(shelf, key)
        shelf.give_back("a/1")
        shelf.give_back("a/2")
        shelf.take("b/1", 35, owner="b")
        assert evicted == ["a/1"]
        with pytest.raises(Overloaded):
            shelf.take("b/2", 40, owner="b")
        assert evicted == ["a/1"]  # nothing is evicted where that is not enough
        assert budget.reserved_bytes == 95

    asyncio.run(go())


def test_one_that_cannot_be_read_holds_nothing_afterwards_and_is_read_again():
    async def go():
        shelf, budget, evicted = shelf_of()

        async def broken():
            raise StoreError("gone")

        shelf.take("a/1", 40, owner="a")
        with pytest.raises(StoreError):
            await shelf.load("a/1", broken)
        assert (await load(shelf, "a/1")).key == "a/1"
        shelf.give_back("a/1")
        shelf.take("a/2", 10, owner="a")
        with pytest.raises(StoreError):
            await shelf.load("a/2", broken)
        shelf.give_back("a/2")
        assert budget.reserved_bytes == 40 and evicted == ["a/2"]

    asyncio.run(go())


def test_whoever_gives_up_waiting_takes_nothing_from_others_who_wait_for_the_same():
    async def go():
        shelf, _, _ = shelf_of()
        ready = asyncio.Event()

        async def slow():
            await ready.wait()
            return files("a/1")

        shelf.take("a/1", 40, owner="a")
        shelf.take("a/1", 40, owner="a")
        first = asyncio.create_task(shelf.load("a/1", slow))
        second = asyncio.create_task(shelf.load("a/1", slow))
        await asyncio.sleep(0)
        first.cancel()
        ready.set()
        assert (await second).key == "a/1"

    asyncio.run(go())


def test_what_nobody_uses_takes_at_most_its_share():
    async def go():
        shelf, budget, evicted = shelf_of(most=50)
        for key in ("a/1", "a/2"):
            shelf.take(key, 40, owner="a")
            await load(shelf, key)
        assert not evicted
        shelf.give_back("a/1")
        shelf.give_back("a/2")
        assert evicted == ["a/1"] and budget.reserved_bytes == 40

    asyncio.run(go())


def test_a_tenant_keeps_no_more_than_its_quota():
    async def go():
        shelf, budget, evicted = shelf_of()
        for key, owner in (("a/1", "a"), ("a/2", "a"), ("b/1", "b")):
            shelf.take(key, 20, owner=owner)
            await load(shelf, key)
            shelf.give_back(key)
        shelf.drop_idle("a", 20)
        assert evicted == ["a/1"]
        assert budget.held_by("a") == 20 and budget.held_by("b") == 20

    asyncio.run(go())


def test_a_quota_holds_whenever_a_program_is_not_used_any_more():
    async def go():
        shelf, _, evicted = shelf_of(a=20)
        for key in ("a/1", "a/2"):
            shelf.take(key, 20, owner="a")
            await load(shelf, key)
        assert not evicted
        shelf.give_back("a/1")
        assert evicted == ["a/1"]
        shelf.give_back("a/2")
        assert list(shelf.keys) == ["a/2"]

    asyncio.run(go())


def test_each_upload_holds_what_has_come_and_one_of_them_is_kept():
    shelf, budget, evicted = shelf_of()
    first, second = shelf.coming(owner="a"), shelf.coming(owner="a")
    for hold in (first, second):
        shelf.grow(hold, 10)
        shelf.grow(hold, 30)
        shelf.grow(hold, 20)  # it never shrinks
    assert budget.reserved_bytes == 60 and not list(shelf)
    shelf.put(files("a/1"), first)
    shelf.put(files("a/1"), second)
    shelf.over("a/1", second)
    shelf.over("a/1", first)
    assert shelf.files("a/1") is not None
    assert budget.reserved_bytes == 30 and not evicted
    with pytest.raises(DoesNotFit):
        shelf.grow(shelf.coming(owner="a"), 101)
    shelf.take("a/1", 30, owner="a")
    with pytest.raises(Overloaded):
        shelf.grow(shelf.coming(owner="a"), 71)
    assert budget.reserved_bytes == 30


def test_an_upload_that_comes_to_nothing_leaves_nothing():
    shelf, budget, evicted = shelf_of()
    heard = []
    budget.add_listener(lambda: heard.append(budget.reserved_bytes))
    hold = shelf.coming(owner="a")
    shelf.grow(hold, 30)
    shelf.over("a/1", hold)
    assert budget.reserved_bytes == 0 and heard[-1] == 0
    assert evicted == ["a/1"]  # a worker may have looked at it


def test_whoever_waits_for_memory_hears_of_programs_that_nobody_uses_any_more():
    async def go():
        shelf, budget, _ = shelf_of()
        shelf.take("a/1", 40, owner="a")
        await load(shelf, "a/1")
        heard = []
        budget.add_listener(lambda: heard.append(shelf.idle_bytes()))
        shelf.give_back("a/1")
        assert heard[-1:] == [40]

    asyncio.run(go())


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "load", "room"]), st.integers(0, 5), st.integers(1, 60))
    )
)
def test_whatever_happens_the_budget_is_what_is_kept_and_nothing_in_use_goes(steps):
    async def go():
        shelf, budget, _ = shelf_of(most=70)
        users = dict.fromkeys(range(6), 0)
        for what, number, nbytes in steps:
            key = f"t/{number}"
            if what == "take":
                try:
                    shelf.take(key, nbytes, owner="t")
                    users[number] += 1
                except Overloaded:
                    assert key not in shelf
            elif what == "give" and users[number]:
                shelf.give_back(key)
                users[number] -= 1
            elif what == "load" and users[number]:
                await load(shelf, key)
            elif what == "room":
                shelf.make_room(nbytes)
            kept = list(shelf)
            assert budget.reserved_bytes == sum(each.nbytes for each in kept) <= budget.total_bytes
            assert {each.key: each.users for each in kept if each.users} == {
                f"t/{at}": count for at, count in users.items() if count
            }

    asyncio.run(go())
