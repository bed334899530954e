"""Test which requests wait for memory, and which goes first when some is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from upriver.control import admission_queue as lines
from upriver.control.admission_queue import (
    Admission,
    AdmissionQueue,
    AdmissionRequest,
    NeededProgram,
    QueueFull,
    TenantShare,
    Waiter,
    ask_for,
)
from upriver.control.batch_adaptation import Policy, adaptive, static
from upriver.control.memory_budget import BASE, MemoryBudget, MemoryHold
from upriver.control.retry_times import LEAST_RETRY_S
from upriver.errors import DoesNotFit, Overloaded, QuotaExceeded
from upriver.server.programs.cache import ProgramCache

ANYONE = TenantShare(name="anyone")


class Coming:
    """One request, and what was decided on it."""

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter

    @property
    def done(self) -> bool:
        return self.waiter.outcome is not None

    def result(self) -> Admission:
        if isinstance(self.waiter.outcome, Overloaded):
            raise self.waiter.outcome
        assert self.waiter.outcome is not None, "it waits"
        return self.waiter.outcome


class Waiting:
    """Admission queue with its budget, a clock that the test sets, and the requests that were admitted."""

    def __init__(
        self,
        total: int = 100,
        *,
        most: int = 8,
        waiting: int = 16,
        waiting_bytes: int = 10**6,
        policy: Policy = static,
        min_batch: int = 1,
        spare: Callable[[], bool] = lambda: False,
    ) -> None:
        self.now = 0
        self.budget = MemoryBudget(total)
        self.program_cache = ProgramCache(self.budget, most_bytes=total, on_evict=lambda key: None)
        self.line = AdmissionQueue(
            self.budget,
            self.program_cache,
            policy,
            most=most,
            most_waiting=waiting,
            most_waiting_bytes=waiting_bytes,
            min_batch=min_batch,
            spare=spare,
        )
        self.budget.add_listener(lambda: setattr(self, "changed", True))
        self.changed = False
        self.names: dict[Waiter, str] = {}
        self.gone_in: list[str] = []
        self.bodies: dict[Waiter, MemoryHold] = {}

    def come(
        self,
        name: str,
        nbytes: int,
        tenant: TenantShare = ANYONE,
        program: NeededProgram | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> Coming:
        sizes = sizes or {1: nbytes}
        programs = dict.fromkeys(sizes, program) if program is not None else {}
        return self.stand(name, AdmissionRequest(tenant=tenant, nbytes=sizes, programs=programs))

    def stand(self, name: str, wanted: AdmissionRequest) -> Coming:
        waiter, _ = self.line.enter(wanted, self.now)
        self.names[waiter] = name
        return Coming(waiter)

    def with_body(self, name: str, nbytes: int, body_nbytes: int, tenant: TenantShare = ANYONE) -> Coming:
        """Let a request wait with a body; when it is decided on, it leaves and its body is released."""
        body = self.budget.hold(body_nbytes, owner=tenant.name)
        coming = self.stand(
            name, AdmissionRequest(tenant=tenant, nbytes={1: nbytes}, programs={}, body_nbytes=body_nbytes)
        )
        self.bodies[coming.waiter] = body
        return coming

    def settle(self) -> None:
        """Decide once, and again whenever the budget's listeners are called."""
        self.changed = True
        while self.changed:
            self.changed = False
            decided = self.line.decide(self.now).decided
            self.gone_in += [self.names[each] for each in decided if isinstance(each.outcome, Admission)]
            for each in decided:
                if each in self.bodies:  # its work takes no time
                    self.bodies.pop(each).release()
                    if isinstance(each.outcome, Admission):
                        self.line.leave(each.outcome, self.now)

    def admit(self, name: str, nbytes: int, *more: Any, **also: Any) -> Admission:
        coming = self.come(name, nbytes, *more, **also)
        self.settle()
        return coming.result()

    def keep(self, key: str, nbytes: int, owner: str = ANYONE.name) -> None:
        """Keep a loaded program that no request uses."""
        upload = self.program_cache.coming(owner=owner)
        self.program_cache.grow(upload, nbytes)
        self.program_cache.put(cast(Any, SimpleNamespace(key=key)), upload)
        self.program_cache.over(key, upload)

    def leave(self, coming: Coming) -> None:
        self.line.leave(coming.result(), self.now)


