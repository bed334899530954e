"""Test which turn comes next, without a clock: each turn lasts until the test ends it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from upriver.control.fair_queue import LEAST_S, FairQueue, Turn

ROUNDING = 1e-6


class Given(NamedTuple):
    number: int
    tenant: str
    request: Hashable
    seconds: float


class Desk:
    """Request turns, record the order in which they are given, and end them."""

    def __init__(self, slots: int = 1, *, one_each: bool = False) -> None:
        self.turns = FairQueue(slots, one_each=one_each)
        self.asked: dict[Turn, Given] = {}
        self.given: list[Given] = []
        self.holding: list[Turn] = []
        self._numbers = itertools.count()

    @property
    def tenants(self) -> list[str]:
        return [each.tenant for each in self.given]

    def ask(self, tenant: str, *, weight: float = 1.0, request: Hashable = "r", seconds: float = 1.0) -> Turn:
        turn = self.turns.ask(tenant=tenant, weight=weight, request=request, seconds=seconds)
        self.asked[turn] = Given(next(self._numbers), tenant, request, seconds)
        self._deal()
        return turn

    def finish(self, which: int = 0, took: float | None = None) -> None:
        turn = self.holding.pop(which % len(self.holding))
        if took is not None:
            self.turns.spent(self.asked[turn].tenant, self.asked[turn].seconds, took)
        self.turns.end(turn)
        self._deal()

    def finish_all(self) -> None:
        while self.holding:
            self.finish()

    def give_up(self, turn: Turn) -> None:
        self.turns.give_up(turn)
        if turn in self.holding:
            self.holding.remove(turn)
            self.given.remove(self.asked[turn])
        self._deal()

    def _deal(self) -> None:
        while (turn := self.turns.grant()) is not None:
            self.holding.append(turn)
            self.given.append(self.asked[turn])


def test_a_free_slot_is_taken_at_once_and_nobody_gets_more() -> None:
    desk = Desk(2)
    for tenant in "abc":
        desk.ask(tenant)
    assert desk.tenants == ["a", "b"]
    assert (desk.turns.taken, desk.turns.waiting) == (2, 1)
    assert [desk.turns.waiting_of(tenant) for tenant in "abcd"] == [0, 0, 1, 0]
    desk.finish()
    assert desk.tenants == ["a", "b", "c"]
    desk.finish_all()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


def test_one_request_alternates_with_thirty_two_of_another_tenant() -> None:
    desk = Desk()
    for request in range(32):
        desk.ask("greedy", request=request)
    for _ in range(5):
        desk.ask("modest")
    desk.finish_all()
    assert desk.tenants == ["greedy", *["modest", "greedy"] * 5, *["greedy"] * 26]


def test_who_asks_for_the_next_turn_after_the_last_waits_for_one_turn_of_the_other() -> None:
    desk = Desk()
    for request in range(32):
        desk.ask("greedy", request=request)
    for _ in range(5):
        desk.ask("modest")
        desk.finish()  # the turn of the greedy tenant
        assert desk.tenants[-1] == "modest"
        desk.finish()
    assert desk.tenants == [*["greedy", "modest"] * 5, "greedy"]


def test_a_newcomer_waits_for_one_turn_of_each_other_tenant_at_most() -> None:
    desk = Desk()
    for tenant in "abc":
        for request in range(9):
            desk.ask(tenant, request=request)
    for _ in range(7):
        desk.finish()
    before = len(desk.given)
    desk.ask("new")
    for _ in range(4):
        desk.finish()
    passed = Counter(desk.tenants[before : desk.tenants.index("new")])
    assert set(passed.values()) <= {1}


def test_of_any_five_turns_one_is_the_tenants_of_a_quarter_of_the_weight() -> None:
    desk = Desk()
    for request in range(40):
        desk.ask("heavy", weight=4.0, request=request)
    for request in range(10):
        desk.ask("light", weight=1.0, request=request)
    desk.finish_all()
    assert len(desk.given) == 50
    assert {desk.tenants[at : at + 5].count("light") for at in range(46)} == {1}


def test_seconds_equal_out_not_turns() -> None:
    desk = Desk()
    for request in range(20):
        desk.ask("slow", request=request, seconds=1.25)
    for request in range(200):
        desk.ask("quick", request=request, seconds=0.125)
    seconds = Counter[str]()
    for at in range(150):
        seconds[desk.given[at].tenant] += desk.given[at].seconds
        first = 1.25  # it was alone
        assert abs(seconds["slow"] - seconds["quick"]) <= first + 1.25 + 0.125
        desk.finish()
    assert seconds["quick"] > 15


def test_a_request_has_one_turn_at_a_time_where_that_is_said() -> None:
    desk = Desk(2, one_each=True)
    for request in "xxy":
        desk.ask("a", request=request)
    assert [each.request for each in desk.given] == ["x", "y"]
    desk.finish(1)  # a slot is free, and the waiting request already has a turn
    assert (len(desk.given), desk.turns.taken, desk.turns.waiting) == (2, 1, 1)
    desk.ask("b", request="z")
    assert desk.given[-1].request == "z"
    desk.finish()
    assert desk.given[-1].request == "x"
    desk.finish_all()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


def test_requests_of_a_tenant_take_turns_and_each_is_served_in_order() -> None:
    desk = Desk()
    desk.ask("other")
    for request in "xxxyyz":
        desk.ask("a", request=request)
    desk.finish_all()
    numbers = [(each.request, each.number) for each in desk.given[1:]]
    assert numbers == [("x", 1), ("y", 4), ("z", 6), ("x", 2), ("y", 5), ("x", 3)]


def test_what_costs_nothing_is_not_had_for_ever() -> None:
    desk = Desk()
    for request in range(10):
        desk.ask("free", request=request, seconds=0.0)
        desk.ask("paid", request=request, seconds=LEAST_S)
    desk.finish_all()
    assert desk.tenants == ["free", "paid"] * 10


# ---------------------------------------------------------------------------------------------- giving up


def test_a_turn_that_is_given_up_while_it_waits_is_gone() -> None:
    desk = Desk()
    desk.ask("first")
    waiting = desk.ask("a")
    desk.ask("b")
    desk.give_up(waiting)
    assert desk.turns.waiting == 1
    desk.finish()
    assert desk.tenants == ["first", "b"]
    desk.finish()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)


def test_a_turn_that_is_given_up_unused_costs_its_tenant_nothing() -> None:
    desk = Desk()
    desk.ask("first")
    for request in range(3):
        desk.ask("a", request=request)
        desk.ask("b", request=request)
    desk.finish()
    assert desk.tenants == ["first", "a"]
    desk.give_up(desk.holding[0])
    desk.finish_all()
    assert desk.tenants == ["first", "b", "a", "b", "a", "b"]


# ---------------------------------------------------------------------------------- credit and corrections


def test_who_was_away_has_no_credit() -> None:
    desk = Desk()
    for request in range(30):
        desk.ask("a", request=request)
    leaving = desk.ask("b", seconds=10.0)
    for _ in range(5):
        desk.finish()
    desk.give_up(leaving)
    desk.ask("b", seconds=10.0)
    before = len(desk.given)
    for _ in range(10):
        desk.finish()
    assert desk.tenants[before:] == ["a"] * 9 + ["b"]


def test_without_a_pause_the_same_turn_comes_sooner() -> None:
    """Check the counterpart of the last test: a granted turn counts while another tenant waits."""
    desk = Desk()
    for request in range(30):
        desk.ask("a", request=request)
    desk.ask("b", seconds=10.0)
    for _ in range(10):
        desk.finish()
    assert desk.tenants == ["a"] * 10 + ["b"]


@pytest.mark.parametrize(("expected", "took"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_estimates_that_were_wrong_are_made_up_for(expected: float, took: float) -> None:
    desk = Desk()
    for request in range(60):
        desk.ask("wrong", request=request, seconds=expected)
        desk.ask("right", request=request, seconds=1.0)
    seconds = Counter[str]()
    for at in range(60):
        tenant = desk.given[at].tenant
        spent = took if tenant == "wrong" else 1.0
        seconds[tenant] += spent
        desk.finish(took=spent)
    assert sum(seconds.values()) >= 60
    assert abs(seconds["wrong"] - seconds["right"]) <= expected + 1.0 + abs(took - expected)


def test_corrections_of_who_is_not_there_are_nobodys() -> None:
    desk = Desk()
    desk.turns.spent("nobody", 1.0, 100.0)
    desk.ask("other")
    for _ in range(3):
        desk.ask("nobody")
        desk.ask("other")
    desk.finish_all()
    assert desk.tenants == ["other", "nobody", "other", "nobody", "other", "nobody", "other"]


# --------------------------------------------------------------------------------------- slots and waits


def test_what_is_expected_of_a_further_request() -> None:
    desk = Desk()
    assert desk.turns.expected_wait_s("a", 1.0) == 0
    desk.ask("a", seconds=2.0)
    assert desk.turns.expected_wait_s("b", 1.0) == 1  # half of the current computation
    desk.ask("a", request="x", seconds=1.0)
    desk.ask("a", request="y", seconds=3.0)
    desk.ask("a", request="x", seconds=5.0)
    assert desk.turns.expected_wait_s("b", 1.0) == 1 + 1  # and the next turn of the other tenant
    assert desk.turns.expected_wait_s("a", 1.0) == 1 + 1 + 3  # and one turn for each request of its own
    desk.ask("b", weight=2.0, request="z", seconds=2.0)
    assert desk.turns.expected_wait_s("a", 1.0) == 1 + 4 + 2  # and all waiting requests of the other tenant
    assert desk.turns.expected_wait_s("b", 2.0) == 1 + 2 + 1


def test_nothing_is_expected_where_a_slot_is_free() -> None:
    desk = Desk(2)
    desk.ask("a", seconds=2.0)
    assert desk.turns.expected_wait_s("b", 1.0) == 0
    desk.ask("a", request="other", seconds=4.0)
    assert desk.turns.expected_wait_s("b", 1.0) == (2 + 4) / 2 / 2


# --------------------------------------------------------------------------------------- random schedules

lengths = st.lists(st.floats(0.01, 10), min_size=1, max_size=25)
weights = st.floats(0.1, 10)
passers_by = st.lists(st.tuples(st.integers(0, 40), st.floats(0.01, 10), weights), max_size=8)


@settings(max_examples=examples(150))
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
    desk = Desk(slots)
    for number in range(slots):
        desk.ask("before", request=number)
    for tenant, lasting, weight in (("a", first, by[0]), ("b", second, by[1])):
        for number, seconds in enumerate(lasting):
            desk.ask(tenant, weight=weight, request=number % 3, seconds=seconds)
    served, seen = {"a": 0.0, "b": 0.0}, len(desk.given)
    ahead = [0.0]
    for step in itertools.count():
        if not (desk.turns.waiting_of("a") and desk.turns.waiting_of("b")):
            break
        for at, seconds, weight in others:
            if at == step:
                desk.ask(f"other {seconds}", weight=weight, seconds=seconds)
        desk.finish(step)
        for each in desk.given[seen:]:
            if each.tenant in served:
                served[each.tenant] += each.seconds
                ahead.append(served["a"] / by[0] - served["b"] / by[1])
        seen = len(desk.given)
    bound = max(first) / by[0] + max(second) / by[1]
    assert max(ahead) - min(ahead) <= bound + ROUNDING


@settings(max_examples=examples(150))
@given(
    queues=st.lists(st.tuples(lengths, weights), min_size=1, max_size=4),
    steps=st.integers(0, 20),
    seconds=st.floats(0.01, 10),
    weight=weights,
)
def test_a_newcomer_waits_for_its_share_and_one_turn_of_each_other(
    queues: list[tuple[list[float], float]], steps: int, seconds: float, weight: float
) -> None:
    desk = Desk()
    for tenant, (lasting, share) in enumerate(queues):
        for number, each in enumerate(lasting):
            desk.ask(str(tenant), weight=share, request=number, seconds=each)
    for _ in range(steps):
        if desk.turns.waiting:
            desk.finish()
    before = len(desk.given)
    desk.ask("new", weight=weight, seconds=seconds)
    while "new" not in desk.tenants:
        desk.finish()
    between = Counter[str]()
    for passed in desk.given[before : desk.tenants.index("new")]:
        between[passed.tenant] += passed.seconds
    for tenant, (lasting, share) in enumerate(queues):
        assert between[str(tenant)] <= seconds * share / weight + max(lasting) + ROUNDING


step = st.tuples(st.sampled_from(["ask", "ask", "end", "end", "give up"]), st.integers(0, 11))


@settings(max_examples=examples(300))
@given(steps=st.lists(step, max_size=60), slots=st.integers(1, 3), one_each=st.booleans())
def test_every_turn_comes_or_is_given_up(steps: list[tuple[str, int]], slots: int, one_each: bool) -> None:
    desk, gone = Desk(slots, one_each=one_each), set[int]()
    turns: list[Turn] = []
    for kind, number in steps:
        if kind == "ask":
            name, length = "abc"[number % 3], (0.0, 0.5, 2.0)[number % 3]
            turns.append(desk.ask(name, weight=1 + number % 2, request=number, seconds=length))
        elif kind == "end" and desk.holding:
            desk.finish(number)
        elif kind == "give up" and turns:
            turn = turns[number % len(turns)]
            if turn in desk.holding or desk.asked[turn] not in desk.given:
                gone.add(desk.asked[turn].number)
            desk.give_up(turn)
        waiting = len(turns) - len(desk.given) - len(gone)
        assert (desk.turns.waiting, desk.turns.taken) == (waiting, len(desk.holding))
        assert one_each or waiting == 0 or desk.turns.taken == slots
    while desk.turns.waiting:
        assert desk.holding, "turns wait, and none is taken"
        desk.finish()
    desk.finish_all()
    assert (desk.turns.taken, desk.turns.waiting) == (0, 0)
    numbers = [each.number for each in desk.given]
    assert len(set(numbers)) == len(numbers)
    assert {number for number in range(len(turns))} - gone == set(numbers)


def test_end_of_the_last_turn_forgets_the_tenant() -> None:
    queue = FairQueue(slots=1)
    for name in ("a", "b"):
        queue.ask(tenant=name, weight=1.0, request=object(), seconds=1.0)
    while (turn := queue.grant()) is not None:
        queue.end(turn)
    assert not queue._tenants
