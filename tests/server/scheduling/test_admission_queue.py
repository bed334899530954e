"""Test which requests wait for memory, and which goes first when some is released."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upriver.control.batch_adaptation import adaptive, static
from upriver.control.memory_budget import BASE, MemoryBudget
from upriver.errors import DoesNotFit, Overloaded, QuotaExceeded
from upriver.server.programs.cache import ProgramCache
from upriver.server.scheduling import admission_queue as lines
from upriver.server.scheduling.admission_queue import (
    AdmissionQueue,
    AdmissionRequest,
    NeededProgram,
    QueueFull,
    ask_for,
)
from upriver.server.tenants import ANYONE, Tenant


class Now:
    """Clock that the test sets."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Waiting:
    """Admission queue with its budget, and the outcome of each request that waits in it."""

    def __init__(
        self,
        total=100,
        *,
        most=8,
        waiting=16,
        waiting_bytes=10**6,
        policy=static,
        min_batch=1,
        spare=lambda: False,
    ):
        self.now = Now()
        self.budget = MemoryBudget(total)
        self.shelf = ProgramCache(self.budget, most_bytes=total, on_evict=lambda key: None)
        self.line = AdmissionQueue(
            self.budget,
            self.shelf,
            policy,
            most=most,
            most_waiting=waiting,
            most_waiting_bytes=waiting_bytes,
            min_batch=min_batch,
            spare=spare,
            now=self.now,
        )
        self.gone_in = []

    def come(self, name, nbytes, tenant=ANYONE, program=None, sizes=None):
        """Start a task that waits in the queue."""
        programs = {size: program for size in sizes or {1: 0}} if program is not None else {}
        return self.stand(
            name, AdmissionRequest(tenant=tenant, nbytes=sizes or {1: nbytes}, programs=programs)
        )

    def stand(self, name, wanted):
        async def wait():
            admitted = await self.line.wait(wanted)
            self.gone_in.append(name)
            return admitted

        return asyncio.create_task(wait(), name=name)

    async def keep(self, key, nbytes, owner=ANYONE.name):
        """Keep a loaded program that no request uses."""

        async def read():
            return SimpleNamespace(key=key)

        self.shelf.take(key, nbytes, owner=owner)
        await self.shelf.load(key, read)
        self.shelf.give_back(key)

    def leave(self, task, tenant=ANYONE):
        admitted = task.result()
        admitted.hold.release()
        self.line.leave(admitted, tenant)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)
    await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0)


def test_as_many_go_as_there_is_memory_for_and_the_next_when_some_is_back():
    async def go():
        w = Waiting(100)
        tasks = [w.come(f"r{number}", 40) for number in range(4)]
        await settle()
        assert w.gone_in == ["r0", "r1"] and w.budget.reserved_bytes == 80
        w.leave(tasks[0])
        await settle()
        assert w.gone_in == ["r0", "r1", "r2"]
        w.leave(tasks[1])
        w.leave(tasks[2])
        await settle()
        assert w.gone_in == ["r0", "r1", "r2", "r3"]
        w.leave(tasks[3])
        assert w.budget.reserved_bytes == 0 and w.line.waiting == 0

    asyncio.run(go())


def test_a_large_request_is_not_overtaken_for_ever():
    async def go():
        w = Waiting(100)
        a, b = Tenant(name="a"), Tenant(name="b")
        first = w.come("first", 60, a)
        await settle()
        large = w.come("large", 90, b)
        small = [w.come(f"small{number}", 30, a) for number in range(3)]
        await settle()
        w.now.seconds = lines.PATIENCE_S + 1
        late = w.come("late", 5, a)
        w.leave(first, a)
        await settle()
        held = [task for task in small if task.done()]
        for task in held:
            w.leave(task, a)
        await settle()
        assert w.gone_in[len(held) + 1] == "large", w.gone_in
        w.leave(large, b)
        await settle()
        assert {"late", "small0", "small1", "small2"} <= set(w.gone_in)
        assert late.done()

    asyncio.run(go())