def test_as_many_go_as_there_is_memory_for_and_the_next_when_some_is_back() -> None:
    w = Waiting(100)
    tasks = [w.come(f"r{number}", 40) for number in range(4)]
    w.settle()
    assert w.gone_in == ["r0", "r1"] and w.budget.reserved_bytes == 80
    assert [w.line.admitted_of(name) for name in (ANYONE.name, "another")] == [2, 0]
    w.leave(tasks[0])
    w.settle()
    assert w.gone_in == ["r0", "r1", "r2"]
    w.leave(tasks[1])
    w.leave(tasks[2])
    w.settle()
    assert w.gone_in == ["r0", "r1", "r2", "r3"]
    w.leave(tasks[3])
    assert w.budget.reserved_bytes == 0 and w.line.waiting == 0 == w.line.admitted_of(ANYONE.name)


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    w = Waiting(100)
    a, b = TenantShare(name="a"), TenantShare(name="b")
    first = w.come("first", 60, a)
    w.settle()
    large = w.come("large", 90, b)
    small = [w.come(f"small{number}", 30, a) for number in range(3)]
    w.settle()
    w.now = lines.PATIENCE_S + 1
    late = w.come("late", 5, a)
    w.leave(first)
    w.settle()
    held = [task for task in small if task.done]
    for task in held:
        w.leave(task)
    w.settle()
    assert w.gone_in[len(held) + 1] == "large", w.gone_in
    w.leave(large)
    w.settle()
    assert {"late", "small0", "small1", "small2"} <= set(w.gone_in)
    assert late.done


def test_many_that_have_waited_long_go_no_sooner_than_the_first_of_another_tenant() -> None:
    w = Waiting(20)
    greedy, modest = TenantShare(name="greedy"), TenantShare(name="modest")
    tasks = [w.come(f"g{number}", 10, greedy) for number in range(6)]
    w.settle()
    w.now = lines.PATIENCE_S + 1
    w.come("m", 10, modest)
    w.settle()
    assert w.gone_in == ["g0", "g1"]
    w.leave(tasks[0])
    w.settle()
    assert w.gone_in == ["g0", "g1", "m"]


def test_who_has_a_large_program_does_not_come_last_for_it() -> None:
    w = Waiting(80)
    large, small = TenantShare(name="large"), TenantShare(name="small")
    w.keep("large/p", 60, owner="large")
    tasks = [w.come(f"s{number}", 10, small) for number in range(2)]
    w.settle()
    w.come("s2", 10, small)
    w.come("l0", 10, large, program=NeededProgram(key="large/p", nbytes=60))
    w.settle()
    assert w.gone_in == ["s0", "s1"]
    w.leave(tasks[0])
    w.settle()
    assert w.gone_in == ["s0", "s1", "l0"]


def test_memory_goes_to_whoever_holds_the_least_of_it_for_its_weight() -> None:
    w = Waiting(100)
    greedy, modest = TenantShare(name="greedy"), TenantShare(name="modest")
    tasks = [w.come(f"g{number}", 25, greedy) for number in range(6)]
    w.settle()
    m = w.come("m", 25, modest)
    w.settle()
    assert "m" not in w.gone_in
    w.leave(tasks[0])
    w.settle()
    assert w.gone_in[-1] == "m" and m.done


def test_weight_buys_a_larger_share() -> None:
    w = Waiting(100)
    light, heavy = TenantShare(name="light"), TenantShare(name="heavy", weight=3.0)
    block = w.come("block", 100)
    w.settle()
    tasks = [w.come(f"l{number}", 20, light) for number in range(5)]
    tasks += [w.come(f"h{number}", 20, heavy) for number in range(5)]
    w.settle()
    w.leave(block)
    w.settle()
    went = w.gone_in[1:]
    assert sum(name.startswith("h") for name in went) in (3, 4) and len(went) == 5, went


