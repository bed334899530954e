"""Hold a run request in progress: its resolved names, its admission, and its running work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from upriver.control.admission_queue import Admission
from upriver.engine.clock import Clock
from upriver.errors import DeadlineExceeded
from upriver.protocol import RunRequest
from upriver.server.execution.worker_process import Job, Result
from upriver.server.observability import tracing
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.registry import KnownProgram
from upriver.server.scheduling.answer_memory import MemoryUse
from upriver.server.tenants import Tenant
from upriver.types import MicroBatch, Timings

if TYPE_CHECKING:
    from upriver.pipeline import Dataset
    from upriver.server.features.feature_store import RequestRows


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRequest:
    """Hold a decoded run request, with everything that it names looked up.

    Attributes:
        batches: The tensors sent along, one for each micro-batch; empty with a dataset.
        known: Its program, by samples of a forward pass; empty if it needs none.
        deadline: Time by which the request must end, by the event loop's clock.
        body: Keeps the memory of the body while it is needed.
        received_s: Seconds from the first byte of the body to the last.
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
    """Hold a run request that was admitted.

    Attributes:
        use: Keeps its memory while any work is done for it.
        groups: Indices of micro-batches that go through the model together.
        ahead: Whether a group may queue for its turn while the one before is computed; see
            `upriver.server.scheduling.footprint.works_ahead`. It gets its turn when that one is done, since
            memory is held for one group.
        waited_s: Seconds that it waited for admission.
        rows: Kept rows that answer it, and those that it adds; None if it keeps none.
        from_rows: Whether kept rows answer all of it. It holds memory for these alone, and no program.
        held: Releases its memory.
    """

    asked: ResolvedRequest
    admitted: Admission
    program: ProgramFiles | None
    use: MemoryUse
    groups: tuple[range, ...]
    to_end: bool = False
    ahead: bool = False
    waited_s: float = 0.0
    rows: RequestRows | None = None
    from_rows: bool = False
    held: ExitStack = field(default_factory=ExitStack)


class RequestComputation(Protocol):
    """Do the work of an admitted request."""

    async def job(self, order: AdmittedRequest, index: int, clock: Clock) -> Job | Result:
        """Return the work of one forward pass, with its inputs; its result if that is kept."""

    async def compute(
        self, order: AdmittedRequest, index: int, job: Job | Result, clock: Clock, begun: Callable[[], None]
    ) -> tuple[Result, Timings]:
        """Run one forward pass when it is this request's turn; call ``begun`` when the turn begins."""


class RequestWork:
    """Run the work of one request: a forward pass or two, and the reading for the next one.

    Group ``i`` begins when the answer of group ``i - 1`` is sent, except for its end. If the request may work
    ahead, group ``i - 1`` need only be in computation, and the answer of group ``i - 2`` sent.

    Args:
        first: Index of the first group that is not answered yet.
    """

    def __init__(self, order: AdmittedRequest, runner: RequestComputation, *, first: int = 0) -> None:
        self._order, self._runner, self._first = order, runner, first
        self._reading: dict[int, asyncio.Task[tuple[Job | Result, Clock]]] = {}
        self._computing: dict[int, asyncio.Task[tuple[Result, Timings]]] = {}
        self._last = self._sent = self._at_work = first - 1
        self._more()

    def sent(self, index: int) -> None:
        """Record that a group's answer is sent, except for its end."""
        self._sent = index
        self._more()

    async def result(self, index: int) -> tuple[Result, Timings]:
        """Return the result of a group; raise `DeadlineExceeded` if the request's deadline passes."""
        async with until(self._order.asked.deadline):
            found = await self._computing[index]
        del self._computing[index]  # otherwise it would keep the answer
        return found

    async def close(self) -> None:
        """Cancel all running work."""
        tasks = [*self._reading.values(), *self._computing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _more(self) -> None:
        index = self._last + 1
        in_turn = self._sent >= index - 1
        ahead = self._order.ahead and self._at_work >= index - 1 and self._sent >= index - 2
        if index < len(self._order.groups) and (in_turn or ahead):
            self._last = index
            self._computing[index] = asyncio.create_task(self._compute(index))

    def _read(self, index: int) -> None:
        if index not in self._reading and index < len(self._order.groups):
            self._reading[index] = asyncio.create_task(self._job(index))

    async def _job(self, index: int) -> tuple[Job | Result, Clock]:
        clock = tracing.clock(index)
        if index == self._first:
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
    """Bound a block by a deadline of the event loop's clock; raise `DeadlineExceeded` if it passes."""
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("the request exceeded its time limit") from None


def groups_of(request: RunRequest, joined: int) -> Iterator[range]:
    """Yield the micro-batches that go together: full ones, where only the request's last may be short."""
    whole = [len(ids) == request.micro_batch for ids in request.micro_batches]
    start = 0
    for stop in range(1, len(whole) + 1):
        if stop == len(whole) or stop - start == joined or not whole[stop - 1]:
            yield range(start, stop)
            start = stop