def test_many_that_have_waited_long_go_no_sooner_than_the_first_of_another_tenant():
    async def go():
        w = Waiting(20)
        greedy, modest = Tenant(name="greedy"), Tenant(name="modest")
        tasks = [w.come(f"g{number}", 10, greedy) for number in range(6)]
        await settle()
        w.now.seconds = lines.PATIENCE_S + 1
        w.come("m", 10, modest)
        await settle()
        assert w.gone_in == ["g0", "g1"]
        w.leave(tasks[0], greedy)
        await settle()
        assert w.gone_in == ["g0", "g1", "m"]

    asyncio.run(go())


def test_who_has_a_large_program_does_not_come_last_for_it():
    async def go():
        w = Waiting(80)
        large, small = Tenant(name="large"), Tenant(name="small")
        await w.keep("large/p", 60, owner="large")
        tasks = [w.come(f"s{number}", 10, small) for number in range(2)]
        await settle()
        w.come("s2", 10, small)
        w.come("l0", 10, large, program=NeededProgram(key="large/p", nbytes=60))
        await settle()
        assert w.gone_in == ["s0", "s1"]
        w.leave(tasks[0], small)
        await settle()
        assert w.gone_in == ["s0", "s1", "l0"]

    asyncio.run(go())


def test_memory_goes_to_whoever_holds_the_least_of_it_for_its_weight():
    async def go():
        w = Waiting(100)
        greedy, modest = Tenant(name="greedy"), Tenant(name="modest")
        tasks = [w.come(f"g{number}", 25, greedy) for number in range(6)]
        await settle()
        m = w.come("m", 25, modest)
        await settle()
        assert "m" not in w.gone_in
        w.leave(tasks[0], greedy)
        await settle()
        assert w.gone_in[-1] == "m" and m.done()

    asyncio.run(go())


def test_weight_buys_a_larger_share():
    async def go():
        w = Waiting(100)
        light, heavy = Tenant(name="light"), Tenant(name="heavy", weight=3.0)
        block = w.come("block", 100)
        await settle()
        tasks = [w.come(f"l{number}", 20, light) for number in range(5)]
        tasks += [w.come(f"h{number}", 20, heavy) for number in range(5)]
        await settle()
        w.leave(block)
        await settle()
        went = w.gone_in[1:]
        assert sum(name.startswith("h") for name in went) in (3, 4) and len(went) == 5, went
        for task in tasks:
            task.cancel()

    asyncio.run(go())


def test_a_tenant_holds_at_most_its_share_but_always_gets_one():
    async def go():
        w = Waiting(100)
        tenant = Tenant(name="t", memory_share=0.5)
        tasks = [w.come(f"r{number}", 30, tenant) for number in range(3)]
        await settle()
        assert w.gone_in == ["r0"]
        w.leave(tasks[0], tenant)
        await settle()
        assert w.gone_in == ["r0", "r1"]
        for task in tasks[1:]:
            task.cancel()
        await settle()
        large = w.come("large", 80, Tenant(name="u", memory_share=0.5))
        w.budget.hold(0, owner="x").release()
        await settle()
        if not large.done():  # r1 was admitted at the moment of its cancellation, or still holds memory
            w.leave(tasks[1], tenant)
            await settle()
        assert large.done()

    asyncio.run(go())


def test_idle_programs_are_not_held_against_a_tenants_share_and_those_in_use_are():
    async def go():
        tenant = Tenant(name="t", memory_share=0.5)
        w = Waiting(100)
        await w.keep("t/idle", 45, owner="t")
        for number in range(3):
            w.come(f"r{number}", 20, tenant)
        await settle()
        assert w.gone_in == ["r0", "r1"]
        w, program = Waiting(100), NeededProgram(key="t/p", nbytes=30)
        for number in range(3):
            w.come(f"r{number}", 10, tenant, program=program)
        await settle()
        assert w.gone_in == ["r0", "r1"]

    asyncio.run(go())


def test_what_was_sent_along_leaves_no_room_for_the_work_on_it():
    async def go():
        w = Waiting(100)
        wanted = AdmissionRequest(tenant=ANYONE, nbytes={1: 70}, programs={}, body_nbytes=40)
        with w.budget.hold(40, owner="t"), pytest.raises(DoesNotFit, match=r"70 bytes.*60"):
            await w.stand("r", wanted)

    asyncio.run(go())