def test_a_tenant_holds_at_most_its_share_but_always_gets_one() -> None:
    w = Waiting(100)
    tenant = TenantShare(name="t", memory_share=0.5)
    tasks = [w.come(f"r{number}", 30, tenant) for number in range(3)]
    w.settle()
    assert w.gone_in == ["r0"]
    w.leave(tasks[0])
    w.settle()
    assert w.gone_in == ["r0", "r1"]
    w.line.give_up(tasks[2].waiter)
    large = w.come("large", 80, TenantShare(name="u", memory_share=0.5))
    w.settle()
    assert not large.done
    w.leave(tasks[1])
    w.settle()
    assert large.done


def test_idle_programs_are_not_held_against_a_tenants_share_and_those_in_use_are() -> None:
    tenant = TenantShare(name="t", memory_share=0.5)
    w = Waiting(100)
    w.keep("t/idle", 45, owner="t")
    for number in range(3):
        w.come(f"r{number}", 20, tenant)
    w.settle()
    assert w.gone_in == ["r0", "r1"]
    w, program = Waiting(100), NeededProgram(key="t/p", nbytes=30)
    for number in range(3):
        w.come(f"r{number}", 10, tenant, program=program)
    w.settle()
    assert w.gone_in == ["r0", "r1"]


def test_what_was_sent_along_leaves_no_room_for_the_work_on_it() -> None:
    w = Waiting(100)
    wanted = AdmissionRequest(tenant=ANYONE, nbytes={1: 70}, programs={}, body_nbytes=40)
    with w.budget.hold(40, owner="t"), pytest.raises(DoesNotFit, match=r"70 bytes.*60"):
        w.stand("r", wanted)


def test_what_is_only_kept_for_later_goes_where_nobody_could_go_otherwise() -> None:
    kept = []

    def spare():
        if kept:
            kept.pop().release()
            return True
        return False

    w = Waiting(100, spare=spare)
    kept.extend(w.budget.hold(30, owner="kept") for _ in range(2))
    first = w.come("r0", 30)
    w.settle()
    w.come("r1", 60)
    w.settle()
    assert w.gone_in == ["r0"] and len(kept) == 2
    w.leave(first)
    w.settle()
    assert w.gone_in == ["r0", "r1"] and len(kept) == 1


@pytest.mark.parametrize("older_nbytes", [60, 55])
def test_of_requests_that_wait_for_each_others_bodies_the_younger_one_is_sent_back_at_once(
    older_nbytes,
) -> None:
    w = Waiting(100)
    block = w.come("block", 50)
    w.settle()
    older = w.with_body("older", older_nbytes, 30, TenantShare(name="a"))
    w.settle()
    younger = w.with_body("younger", 57, 20, TenantShare(name="b"))
    w.settle()
    w.leave(block)
    w.settle()
    assert w.gone_in == ["block", "older"] and older.done
    with pytest.raises(Overloaded, match="came first") as refused:
        younger.result()
    assert refused.value.retry_after_s >= 1
    assert w.budget.reserved_bytes == 0


def test_no_more_are_sent_back_than_somebody_needs_and_none_for_memory_that_others_hold() -> None:
    w = Waiting(100)
    upload = w.budget.hold(45, owner="upload")
    tasks = [w.with_body(f"r{number}", 50, 10) for number in range(3)]
    w.settle()
    assert w.line.waiting == 3  # not even all bodies would suffice for the first
    upload.resize(30)
    w.settle()
    assert w.gone_in == ["r0", "r1"]
    assert [isinstance(task.waiter.outcome, Admission) for task in tasks] == [True, True, False]
    upload.release()


def test_who_never_fits_is_told_so_at_once_and_names_the_numbers() -> None:
    w = Waiting(100)
    w.budget.hold(30, owner=BASE)
    with pytest.raises(DoesNotFit, match=r"80 bytes.*70"):
        w.come("r", 60, program=NeededProgram(key="t/p", nbytes=20))


