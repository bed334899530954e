"""In which order a request's micro-batches reach the workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.engine.clock import Clock
from upriver.errors import UpriverError
from upriver.protocol import RunRequest
from upriver.server import ServerConfig
from upriver.server.handle import Result
from upriver.server.metrics import Metrics
from upriver.server.run import Order, Runner
from upriver.types import Timings

PARTS = 6


class Line:
    """Stands for the workers: notes who stands in line for one, and how many at once."""

    def __init__(self, computing: list[int], broken: int | None = None) -> None:
        self.came: list[int] = []
        self.most = self._now = 0
        self._computing, self._broken = computing, broken

    async def run(self, index: int, clock: Clock) -> Result:
        self.came.append(index)
        self._now += 1
        self.most = max(self.most, self._now)
        await turns(self._computing[index])
        self._now -= 1
        if index == self._broken:
            raise UpriverError("broken")
        return Result(head=bytes([index]), payload=memoryview(b""), timings=Timings(phases={}, stages={}))


async def turns(count: int) -> None:
    """Let others go on so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def heads(line: Line, reading: list[int], workers: int) -> list[int]:
    """What a request of `PARTS` micro-batches is answered with, where reading each takes so many turns."""
    runner = Runner(
        ServerConfig(stores={"default": "memory://"}, workers=workers),
        pool=cast(Any, line),
        programs=cast(Any, None),
        datasets=cast(Any, None),
        metrics=Metrics(),
    )

    async def job(order: Order, index: int, clock: Clock) -> Any:
        await turns(reading[index])
        return index

    runner._job = job  # type: ignore[method-assign]
    request = cast(RunRequest, SimpleNamespace(micro_batches=[(index,) for index in range(PARTS)]))
    order = Order(request=request, dataset=None, program=None, batches=[])
    return [result.head[0] async for result, _ in runner._in_order(order)]


@given(
    reading=st.lists(st.integers(0, 9), min_size=PARTS, max_size=PARTS),
    computing=st.lists(st.integers(0, 9), min_size=PARTS, max_size=PARTS),
    workers=st.integers(1, 3),
)
def test_what_is_due_stands_in_line_first_whichever_was_read_first(
    reading: list[int], computing: list[int], workers: int
) -> None:
    line = Line(computing)
    assert asyncio.run(heads(line, reading, workers)) == list(range(PARTS))
    assert sorted(line.came) == list(range(PARTS))
    assert line.most <= workers
    assert all(abs(at - index) < workers for at, index in enumerate(line.came)), line.came


def test_an_error_ends_an_answer_and_leaves_nothing_waiting() -> None:
    async def ask() -> None:
        with pytest.raises(UpriverError, match="broken"):
            await heads(Line([1] * PARTS, broken=2), [0] * PARTS, 1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(ask())