def test_what_is_only_kept_for_later_goes_where_nobody_could_go_otherwise():
    async def go():
        kept = []

        def spare():
            if kept:
                kept.pop().release()
                return True
            return False

        w = Waiting(100, spare=spare)
        kept.extend(w.budget.hold(30, owner="kept") for _ in range(2))
        first = w.come("r0", 30)
        await settle()
        w.come("r1", 60)
        await settle()
        assert w.gone_in == ["r0"] and len(kept) == 2
        w.leave(first)
        await settle()
        assert w.gone_in == ["r0", "r1"] and len(kept) == 1

    asyncio.run(go())


def with_body(w, name, nbytes, body_nbytes, tenant=ANYONE):
    """Wait in the queue with a body, which is released when the request leaves."""

    async def stand():
        with w.budget.hold(body_nbytes, owner=tenant.name):
            wanted = AdmissionRequest(tenant=tenant, nbytes={1: nbytes}, programs={}, body_nbytes=body_nbytes)
            admitted = await w.line.wait(wanted)
            w.gone_in.append(name)
            w.line.leave(admitted, tenant)
            admitted.hold.release()

    return asyncio.create_task(stand(), name=name)


@pytest.mark.parametrize("older_nbytes", [60, 55])
def test_of_requests_that_wait_for_each_others_bodies_the_younger_one_is_sent_back_at_once(older_nbytes):
    async def go():
        w = Waiting(100)
        block = w.come("block", 50)
        await settle()
        older = with_body(w, "older", older_nbytes, 30, Tenant(name="a"))
        await settle()
        younger = with_body(w, "younger", 57, 20, Tenant(name="b"))
        await settle()
        w.leave(block)
        await settle()
        assert w.gone_in == ["block", "older"] and older.done()
        with pytest.raises(Overloaded, match="came first") as refused:
            await younger
        assert refused.value.retry_after_s >= 1
        assert w.budget.reserved_bytes == 0

    asyncio.run(go())


def test_no_more_are_sent_back_than_somebody_needs_and_none_for_memory_that_others_hold():
    async def go():
        w = Waiting(100)
        upload = w.budget.hold(45, owner="upload")
        tasks = [with_body(w, f"r{number}", 50, 10) for number in range(3)]
        await settle()
        assert w.line.waiting == 3  # not even all bodies would suffice for the first
        upload.resize(30)
        await settle()
        assert w.gone_in == ["r0", "r1"]
        assert [task.exception() is None for task in tasks] == [True, True, False]
        upload.release()

    asyncio.run(go())


def test_who_never_fits_is_told_so_at_once_and_names_the_numbers():
    async def go():
        w = Waiting(100)
        w.budget.hold(30, owner=BASE)
        with pytest.raises(DoesNotFit, match=r"80 bytes.*70"):
            await w.come("r", 60, program=NeededProgram(key="t/p", nbytes=20))

    asyncio.run(go())


def test_a_long_line_refuses_with_a_time_to_come_back():
    async def go():
        w = Waiting(100, waiting=2)
        block = w.come("block", 100)
        await settle()
        waiting = [w.come(f"r{number}", 50) for number in range(2)]
        await settle()
        with pytest.raises(Overloaded) as refused:
            await w.come("r2", 50)
        assert 1 <= refused.value.retry_after_s <= 60
        assert isinstance(refused.value.__cause__, QueueFull)
        w.leave(block)
        await settle()
        assert all(task.done() for task in waiting)
        full = Waiting(100, waiting_bytes=60)
        full.come("block", 100)
        await settle()
        full.come("r0", 50)
        await settle()
        with pytest.raises(Overloaded):
            await full.come("r1", 50)

    asyncio.run(go())