def test_a_long_line_refuses_with_a_time_to_come_back() -> None:
    w = Waiting(100, waiting=2)
    block = w.come("block", 100)
    w.settle()
    waiting = [w.come(f"r{number}", 50) for number in range(2)]
    w.settle()
    with pytest.raises(Overloaded) as refused:
        w.come("r2", 50)
    assert 1 <= refused.value.retry_after_s <= 60
    assert isinstance(refused.value.__cause__, QueueFull)
    w.leave(block)
    w.settle()
    assert all(task.done for task in waiting)
    full = Waiting(100, waiting_bytes=60)
    full.come("block", 100)
    full.settle()
    full.come("r0", 50)
    full.settle()
    with pytest.raises(Overloaded):
        full.come("r1", 50)


def test_a_full_line_makes_room_for_a_tenant_with_less_of_it() -> None:
    w = Waiting(100, waiting=3)
    a, b = TenantShare(name="a"), TenantShare(name="b")
    block = w.come("block", 100, a)
    w.settle()
    many = [w.come(f"a{number}", 10, a) for number in range(3)]
    w.settle()
    w.come("b0", 10, b)
    w.settle()
    assert w.line.waiting == 3
    with pytest.raises(Overloaded) as refused:
        many[2].result()  # the request that came last
    assert isinstance(refused.value.__cause__, QueueFull)
    with pytest.raises(Overloaded):
        w.come("b1", 10, b)  # it would have as much as the other
    w.leave(block)
    w.settle()
    assert sorted(w.gone_in) == ["a0", "a1", "b0", "block"]


def test_nobody_loses_a_place_to_a_request_that_does_not_get_one() -> None:
    w = Waiting(100, waiting_bytes=60)
    a, b = TenantShare(name="a"), TenantShare(name="b")
    w.come("block", 100, a)
    w.settle()
    many = [w.come(f"a{number}", 30, a) for number in range(2)]
    w.settle()
    with pytest.raises(Overloaded):
        w.come("b0", 40, b)  # next to one of them it does not fit, and it is too large for both
    assert w.line.waiting == 2
    w.come("b1", 20, b)
    w.settle()
    assert w.line.waiting_bytes == 50 and many[1].done and not many[0].done
    with pytest.raises(Overloaded):
        many[1].result()


def test_what_no_quota_lets_wait_is_not_told_to_come_back() -> None:
    w = Waiting(1000)
    tenant = TenantShare(name="t", max_waiting_bytes=50)
    with pytest.raises(DoesNotFit, match="asks for 60 bytes of memory, and t may have 50 waiting"):
        w.come("large", 60, tenant)
    w.come("block", 1000)
    w.settle()
    w.come("first", 40, tenant)
    w.settle()
    with pytest.raises(QuotaExceeded):
        w.come("second", 40, tenant)


def test_quotas_are_a_tenants_own() -> None:
    w = Waiting(100)
    tenant = TenantShare(name="t", max_requests=2)
    tasks = [w.come(f"r{number}", 10, tenant) for number in range(2)]
    w.settle()
    with pytest.raises(QuotaExceeded, match="t"):
        w.come("r2", 10, tenant)
    w.admit("other", 10)
    w.leave(tasks[0])
    w.admit("r3", 10, tenant)


def test_who_gives_up_leaves_nothing_behind() -> None:
    w = Waiting(100)
    block = w.come("block", 100)
    w.settle()
    tasks = [w.come(f"r{number}", 40) for number in range(3)]
    w.line.give_up(tasks[0].waiter)
    w.line.give_up(tasks[0].waiter)
    assert w.line.waiting == 2
    w.leave(block)
    w.line.give_up(tasks[1].waiter)
    w.settle()
    assert w.gone_in == ["block", "r2"]
    w.leave(tasks[2])
    assert w.budget.reserved_bytes == 0 and w.line.waiting == 0


def test_who_waits_too_long_is_told_when_to_retry_and_waits_no_more() -> None:
    w = Waiting(100)
    block = w.come("block", 100)
    w.settle()
    late = w.come("late", 40)
    w.now = 30
    error = w.line.time_out(late.waiter, w.now)
    assert str(error) == "no memory came free within 30 s" and error.retry_after_s == 30
    w.leave(block)
    w.settle()
    assert w.gone_in == ["block"] and w.budget.reserved_bytes == 0


