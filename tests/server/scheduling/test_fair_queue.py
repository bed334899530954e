"""Test which request computes next, without a clock: each turn lasts until the test ends it."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upriver.errors import ConfigError
from upriver.server.scheduling.fair_queue import LEAST_S, FairQueue

PASSES = 8
"""Passes of the event loop that end a turn, deal the next one and resume its task: three or four."""

ROUNDING = 1e-6


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def settle() -> None:
    for _ in range(PASSES):
        await asyncio.sleep(0)


class Given(NamedTuple):
    number: int
    tenant: str
    request: Hashable
    seconds: float


class Desk:
    """Request turns, record the order in which they are given, and end them."""

    def __init__(self, slots: int = 1) -> None:
        self.turns = FairQueue(slots)
        self.given: list[Given] = []
        self.holding: dict[int, asyncio.Future[float | None]] = {}
        self._numbers = itertools.count()

    @property
    def tenants(self) -> list[str]:
        return [each.tenant for each in self.given]

    def ask(
        self, tenant: str, *, weight: float = 1.0, request: Hashable = "r", seconds: float = 1.0
    ) -> asyncio.Task[None]:
        wanted = Given(next(self._numbers), tenant, request, seconds)
        return asyncio.get_running_loop().create_task(self._hold(wanted, weight))

    async def _hold(self, wanted: Given, weight: float) -> None:
        turn = self.turns.turn(
            tenant=wanted.tenant, weight=weight, request=wanted.request, seconds=wanted.seconds
        )
        async with turn:
            over = asyncio.get_running_loop().create_future()
            self.given.append(wanted)
            self.holding[wanted.number] = over
            try:
                took = await over
            finally:
                self.holding.pop(wanted.number, None)
            if took is not None:
                self.turns.spent(wanted.tenant, wanted.seconds, took)

    def end(self, which: int = 0, took: float | None = None) -> None:
        """End one of the current turns; its owner notices later."""
        number = list(self.holding)[which % len(self.holding)]
        over = self.holding.pop(number)
        if not over.done():
            over.set_result(took)

    async def finish(self, which: int = 0, took: float | None = None) -> None:
        self.end(which, took)
        await settle()

    async def finish_all(self) -> None:
        while self.holding:
            await self.finish()


@in_loop
async def test_a_free_slot_is_taken_at_once_and_nobody_gets_more() -> None:
    desk = Desk(2)
    for tenant in "abc":
        desk.ask(tenant)
    await settle()
    assert desk.tenants == ["a", "b"]
    assert (desk.turns.taken, desk.turns.waiting) == (2, 1)
    assert [desk.turns.waiting_of(tenant) for tenant in "abcd"] == [0, 0, 1, 0]
    await desk.finish()
    assert desk.tenants == ["a", "b", "c"]
    await desk.finish_all()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


@in_loop
async def test_a_turn_that_nobody_is_in_the_way_of_does_not_wait_for_the_loop() -> None:
    passed: list[str] = []
    asyncio.get_running_loop().call_soon(passed.append, "the loop")
    async with FairQueue(1).turn(tenant="a", weight=1.0, request=0, seconds=1.0):
        assert passed == []


@in_loop
async def test_one_request_alternates_with_thirty_two_of_another_tenant() -> None:
    desk = Desk()
    for request in range(32):
        desk.ask("greedy", request=request)
    await settle()
    for _ in range(5):
        desk.ask("modest")
    await settle()
    await desk.finish_all()
    assert desk.tenants == ["greedy", *["modest", "greedy"] * 5, *["greedy"] * 26]


@in_loop
async def test_who_asks_for_the_next_turn_after_the_last_waits_for_one_turn_of_the_other() -> None:
    desk = Desk()
    for request in range(32):
        desk.ask("greedy", request=request)
    await settle()
    for _ in range(5):
        desk.ask("modest")
        await settle()
        await desk.finish()  # the turn of the greedy tenant
        assert desk.tenants[-1] == "modest"
        await desk.finish()
    assert desk.tenants == [*["greedy", "modest"] * 5, "greedy"]


@in_loop
async def test_a_newcomer_waits_for_one_turn_of_each_other_tenant_at_most() -> None:
    desk = Desk()
    for tenant in "abc":
        for request in range(9):
            desk.ask(tenant, request=request)
    await settle()
    for _ in range(7):
        await desk.finish()
    before = len(desk.given)
    desk.ask("new")
    await settle()
    for _ in range(4):
        await desk.finish()
    passed = Counter(desk.tenants[before : desk.tenants.index("new")])
    assert set(passed.values()) <= {1}


@in_loop
async def test_of_any_five_turns_one_is_the_tenants_of_a_quarter_of_the_weight() -> None:
    desk = Desk()
    for request in range(40):
        desk.ask("heavy", weight=4.0, request=request)
    for request in range(10):
        desk.ask("light", weight=1.0, request=request)
    await settle()
    await desk.finish_all()
    assert len(desk.given) == 50
    assert {desk.tenants[at : at + 5].count("light") for at in range(46)} == {1}


@in_loop
async def test_seconds_equal_out_not_turns() -> None:
    desk = Desk()
    for request in range(20):
        desk.ask("slow", request=request, seconds=1.25)
    for request in range(200):
        desk.ask("quick", request=request, seconds=0.125)
    await settle()
    seconds = Counter[str]()
    for at in range(150):
        seconds[desk.given[at].tenant] += desk.given[at].seconds
        first = 1.25  # it was alone
        assert abs(seconds["slow"] - seconds["quick"]) <= first + 1.25 + 0.125
        await desk.finish()
    assert seconds["quick"] > 15


@in_loop
async def test_a_request_has_one_turn_at_a_time_where_that_is_said() -> None:
    desk = Desk()
    desk.turns = FairQueue(2, one_each=True)
    for request in "xxy":
        desk.ask("a", request=request)
    await settle()
    assert [each.request for each in desk.given] == ["x", "y"]
    await desk.finish(1)  # a slot is free, and the waiting request already has a turn
    assert (len(desk.given), desk.turns.taken, desk.turns.waiting) == (2, 1, 1)
    desk.ask("b", request="z")
    await settle()
    assert desk.given[-1].request == "z"
    await desk.finish()
    assert desk.given[-1].request == "x"
    await desk.finish_all()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


@in_loop
async def test_requests_of_a_tenant_take_turns_and_each_is_served_in_order() -> None:
    desk = Desk()
    desk.ask("other")
    await settle()
    for request in "xxxyyz":
        desk.ask("a", request=request)
    await settle()
    await desk.finish_all()
    numbers = [(each.request, each.number) for each in desk.given[1:]]
    assert numbers == [("x", 1), ("y", 4), ("z", 6), ("x", 2), ("y", 5), ("x", 3)]


@in_loop
async def test_what_costs_nothing_is_not_had_for_ever() -> None:
    desk = Desk()
    for request in range(10):
        desk.ask("free", request=request, seconds=0.0)
        desk.ask("paid", request=request, seconds=LEAST_S)
    await settle()
    await desk.finish_all()
    assert desk.tenants == ["free", "paid"] * 10


# ---------------------------------------------------------------------------------------------- giving up


@in_loop
async def test_a_turn_that_is_given_up_while_it_waits_is_gone() -> None:
    desk = Desk()
    desk.ask("first")
    await settle()
    waiting = desk.ask("a")
    desk.ask("b")
    await settle()
    assert waiting.cancel()
    await settle()
    assert (waiting.cancelled(), desk.turns.waiting) == (True, 1)
    await desk.finish()
    assert desk.tenants == ["first", "b"]
    await desk.finish()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


@in_loop
async def test_a_turn_that_is_given_up_as_it_comes_goes_to_the_next() -> None:
    desk = Desk()
    desk.ask("first")
    await settle()
    unlucky = desk.ask("a")
    desk.ask("b")
    await settle()
    desk.end()
    await asyncio.sleep(0)  # the first turn ends; "a" has the turn, but does not know yet
    assert (desk.turns.taken, desk.turns.waiting, desk.tenants) == (1, 1, ["first"])
    assert unlucky.cancel()
    await settle()
    assert (unlucky.cancelled(), desk.tenants) == (True, ["first", "b"])
    assert (desk.turns.taken, desk.turns.waiting) == (1, 0)


@in_loop
async def test_giving_up_in_the_same_moment_as_the_turn_before_ends_passes_it_on() -> None:
    desk = Desk()
    desk.ask("first")
    await settle()
    unlucky = desk.ask("a")
    desk.ask("b")
    await settle()
    desk.end()
    assert unlucky.cancel()  # before the first one's task has run
    await settle()
    assert (unlucky.cancelled(), desk.tenants) == (True, ["first", "b"])


@in_loop
async def test_who_asks_again_while_another_turn_is_being_given_up_is_not_forgotten() -> None:
    desk = Desk()
    desk.ask("first")
    await settle()
    unlucky = desk.ask("a")
    desk.ask("b")
    await settle()
    desk.end()
    desk.ask("a")
    assert unlucky.cancel()  # its task runs after the other two: by then its turn is gone, and "a" is back
    await settle()
    await desk.finish_all()
    assert (unlucky.cancelled(), desk.tenants) == (True, ["first", "b", "a"])
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


@in_loop
async def test_a_turn_ends_with_its_block_however_that_ends() -> None:
    desk = Desk()
    broken, stopped = desk.ask("a"), desk.ask("b")
    desk.ask("c")
    await settle()
    desk.holding.pop(0).set_exception(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await broken
    await settle()
    assert desk.tenants == ["a", "b"]
    assert stopped.cancel()
    await settle()
    assert (desk.tenants, desk.turns.taken) == (["a", "b", "c"], 1)


# ---------------------------------------------------------------------------------- credit and corrections


@in_loop
async def test_who_was_away_has_no_credit() -> None:
    desk = Desk()
    for request in range(30):
        desk.ask("a", request=request)
    await settle()
    leaving = desk.ask("b", seconds=10.0)
    await settle()
    for _ in range(5):
        await desk.finish()
    leaving.cancel()
    await settle()
    desk.ask("b", seconds=10.0)
    await settle()
    before = len(desk.given)
    for _ in range(10):
        await desk.finish()
    assert desk.tenants[before:] == ["a"] * 9 + ["b"]


@in_loop
async def test_without_a_pause_the_same_turn_comes_sooner() -> None:
    """Check the counterpart of the last test: a granted turn counts while another tenant waits."""
    desk = Desk()
    for request in range(30):
        desk.ask("a", request=request)
    desk.ask("b", seconds=10.0)
    await settle()
    for _ in range(10):
        await desk.finish()
    assert desk.tenants == ["a"] * 10 + ["b"]


@pytest.mark.parametrize(("expected", "took"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_estimates_that_were_wrong_are_made_up_for(expected: float, took: float) -> None:
    async def main() -> None:
        desk = Desk()
        for request in range(60):
            desk.ask("wrong", request=request, seconds=expected)
            desk.ask("right", request=request, seconds=1.0)
        await settle()
        seconds = Counter[str]()
        for at in range(60):
            tenant = desk.given[at].tenant
            spent = took if tenant == "wrong" else 1.0
            seconds[tenant] += spent
            await desk.finish(took=spent)
        assert sum(seconds.values()) >= 60
        assert abs(seconds["wrong"] - seconds["right"]) <= expected + 1.0 + abs(took - expected)

    asyncio.run(main())


@in_loop
async def test_corrections_of_who_is_not_there_are_nobodys() -> None:
    desk = Desk()
    desk.turns.spent("nobody", 1.0, 100.0)
    desk.ask("other")
    await settle()
    for _ in range(3):
        desk.ask("nobody")
        desk.ask("other")
    await settle()
    await desk.finish_all()
    assert desk.tenants == ["other", "nobody", "other", "nobody", "other", "nobody", "other"]


# --------------------------------------------------------------------------------------- slots and waits


@in_loop
async def test_workers_that_come_and_go() -> None:
    desk = Desk(0)
    for request in range(5):
        desk.ask("a", request=request)
    await settle()
    assert (len(desk.given), desk.turns.waiting) == (0, 5)
    desk.turns.set_slots(2)
    await settle()
    assert len(desk.given) == 2
    desk.turns.set_slots(1)
    await desk.finish()
    assert (len(desk.given), desk.turns.taken) == (2, 1)
    await desk.finish()
    assert (len(desk.given), desk.turns.taken) == (3, 1)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        desk.turns.set_slots(-1)


@in_loop
async def test_what_is_expected_of_a_further_request() -> None:
    desk = Desk()
    assert desk.turns.expected_wait_s("a", 1.0) == 0
    desk.ask("a", seconds=2.0)
    await settle()
    assert desk.turns.expected_wait_s("b", 1.0) == 1  # half of the current computation
    desk.ask("a", request="x", seconds=1.0)
    desk.ask("a", request="y", seconds=3.0)
    desk.ask("a", request="x", seconds=5.0)
    await settle()
    assert desk.turns.expected_wait_s("b", 1.0) == 1 + 1  # and the next turn of the other tenant
    assert desk.turns.expected_wait_s("a", 1.0) == 1 + 1 + 3  # and one turn for each request of its own
    desk.ask("b", weight=2.0, request="z", seconds=2.0)
    await settle()
    assert desk.turns.expected_wait_s("a", 1.0) == 1 + 4 + 2  # and all waiting requests of the other tenant
    assert desk.turns.expected_wait_s("b", 2.0) == 1 + 2 + 1


@in_loop
async def test_nothing_is_expected_where_a_slot_is_free() -> None:
    desk = Desk(2)
    desk.ask("a", seconds=2.0)
    await settle()
    assert desk.turns.expected_wait_s("b", 1.0) == 0
    desk.ask("a", request="other", seconds=4.0)
    await settle()
    assert desk.turns.expected_wait_s("b", 1.0) == (2 + 4) / 2 / 2


@pytest.mark.parametrize(
    ("weight", "seconds"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0), (1.0, float("inf"))]
)
def test_weights_and_seconds_are_numbers(weight: float, seconds: float) -> None:
    async def main() -> None:
        turns = FairQueue(1)
        with pytest.raises(ConfigError, match="must be a finite number"):
            async with turns.turn(tenant="a", weight=weight, request=0, seconds=seconds):
                pass
        assert (turns.taken, turns.waiting) == (0, 0)

    asyncio.run(main())


# --------------------------------------------------------------------------------------- random schedules

lengths = st.lists(st.floats(0.01, 10), min_size=1, max_size=25)
weights = st.floats(0.1, 10)
passers_by = st.lists(st.tuples(st.integers(0, 40), st.floats(0.01, 10), weights), max_size=8)


@settings(max_examples=150)
@given(
    first=lengths, second=lengths, by=st.tuples(weights, weights), others=passers_by, slots=st.integers(1, 3)
)
def test_tenants_that_wait_all_the_time_get_the_same_for_their_weight(
    first: list[float],
    second: list[float],
    by: tuple[float, float],
    others: list[tuple[int, float, float]],
    slots: int,
) -> None:
    async def main() -> None:
        desk = Desk(slots)
        for number in range(slots):
            desk.ask("before", request=number)
        await settle()
        for tenant, lasting, weight in (("a", first, by[0]), ("b", second, by[1])):
            for number, seconds in enumerate(lasting):
                desk.ask(tenant, weight=weight, request=number % 3, seconds=seconds)
        await settle()
        served, seen = {"a": 0.0, "b": 0.0}, len(desk.given)
        ahead = [0.0]
        for step in itertools.count():
            if not (desk.turns.waiting_of("a") and desk.turns.waiting_of("b")):
                break
            for at, seconds, weight in others:
                if at == step:
                    desk.ask(f"other {seconds}", weight=weight, seconds=seconds)
            await settle()
            await desk.finish(step)
            for each in desk.given[seen:]:
                if each.tenant in served:
                    served[each.tenant] += each.seconds
                    ahead.append(served["a"] / by[0] - served["b"] / by[1])
            seen = len(desk.given)
        bound = max(first) / by[0] + max(second) / by[1]
        assert max(ahead) - min(ahead) <= bound + ROUNDING

    asyncio.run(main())


@settings(max_examples=150)
@given(
    queues=st.lists(st.tuples(lengths, weights), min_size=1, max_size=4),
    steps=st.integers(0, 20),
    seconds=st.floats(0.01, 10),
    weight=weights,
)
def test_a_newcomer_waits_for_its_share_and_one_turn_of_each_other(
    queues: list[tuple[list[float], float]], steps: int, seconds: float, weight: float
) -> None:
    async def main() -> None:
        desk = Desk()
        for tenant, (lasting, share) in enumerate(queues):
            for number, each in enumerate(lasting):
                desk.ask(str(tenant), weight=share, request=number, seconds=each)
        await settle()
        for _ in range(steps):
            if desk.turns.waiting:
                await desk.finish()
        before = len(desk.given)
        desk.ask("new", weight=weight, seconds=seconds)
        await settle()
        while "new" not in desk.tenants:
            await desk.finish()
        between = Counter[str]()
        for passed in desk.given[before : desk.tenants.index("new")]:
            between[passed.tenant] += passed.seconds
        for tenant, (lasting, share) in enumerate(queues):
            assert between[str(tenant)] <= seconds * share / weight + max(lasting) + ROUNDING

    asyncio.run(main())


step = st.tuples(
    st.sampled_from(["ask", "ask", "end", "end", "cancel", "pass", "pass", "slots"]), st.integers(0, 11)
)


@settings(max_examples=300)
@given(steps=st.lists(step, max_size=60), slots=st.integers(0, 3))
def test_every_turn_comes_or_is_given_up(steps: list[tuple[str, int]], slots: int) -> None:
    async def main() -> None:
        desk, most, tasks = Desk(slots), slots, []
        for kind, number in steps:
            if kind == "ask":
                name, length = "abc"[number % 3], (0.0, 0.5, 2.0)[number % 3]
                tasks.append(desk.ask(name, weight=1 + number % 2, request=number % 4, seconds=length))
            elif kind == "end" and desk.holding:
                desk.end(number)
            elif kind == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif kind == "pass":
                await asyncio.sleep(0)
            elif kind == "slots":
                most = number % 4
                desk.turns.set_slots(most)
            assert desk.turns.waiting == 0 or desk.turns.taken >= most
        desk.turns.set_slots(2)
        await settle()
        while desk.holding or desk.turns.waiting:
            assert desk.holding, "turns wait, and none is taken"
            assert len(desk.holding) == desk.turns.taken
            await desk.finish()
        assert desk.turns.taken == 0
        assert all(task.done() for task in tasks)
        numbers = [each.number for each in desk.given]
        assert len(set(numbers)) == len(numbers)
        assert {number for number, task in enumerate(tasks) if not task.cancelled()} <= set(numbers)

    asyncio.run(main())