def test_a_full_line_makes_room_for_a_tenant_with_less_of_it():
    async def go():
        w = Waiting(100, waiting=3)
        a, b = Tenant(name="a"), Tenant(name="b")
        block = w.come("block", 100, a)
        await settle()
        many = [w.come(f"a{number}", 10, a) for number in range(3)]
        await settle()
        w.come("b0", 10, b)
        await settle()
        assert w.line.waiting == 3
        with pytest.raises(Overloaded) as refused:
            await many[2]  # the request that came last
        assert isinstance(refused.value.__cause__, QueueFull)
        with pytest.raises(Overloaded):
            await w.come("b1", 10, b)  # it would have as much as the other
        w.leave(block, a)
        await settle()
        assert sorted(w.gone_in) == ["a0", "a1", "b0", "block"]

    asyncio.run(go())


def test_nobody_loses_a_place_to_a_request_that_does_not_get_one():
    async def go():
        w = Waiting(100, waiting_bytes=60)
        a, b = Tenant(name="a"), Tenant(name="b")
        w.come("block", 100, a)
        await settle()
        many = [w.come(f"a{number}", 30, a) for number in range(2)]
        await settle()
        with pytest.raises(Overloaded):
            await w.come("b0", 40, b)  # next to one of them it does not fit, and it is too large for both
        assert w.line.waiting == 2
        w.come("b1", 20, b)
        await settle()
        assert w.line.waiting_bytes == 50 and many[1].done() and not many[0].done()
        with pytest.raises(Overloaded):
            await many[1]

    asyncio.run(go())


def test_what_no_quota_lets_wait_is_not_told_to_come_back():
    async def go():
        w = Waiting(1000)
        tenant = Tenant(name="t", max_waiting_bytes=50)
        with pytest.raises(DoesNotFit, match="asks for 60 bytes of memory, and t may have 50 waiting"):
            await w.come("large", 60, tenant)
        block = w.come("block", 1000)
        await settle()
        first = w.come("first", 40, tenant)
        await settle()
        with pytest.raises(QuotaExceeded):
            await w.come("second", 40, tenant)
        first.cancel()
        w.leave(block)

    asyncio.run(go())


def test_quotas_are_a_tenants_own():
    async def go():
        w = Waiting(100)
        tenant = Tenant(name="t", max_requests=2)
        tasks = [w.come(f"r{number}", 10, tenant) for number in range(2)]
        await settle()
        with pytest.raises(QuotaExceeded, match="t"):
            await w.come("r2", 10, tenant)
        assert (await w.come("other", 10)) is not None
        w.leave(tasks[0], tenant)
        assert (await w.come("r3", 10, tenant)) is not None

    asyncio.run(go())


def test_whoever_gives_up_leaves_nothing_behind():
    async def go():
        w = Waiting(100)
        block = w.come("block", 100)
        await settle()
        tasks = [w.come(f"r{number}", 40) for number in range(3)]
        await settle()
        tasks[0].cancel()
        await settle()
        assert w.line.waiting == 2
        w.leave(block)
        tasks[1].cancel()  # at the very moment in which it may be admitted
        await settle()
        assert w.gone_in[-1] == "r2"
        w.leave(tasks[2])
        await settle()
        assert w.budget.reserved_bytes == 0 and w.line.waiting == 0

    asyncio.run(go())


def test_a_program_is_held_once_for_all_who_share_it_and_idle_ones_make_room():
    async def go():
        w = Waiting(100)
        program = NeededProgram(key="t/p", nbytes=30)
        tasks = [w.come(f"r{number}", 30, program=program) for number in range(2)]
        await settle()
        assert w.gone_in == ["r0", "r1"] and w.budget.reserved_bytes == 90
        for task in tasks:
            w.leave(task)
        await settle()
        assert (await w.come("large", 100)).hold.nbytes == 100

    asyncio.run(go())


def test_an_idle_program_that_others_wait_for_makes_room_where_nobody_could_go_otherwise():
    async def go():
        w = Waiting(100)
        await w.keep("t/a", 60)
        b = w.come("b", 10, program=NeededProgram(key="t/b", nbytes=60))
        a = w.come("a", 10, program=NeededProgram(key="t/a", nbytes=60))
        await settle()
        assert w.gone_in == ["b"]
        w.leave(b)
        await settle()
        assert a.done() and w.shelf.keys == {"t/a"}

    asyncio.run(go())