def test_a_program_is_held_once_for_all_who_share_it_and_idle_ones_make_room() -> None:
    w = Waiting(100)
    program = NeededProgram(key="t/p", nbytes=30)
    tasks = [w.come(f"r{number}", 30, program=program) for number in range(2)]
    w.settle()
    assert w.gone_in == ["r0", "r1"] and w.budget.reserved_bytes == 90
    for task in tasks:
        w.leave(task)
    w.settle()
    assert w.admit("large", 100).hold.nbytes == 100


def test_an_idle_program_that_others_wait_for_makes_room_where_nobody_could_go_otherwise() -> None:
    w = Waiting(100)
    w.keep("t/a", 60)
    b = w.come("b", 10, program=NeededProgram(key="t/b", nbytes=60))
    a = w.come("a", 10, program=NeededProgram(key="t/a", nbytes=60))
    w.settle()
    assert w.gone_in == ["b"]
    w.leave(b)
    w.settle()
    assert a.done and w.program_cache.keys == {"t/a"}


def test_an_idle_program_that_others_wait_for_stays_as_long_as_there_is_room_without_it() -> None:
    w = Waiting(100)
    w.keep("t/a", 40)
    w.come("b", 10, program=NeededProgram(key="t/b", nbytes=30))
    w.come("a", 10, program=NeededProgram(key="t/a", nbytes=40))
    w.settle()
    assert w.gone_in == ["b", "a"]


def test_a_size_whose_program_does_not_fit_gives_way_to_one_whose_program_is_there() -> None:
    w = Waiting(100, policy=adaptive, min_batch=16)
    w.keep("t/small", 30)
    programs = {16: NeededProgram(key="t/small", nbytes=30), 64: NeededProgram(key="t/large", nbytes=30)}
    task = w.stand("r", AdmissionRequest(tenant=ANYONE, nbytes={16: 16, 64: 64}, programs=programs))
    w.settle()
    assert task.result().size == 16
    assert w.budget.reserved_bytes == 46


@pytest.mark.parametrize("sizes", [{3: 100}, {7: 99}, {16: 1, 32: 99}, {16: 50, 32: 100}])
def test_whatever_fits_at_all_gets_its_memory_in_the_end(sizes) -> None:
    for policy in (static, adaptive):
        w = Waiting(100, policy=policy)
        task = w.come("r", 0, sizes=sizes)
        w.settle()
        assert task.done, policy
        assert task.result().hold.nbytes == sizes[task.result().size]


@given(st.dictionaries(st.integers(1, 4096), st.integers(1 << 20, 1 << 36), min_size=1, max_size=8))
def test_a_policy_never_thinks_that_a_request_takes_less_than_it_does(nbytes) -> None:
    sizes = sorted(nbytes)
    ask = ask_for(1, AdmissionRequest(tenant=ANYONE, nbytes=nbytes, programs={}), sizes)
    assert ask.sizes == tuple(sizes)
    assert all(ask.fixed_bytes + size * ask.bytes_per_sample >= nbytes[size] for size in sizes)
    if len(sizes) == 1:
        assert ask.fixed_bytes + sizes[0] * ask.bytes_per_sample == nbytes[sizes[0]]


def test_a_program_that_has_come_and_that_nobody_uses_makes_room() -> None:
    w = Waiting(100)
    upload = w.program_cache.coming(owner="t")
    w.program_cache.grow(upload, 60)
    task = w.come("r", 80)
    w.settle()
    assert not task.done
    w.program_cache.put(SimpleNamespace(key="t/p"), upload)
    w.program_cache.over("t/p", upload)
    w.settle()
    assert task.done and not w.program_cache.keys


