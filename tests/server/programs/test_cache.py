"""Test the program cache and the memory that it holds."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.control.memory_budget import MemoryBudget
from upriver.errors import DoesNotFit, Overloaded, StoreError
from upriver.server.programs.cache import ProgramCache


def cache_of(total=100, most=100, **quotas):
    evicted = []
    budget = MemoryBudget(total)
    return ProgramCache(budget, most_bytes=most, on_evict=evicted.append, quotas=quotas), budget, evicted


def files(key):
    return SimpleNamespace(key=key)


async def load(program_cache, key):
    async def read():
        return files(key)

    return await program_cache.load(key, read)


def test_a_program_holds_its_memory_once_however_many_use_it():
    async def go():
        program_cache, budget, evicted = cache_of()
        program_cache.take("a/1", 40, owner="a")
        program_cache.take("a/1", 40, owner="a")
        assert budget.reserved_bytes == 40
        first, second = await asyncio.gather(load(program_cache, "a/1"), load(program_cache, "a/1"))
        assert first is second
        program_cache.give_back("a/1")
        program_cache.give_back("a/1")
        assert budget.reserved_bytes == 40 and not evicted  # kept for the next request

    asyncio.run(go())


def test_idle_programs_make_room_least_recently_used_first_and_those_in_use_stay():
    async def go():
        program_cache, budget, evicted = cache_of()
        for key in ("a/1", "a/2", "a/3"):
            program_cache.take(key, 30, owner="a")
            await load(program_cache, key)
        program_cache.give_back("a/1")
        program_cache.give_back("a/2")
        program_cache.take("b/1", 35, owner="b")
        assert evicted == ["a/1"]
        with pytest.raises(Overloaded):
            program_cache.take("b/2", 40, owner="b")
        assert evicted == ["a/1"]  # nothing is evicted where that is not enough
        assert budget.reserved_bytes == 95

    asyncio.run(go())


def test_one_that_cannot_be_read_holds_nothing_afterwards_and_is_read_again():
    async def go():
        program_cache, budget, evicted = cache_of()

        async def broken():
            raise StoreError("gone")

        program_cache.take("a/1", 40, owner="a")
        with pytest.raises(StoreError):
            await program_cache.load("a/1", broken)
        assert (await load(program_cache, "a/1")).key == "a/1"
        program_cache.give_back("a/1")
        program_cache.take("a/2", 10, owner="a")
        with pytest.raises(StoreError):
            await program_cache.load("a/2", broken)
        program_cache.give_back("a/2")
        assert budget.reserved_bytes == 40 and evicted == ["a/2"]

    asyncio.run(go())


def test_whoever_gives_up_waiting_takes_nothing_from_others_who_wait_for_the_same():
    async def go():
        program_cache, _, _ = cache_of()
        ready = asyncio.Event()

        async def slow():
            await ready.wait()
            return files("a/1")

        program_cache.take("a/1", 40, owner="a")
        program_cache.take("a/1", 40, owner="a")
        first = asyncio.create_task(program_cache.load("a/1", slow))
        second = asyncio.create_task(program_cache.load("a/1", slow))
        await asyncio.sleep(0)
        first.cancel()
        ready.set()
        assert (await second).key == "a/1"

    asyncio.run(go())


def test_what_nobody_uses_takes_at_most_its_share():
    async def go():
        program_cache, budget, evicted = cache_of(most=50)
        for key in ("a/1", "a/2"):
            program_cache.take(key, 40, owner="a")
            await load(program_cache, key)
        assert not evicted
        program_cache.give_back("a/1")
        program_cache.give_back("a/2")
        assert evicted == ["a/1"] and budget.reserved_bytes == 40

    asyncio.run(go())


def test_a_tenant_keeps_no_more_than_its_quota():
    async def go():
        program_cache, budget, evicted = cache_of()
        for key, owner in (("a/1", "a"), ("a/2", "a"), ("b/1", "b")):
            program_cache.take(key, 20, owner=owner)
            await load(program_cache, key)
            program_cache.give_back(key)
        program_cache.drop_idle("a", 20)
        assert evicted == ["a/1"]
        assert budget.held_by("a") == 20 and budget.held_by("b") == 20

    asyncio.run(go())


def test_a_quota_holds_whenever_a_program_is_not_used_any_more():
    async def go():
        program_cache, _, evicted = cache_of(a=20)
        for key in ("a/1", "a/2"):
            program_cache.take(key, 20, owner="a")
            await load(program_cache, key)
        assert not evicted
        program_cache.give_back("a/1")
        assert evicted == ["a/1"]
        program_cache.give_back("a/2")
        assert list(program_cache.keys) == ["a/2"]

    asyncio.run(go())


def test_each_upload_holds_what_has_come_and_one_of_them_is_kept():
    program_cache, budget, evicted = cache_of()
    first, second = program_cache.coming(owner="a"), program_cache.coming(owner="a")
    for hold in (first, second):
        program_cache.grow(hold, 10)
        program_cache.grow(hold, 30)
        program_cache.grow(hold, 20)  # it never shrinks
    assert budget.reserved_bytes == 60 and not list(program_cache)
    program_cache.put(files("a/1"), first)
    program_cache.put(files("a/1"), second)
    program_cache.over("a/1", second)
    program_cache.over("a/1", first)
    assert program_cache.files("a/1") is not None
    assert budget.reserved_bytes == 30 and not evicted
    with pytest.raises(DoesNotFit):
        program_cache.grow(program_cache.coming(owner="a"), 101)
    program_cache.take("a/1", 30, owner="a")
    with pytest.raises(Overloaded):
        program_cache.grow(program_cache.coming(owner="a"), 71)
    assert budget.reserved_bytes == 30


def test_an_upload_that_comes_to_nothing_leaves_nothing():
    program_cache, budget, evicted = cache_of()
    heard = []
    budget.add_listener(lambda: heard.append(budget.reserved_bytes))
    hold = program_cache.coming(owner="a")
    program_cache.grow(hold, 30)
    program_cache.over("a/1", hold)
    assert budget.reserved_bytes == 0 and heard[-1] == 0
    assert evicted == ["a/1"]  # a worker may have looked at it


def test_whoever_waits_for_memory_hears_of_programs_that_nobody_uses_any_more():
    async def go():
        program_cache, budget, _ = cache_of()
        program_cache.take("a/1", 40, owner="a")
        await load(program_cache, "a/1")
        heard = []
        budget.add_listener(lambda: heard.append(program_cache.idle_bytes()))
        program_cache.give_back("a/1")
        assert heard[-1:] == [40]

    asyncio.run(go())


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "give", "load", "room"]), st.integers(0, 5), st.integers(1, 60))
    )
)
def test_whatever_happens_the_budget_is_what_is_kept_and_nothing_in_use_goes(steps):
    async def go():
        program_cache, budget, _ = cache_of(most=70)
        users = dict.fromkeys(range(6), 0)
        for what, number, nbytes in steps:
            key = f"t/{number}"
            if what == "take":
                try:
                    program_cache.take(key, nbytes, owner="t")
                    users[number] += 1
                except Overloaded:
                    assert key not in program_cache
            elif what == "give" and users[number]:
                program_cache.give_back(key)
                users[number] -= 1
            elif what == "load" and users[number]:
                await load(program_cache, key)
            elif what == "room":
                program_cache.make_room(nbytes)
            kept = list(program_cache)
            assert budget.reserved_bytes == sum(each.nbytes for each in kept) <= budget.total_bytes
            assert {each.key: each.users for each in kept if each.users} == {
                f"t/{at}": count for at, count in users.items() if count
            }

    asyncio.run(go())