def test_an_idle_program_that_others_wait_for_stays_as_long_as_there_is_room_without_it():
    async def go():
        w = Waiting(100)
        await w.keep("t/a", 40)
        w.come("b", 10, program=NeededProgram(key="t/b", nbytes=30))
        w.come("a", 10, program=NeededProgram(key="t/a", nbytes=40))
        await settle()
        assert w.gone_in == ["b", "a"]

    asyncio.run(go())


def test_a_size_whose_program_does_not_fit_gives_way_to_one_whose_program_is_there():
    async def go():
        w = Waiting(100, policy=adaptive, min_batch=16)
        await w.keep("t/small", 30)
        programs = {16: NeededProgram(key="t/small", nbytes=30), 64: NeededProgram(key="t/large", nbytes=30)}
        task = w.stand("r", AdmissionRequest(tenant=ANYONE, nbytes={16: 16, 64: 64}, programs=programs))
        await settle()
        assert task.result().size == 16
        assert w.budget.reserved_bytes == 46

    asyncio.run(go())


@pytest.mark.parametrize("sizes", [{3: 100}, {7: 99}, {16: 1, 32: 99}, {16: 50, 32: 100}])
def test_whatever_fits_at_all_gets_its_memory_in_the_end(sizes):
    async def go():
        for policy in (static, adaptive):
            w = Waiting(100, policy=policy)
            task = w.come("r", 0, sizes=sizes)
            await settle()
            assert task.done(), policy
            assert task.result().hold.nbytes == sizes[task.result().size]

    asyncio.run(go())


@given(st.dictionaries(st.integers(1, 4096), st.integers(1 << 20, 1 << 36), min_size=1, max_size=8))
def test_a_policy_never_thinks_that_a_request_takes_less_than_it_does(nbytes):
    sizes = sorted(nbytes)
    ask = ask_for(1, AdmissionRequest(tenant=ANYONE, nbytes=nbytes, programs={}), sizes)
    assert ask.sizes == tuple(sizes)
    assert all(ask.fixed_bytes + size * ask.bytes_per_sample >= nbytes[size] for size in sizes)
    if len(sizes) == 1:
        assert ask.fixed_bytes + sizes[0] * ask.bytes_per_sample == nbytes[sizes[0]]


def test_a_program_that_has_come_and_that_nobody_uses_makes_room():
    async def go():
        w = Waiting(100)
        upload = w.shelf.coming(owner="t")
        w.shelf.grow(upload, 60)
        task = w.come("r", 80)
        await settle()
        assert not task.done()
        w.shelf.put(SimpleNamespace(key="t/p"), upload)
        w.shelf.over("t/p", upload)
        await settle()
        assert task.done() and not w.shelf.keys

    asyncio.run(go())


def test_the_adaptive_way_fills_memory_and_takes_smaller_batches_when_it_is_short():
    async def go():
        sizes = {16: 16, 32: 32, 64: 64}
        w = Waiting(100, policy=adaptive, min_batch=16)
        alone = await w.come("alone", 0, sizes=sizes)
        assert alone.size == 64
        alone.hold.release()
        w.line.leave(alone, ANYONE)
        tasks = [w.come(f"r{number}", 0, sizes=sizes) for number in range(4)]
        await settle()
        taken = [task.result().size for task in tasks if task.done()]
        assert sum(taken) <= 100 and len(taken) == 4 and sum(taken) >= 96, taken

    asyncio.run(go())


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 2), st.booleans()), min_size=1, max_size=25),
    st.sampled_from([static, adaptive]),
    st.integers(1, 4),
)
def test_everyone_who_stays_is_admitted_once_and_memory_is_never_overdrawn(requests, policy, most):
    async def go():
        w = Waiting(100, policy=policy, most=most, waiting=100)
        tenants = [Tenant(name=f"t{number}", weight=1.0 + number) for number in range(3)]
        tasks = []
        for number, (nbytes, at, _) in enumerate(requests):
            tasks.append((w.come(str(number), nbytes, tenants[at]), tenants[at]))
        left = set()
        for _ in range(10 * len(requests)):
            await settle()
            assert w.budget.reserved_bytes <= w.budget.total_bytes
            through = [each for each in tasks if each[0].done() and each[0] not in left]
            assert len(through) <= most
            if not through:
                break
            w.leave(*through[0])
            left.add(through[0][0])
        assert len(left) == len(tasks)
        assert sorted(w.gone_in, key=int) == [str(number) for number in range(len(requests))]
        assert w.budget.reserved_bytes == 0

    asyncio.run(go())


