"""Test that tasks get their turns, and that none is lost with a task that is cancelled."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from upriver.control.fair_queue import FairQueue
from upriver.server.scheduling.turn_gate import TurnGate

PASSES = 8
"""Passes of the event loop that end a turn, deal the next one and resume its task: three or four."""


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def settle() -> None:
    for _ in range(PASSES):
        await asyncio.sleep(0)


class Desk:
    """Request turns, record the order in which they are given, and end them."""

    def __init__(self, slots: int = 1) -> None:
        self.turns = TurnGate(FairQueue(slots))
        self.given: list[tuple[int, str]] = []
        self.holding: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    @property
    def tenants(self) -> list[str]:
        return [tenant for _, tenant in self.given]

    def ask(self, tenant: str, *, request: Hashable = "r", seconds: float = 1.0) -> asyncio.Task[None]:
        hold = self._hold(next(self._numbers), tenant, request, seconds)
        return asyncio.get_running_loop().create_task(hold)

    async def _hold(self, number: int, tenant: str, request: Hashable, seconds: float) -> None:
        async with self.turns.turn(tenant=tenant, weight=1.0, request=request, seconds=seconds):
            self.given.append((number, tenant))
            self.holding[number] = asyncio.get_running_loop().create_future()
            try:
                await self.holding[number]
            finally:
                self.holding.pop(number, None)

    def end(self, which: int = 0) -> None:
        """End one of the current turns; its owner notices later."""
        over = self.holding.pop(list(self.holding)[which % len(self.holding)])
        if not over.done():
            over.set_result(None)

    async def finish(self) -> None:
        self.end()
        await settle()

    async def finish_all(self) -> None:
        while self.holding:
            await self.finish()


@in_loop
async def test_a_turn_that_nobody_is_in_the_way_of_does_not_wait_for_the_loop() -> None:
    passed: list[str] = []
    asyncio.get_running_loop().call_soon(passed.append, "the loop")
    async with TurnGate(FairQueue(1)).turn(tenant="a", weight=1.0, request=0, seconds=1.0):
        assert passed == []


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
    assert (waiting.cancelled(), desk.turns.queue.waiting) == (True, 1)
    await desk.finish()
    assert desk.tenants == ["first", "b"]
    await desk.finish()
    assert (desk.turns.queue.taken, desk.turns.queue.waiting) == (0, 0)


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
    assert (desk.turns.queue.taken, desk.turns.queue.waiting, desk.tenants) == (1, 1, ["first"])
    assert unlucky.cancel()
    await settle()
    assert (unlucky.cancelled(), desk.tenants) == (True, ["first", "b"])
    assert (desk.turns.queue.taken, desk.turns.queue.waiting) == (1, 0)


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
    assert (desk.turns.queue.taken, desk.turns.queue.waiting) == (0, 0)


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
    assert (desk.tenants, desk.turns.queue.taken) == (["a", "b", "c"], 1)


step = st.tuples(st.sampled_from(["ask", "ask", "end", "end", "cancel", "pass", "pass"]), st.integers(0, 11))


@settings(max_examples=examples(100))
@given(steps=st.lists(step, max_size=60), slots=st.integers(1, 3))
def test_every_turn_comes_or_is_given_up(steps: list[tuple[str, int]], slots: int) -> None:
    async def main() -> None:
        desk, tasks = Desk(slots), []
        for kind, number in steps:
            if kind == "ask":
                length = (0.0, 0.5, 2.0)[number % 3]
                tasks.append(desk.ask("abc"[number % 3], request=number % 4, seconds=length))
            elif kind == "end" and desk.holding:
                desk.end(number)
            elif kind == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif kind == "pass":
                await asyncio.sleep(0)
            assert desk.turns.queue.waiting == 0 or desk.turns.queue.taken == slots
        await settle()
        while desk.holding or desk.turns.queue.waiting:
            assert desk.holding, "turns wait, and none is taken"
            assert len(desk.holding) == desk.turns.queue.taken
            await desk.finish()
        assert desk.turns.queue.taken == 0
        assert all(task.done() for task in tasks)
        numbers = [number for number, _ in desk.given]
        assert len(set(numbers)) == len(numbers)
        assert {number for number, task in enumerate(tasks) if not task.cancelled()} <= set(numbers)

    asyncio.run(main())
