"""Test that tasks get the memory that the queue grants, and that cancelled ones keep none."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from upriver.control.admission_queue import Admission, AdmissionQueue, AdmissionRequest
from upriver.control.batch_adaptation import static
from upriver.control.memory_budget import MemoryBudget
from upriver.errors import Overloaded
from upriver.server.programs.cache import ProgramCache
from upriver.server.scheduling import admission_gate
from upriver.server.scheduling.admission_gate import AdmissionGate
from upriver.server.tenants import ANYONE, Tenant


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def settle() -> None:
    """Run what is scheduled: rounds are timers of no seconds."""
    for _ in range(20):
        await asyncio.sleep(0)


class Waiting:
    """Requests that wait as tasks, and the names of those that were admitted."""

    def __init__(self, *, waiting: int = 16) -> None:
        self.budget = MemoryBudget(100)
        self.program_cache = ProgramCache(self.budget, most_bytes=100, on_evict=lambda key: None)
        queue = AdmissionQueue(
            self.budget, self.program_cache, static, most=8, most_waiting=waiting, most_waiting_bytes=10**6
        )
        self.line = AdmissionGate(queue, self.budget)
        self.gone_in: list[str] = []

    def come(self, name: str, nbytes: int, tenant: Tenant = ANYONE, body: int = 0) -> asyncio.Task[Admission]:
        async def wait() -> Admission:
            wanted = AdmissionRequest(tenant=tenant, nbytes={1: nbytes}, programs={}, body_nbytes=body)
            with self.budget.hold(body, owner=tenant.name):
                admitted = await self.line.wait(wanted)
            self.gone_in.append(name)
            return admitted

        return asyncio.create_task(wait(), name=name)


@in_loop
async def test_the_next_go_when_memory_comes_back_to_the_budget() -> None:
    w = Waiting()
    tasks = [w.come(f"r{number}", 40) for number in range(3)]
    await settle()
    assert w.gone_in == ["r0", "r1"]
    w.line.leave(tasks[0].result())
    await settle()
    assert w.gone_in == ["r0", "r1", "r2"]
    elsewhere = w.budget.hold(20, owner="other")
    last = w.come("last", 20)
    await settle()
    assert not last.done()
    elsewhere.release()
    await settle()
    assert last.done()


@in_loop
async def test_a_cancelled_task_leaves_nothing_behind() -> None:
    w = Waiting()
    block = w.come("block", 100)
    await settle()
    tasks = [w.come(f"r{number}", 40) for number in range(3)]
    await settle()
    tasks[0].cancel()
    await settle()
    assert w.line.queue.waiting == 2
    w.line.leave(block.result())
    tasks[1].cancel()  # at the very moment in which it may be admitted
    await settle()
    assert w.gone_in == ["block", "r2"]
    w.line.leave(tasks[2].result())
    await settle()
    assert w.budget.reserved_bytes == 0 and w.line.queue.waiting == 0


@in_loop
async def test_a_task_that_is_cancelled_as_it_is_admitted_gives_its_memory_back() -> None:
    w = Waiting()
    block = w.come("block", 100)
    await settle()
    unlucky, lucky = w.come("unlucky", 100), w.come("lucky", 100)
    await settle()
    w.line.leave(block.result())
    while w.budget.free_bytes:
        await asyncio.sleep(0)
    assert w.gone_in == ["block"] and unlucky.cancel()  # it has the memory, but does not know yet
    await settle()
    assert unlucky.cancelled() and w.gone_in == ["block", "lucky"]
    w.line.leave(lucky.result())
    assert w.budget.reserved_bytes == 0


@in_loop
async def test_a_cancelled_task_lets_another_one_go() -> None:
    w = Waiting()
    w.come("block", 60)
    await settle()
    large = w.come("large", 90, Tenant(name="a", weight=10.0))
    small = w.come("small", 40, Tenant(name="b"))
    await settle()
    assert not small.done()  # it does not overtake
    large.cancel()
    await settle()
    assert small.done()


@in_loop
async def test_a_request_that_is_sent_back_raises() -> None:
    w = Waiting(waiting=2)
    w.come("block", 100)
    await settle()
    _, second = [w.come(f"a{number}", 40, Tenant(name="a")) for number in range(2)]
    await settle()
    w.come("b0", 20, Tenant(name="b"))
    await settle()
    with pytest.raises(Overloaded, match="others have a right"):
        await second
    assert w.line.queue.waiting == 2


def test_a_request_that_waits_too_long_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        w = Waiting()
        block = w.come("block", 100)
        await settle()
        monkeypatch.setattr(admission_gate, "MAX_WAIT_S", 0.001)  # not before: the first one waits, too
        with pytest.raises(Overloaded, match="no memory came free") as refused:
            await w.come("late", 40)
        assert refused.value.retry_after_s >= 1
        w.line.leave(block.result())
        await settle()
        assert w.line.queue.waiting == 0 and w.budget.reserved_bytes == 0

    asyncio.run(main())


def test_those_that_wait_for_each_others_bodies_are_sent_back_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("upriver.control.admission_queue.WAY_S", 0.001)

    async def main() -> None:
        w = Waiting()
        tasks = [w.come(f"r{number}", 70, body=30) for number in range(3)]
        assert (await tasks[0]).nbytes == 70
        for task in tasks[1:]:
            with pytest.raises(Overloaded, match="came first"):
                await task

    asyncio.run(main())