def test_retry_after_follows_the_rate_at_which_memory_comes_free():
    async def go():
        w = Waiting(1000)
        block = w.come("block", 1000)
        await settle()
        for number in range(5):
            w.come(f"r{number}", 200)
        await settle()
        assert w.line.retry_after_s() == lines.LEAST_RETRY_S
        w.now.seconds = 7
        assert w.line.retry_after_s() == 7  # nothing was released meanwhile
        found = []
        for seconds, nbytes in ((10, 100), (20, 300), (30, 600)):
            w.now.seconds = seconds
            w.line.freed(nbytes)
            found.append(w.line.retry_after_s())
        assert found == [10, 25, 20]  # 1000 bytes, at 100, 40 and 50 a second
        w.leave(block)

    asyncio.run(go())


def test_those_who_are_sent_away_are_told_to_come_back_one_after_another():
    async def go():
        w = Waiting(1000, waiting=4)
        block = w.come("block", 1000)
        await settle()
        for number in range(4):
            w.come(f"r{number}", 100)
        await settle()
        w.line.freed(200)
        w.now.seconds = 4  # 50 bytes a second: the waiting requests need 8 s, each 2 s

        async def told():
            with pytest.raises(Overloaded) as refused:
                await w.come("late", 100)
            return refused.value.retry_after_s

        assert [await told() for _ in range(3)] == [8, 10, 12]
        w.now.seconds += 6  # nothing was released meanwhile: 20 bytes a second
        assert [await told() for _ in range(2)] == [20, 25]
        assert [await told() for _ in range(20)][-3:] == [60, 60, 60]
        w.line.freed(4800)
        assert [await told() for _ in range(2)] == [4, 4]  # 500 a second: 4 times 0.8 s, at least 1 s
        w.now.seconds += 8
        assert await told() == 2
        w.leave(block)

    asyncio.run(go())


def test_the_first_of_a_tenant_goes_beside_as_many_as_may():
    """Check that no tenant waits for a place alone, however long others ask. Memory limits still hold."""

    async def go():
        w = Waiting(100, most=2)
        greedy, modest = Tenant(name="greedy"), Tenant(name="modest")
        tasks = [w.come(f"g{number}", 10, greedy) for number in range(4)]
        await settle()
        assert w.gone_in == ["g0", "g1"]
        mine = [w.come(f"m{number}", 10, modest) for number in range(2)]
        await settle()
        assert w.gone_in == ["g0", "g1", "m0"]
        w.leave(tasks[0], greedy)
        await settle()
        assert len(w.gone_in) == 3  # two are running, as many as allowed
        w.leave(mine[0], modest)
        await settle()
        assert w.gone_in[3:] == ["m1"]
        large = w.come("large", 90, Tenant(name="third"))
        await settle()
        assert "large" not in w.gone_in
        for task in (large, *tasks[2:]):
            task.cancel()

    asyncio.run(go())


def test_what_it_waited_for_others_is_told_and_what_it_waited_for_its_own_is_not():
    async def go():
        w = Waiting(100)
        mine, yours = Tenant(name="mine"), Tenant(name="yours")
        there = [w.come("yours", 60, yours), w.come("mine", 20, mine)]
        await settle()
        next_one = w.come("next", 40, mine)
        await settle()
        w.now.seconds = 4.0
        w.leave(there[0], yours)
        await settle()
        assert next_one.result().waited_s == pytest.approx(3.0)  # three quarters went to others
        own = w.come("own", 90, mine)
        await settle()
        w.now.seconds = 9.0
        w.leave(there[1], mine)
        w.leave(next_one, mine)
        await settle()
        assert own.result().waited_s == 0.0

    asyncio.run(go())
