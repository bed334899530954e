"""A run request on its way: what it asks for, what it was given, and what is under way for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from upriver.engine.clock import Clock
from upriver.errors import DeadlineExceeded
from upriver.pipeline import Dataset
from upriver.protocol import RunRequest
from upriver.server.execution.worker_process import Job, Result
from upriver.server.observability import tracing
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.registry import KnownProgram
from upriver.server.scheduling.admission_queue import Admission
from upriver.server.scheduling.memory_hold import MemoryUse
from upriver.server.tenants import Tenant
from upriver.types import MicroBatch, Timings


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRequest:
    """A run request that was read, with everything that it names looked up.

    Attributes:
        batches: The tensors sent along, one for each micro-batch; empty with a dataset.
        known: Its program, by the samples of a forward pass; empty where it needs none.
        deadline: When it must be through, by the loop's clock.
        body: Keeps the memory of what was sent as long as anyone needs it.
        body_nbytes: How much that is.
        received_s: From the first byte of the body to the last.
    """

    request: RunRequest
    tenant: Tenant
    dataset: Dataset | None
    batches: Sequence[MicroBatch]
    known: Mapping[int, KnownProgram]
    deadline: float
    body: MemoryUse | None = None
    body_nbytes: int = 0
    received_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdmittedRequest:
    """A run request that may go.

    Attributes:
        program: Its program, if it needs one.
        use: Keeps its memory as long as anyone works for it.
        groups: Indices of micro-batches that go through the model together.
        to_end: Whether it goes to the program's end.
        ahead: Whether a group may ask for its turn while the one before it is computed; see
            `upriver.server.scheduling.footprint.works_ahead`. It gets it when that one is through: memory is
            held for one.
        waited_s: For its admission.
    """

    asked: ResolvedRequest
    admitted: Admission
    program: ProgramFiles | None
    use: MemoryUse
    groups: tuple[range, ...]
    to_end: bool = False
    ahead: bool = False
    waited_s: float = 0.0


class Computes(Protocol):
    """What does the work of an order."""

    async def job(self, order: AdmittedRequest, index: int, clock: Clock) -> Job:
        """The work of one forward pass, with what it works on."""

    async def compute(
        self, order: AdmittedRequest, index: int, job: Job, clock: Clock, begun: Callable[[], None]
    ) -> tuple[Result, Timings]:
        """One forward pass, when it is this request's turn; ``begun`` is told when it is."""


class RequestWork:
    """What is under way for one request: a forward pass or two, and the reading of the next.

    A group is begun when the one before it is out but for its end; or, where the order may work ahead, when
    that one is being computed and the one before that is out.
    """

    def __init__(self, order: AdmittedRequest, runner: Computes) -> None:
        self._order, self._runner = order, runner
        self._reading: dict[int, asyncio.Task[tuple[Job, Clock]]] = {}
        self._computing: dict[int, asyncio.Task[tuple[Result, Timings]]] = {}
        self._last = self._sent = self._at_work = -1
        self._more()

    def sent(self, index: int) -> None:
        """All of a group's answer is out, but for its end."""
        self._sent = index
        self._more()

    async def result(self, index: int) -> tuple[Result, Timings]:
        """What came of a group.

        Raises:
            DeadlineExceeded: If the request's time is over.
            UpriverError: If it cannot be done.
        """
        async with until(self._order.asked.deadline):
            found = await self._computing[index]
        del self._computing[index]  # which would keep the answer
        return found

    async def close(self) -> None:
        """Give up whatever is under way."""
        tasks = [*self._reading.values(), *self._computing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _more(self) -> None:
        """Begin with the next group, if it may be."""
        index = self._last + 1
        in_turn = self._sent >= index - 1
        ahead = self._order.ahead and self._at_work >= index - 1 and self._sent >= index - 2
        if index < len(self._order.groups) and (in_turn or ahead):
            self._last = index
            self._computing[index] = asyncio.create_task(self._compute(index))

    def _read(self, index: int) -> None:
        if index not in self._reading and index < len(self._order.groups):
            self._reading[index] = asyncio.create_task(self._job(index))

    async def _job(self, index: int) -> tuple[Job, Clock]:
        clock = tracing.clock(index)
        if not index:
            clock.add("queue", self._order.waited_s)
            if self._order.asked.batches:
                clock.add("receive", self._order.asked.received_s)
        return await self._runner.job(self._order, index, clock), clock

    async def _compute(self, index: int) -> tuple[Result, Timings]:
        try:
            job, clock = await (self._reading.get(index) or self._job(index))
        finally:
            self._reading.pop(index, None)

        def begun() -> None:
            self._at_work = index
            self._read(index + 1)
            self._more()

        return await self._runner.compute(self._order, index, job, clock, begun)


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """A block that must be through by a time of the loop's clock.

    Raises:
        DeadlineExceeded: If it is not.
    """
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the time that this request may take is over") from None


def groups_of(request: RunRequest, joined: int) -> Iterator[range]:
    """Micro-batches that go together: whole ones, of which the last of the request may be short."""
    whole = [len(ids) == request.micro_batch for ids in request.micro_batches]
    start = 0
    for stop in range(1, len(whole) + 1):
        if stop == len(whole) or stop - start == joined or not whole[stop - 1]:
            yield range(start, stop)
            start = stop