def test_the_adaptive_way_fills_memory_and_takes_smaller_batches_when_it_is_short() -> None:
    sizes = {16: 16, 32: 32, 64: 64}
    w = Waiting(100, policy=adaptive, min_batch=16)
    alone = w.admit("alone", 0, sizes=sizes)
    assert alone.size == 64
    w.line.leave(alone, w.now)
    tasks = [w.come(f"r{number}", 0, sizes=sizes) for number in range(4)]
    w.settle()
    taken = [task.result().size for task in tasks if task.done]
    assert sum(taken) <= 100 and len(taken) == 4 and sum(taken) >= 96, taken


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 2), st.booleans()), min_size=1, max_size=25),
    st.sampled_from([static, adaptive]),
    st.integers(1, 4),
)
def test_everyone_who_stays_is_admitted_once_and_memory_is_never_overdrawn(requests, policy, most) -> None:
    w = Waiting(100, policy=policy, most=most, waiting=100)
    tenants = [TenantShare(name=f"t{number}", weight=1.0 + number) for number in range(3)]
    tasks = []
    for number, (nbytes, at, _) in enumerate(requests):
        tasks.append((w.come(str(number), nbytes, tenants[at]), tenants[at]))
    left = set()
    for _ in range(10 * len(requests)):
        w.settle()
        assert w.budget.reserved_bytes <= w.budget.total_bytes
        through = [each for each in tasks if each[0].done and each[0] not in left]
        assert len(through) <= most
        if not through:
            break
        w.leave(through[0][0])
        left.add(through[0][0])
    assert len(left) == len(tasks)
    assert sorted(w.gone_in, key=int) == [str(number) for number in range(len(requests))]
    assert w.budget.reserved_bytes == 0


def test_retries_follow_what_waits_and_what_came_free() -> None:
    w = Waiting(1000, waiting=2)
    block = w.come("block", 1000)
    w.settle()
    assert w.line.retry_after_s(w.now) == LEAST_RETRY_S
    for number in range(2):
        w.come(f"r{number}", 800)
    w.now = 7
    assert w.line.retry_after_s(w.now) == 7  # nothing was released meanwhile
    w.leave(block)
    w.now = 17
    assert w.line.retry_after_s(w.now) == 16  # 1600 bytes, at 100 a second
    told = []
    for _ in range(3):
        with pytest.raises(Overloaded) as refused:
            w.come("late", 200)
        told.append(refused.value.retry_after_s)
    assert told == [16, 18, 20]


def test_the_first_of_a_tenant_goes_beside_as_many_as_may() -> None:
    """Check that no tenant waits for a place alone, however long others ask. Memory limits still hold."""
    w = Waiting(100, most=2)
    greedy, modest = TenantShare(name="greedy"), TenantShare(name="modest")
    tasks = [w.come(f"g{number}", 10, greedy) for number in range(4)]
    w.settle()
    assert w.gone_in == ["g0", "g1"]
    mine = [w.come(f"m{number}", 10, modest) for number in range(2)]
    w.settle()
    assert w.gone_in == ["g0", "g1", "m0"]
    w.leave(tasks[0])
    w.settle()
    assert len(w.gone_in) == 3  # two are running, as many as allowed
    w.leave(mine[0])
    w.settle()
    assert w.gone_in[3:] == ["m1"]
    w.come("large", 90, TenantShare(name="third"))
    w.settle()
    assert "large" not in w.gone_in


def test_what_it_waited_for_others_is_told_and_what_it_waited_for_its_own_is_not() -> None:
    w = Waiting(100)
    mine, yours = TenantShare(name="mine"), TenantShare(name="yours")
    there = [w.come("yours", 60, yours), w.come("mine", 20, mine)]
    w.settle()
    next_one = w.come("next", 40, mine)
    w.settle()
    w.now = 4.0
    w.leave(there[0])
    w.settle()
    assert next_one.result().waited_s == pytest.approx(3.0)  # three quarters went to others
    own = w.come("own", 90, mine)
    w.settle()
    w.now = 9.0
    w.leave(there[1])
    w.leave(next_one)
    w.settle()
    assert own.result().waited_s == 0.0


def test_least_is_the_first_size_that_makes_sense_or_the_largest() -> None:
    wanted = AdmissionRequest(tenant=ANYONE, nbytes={16: 1, 32: 2, 64: 4}, programs={})
    assert [wanted.least(size) for size in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 64]
