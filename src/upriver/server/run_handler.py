"""Handle ``POST /v1/run``: admit a request when memory has room for it, and answer one micro-batch at a time.

The server reads the next micro-batch while it computes one, and computes the next when the last bytes of that
one are sent. So a client that stalls holds one result, and the server computes no more for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from upriver.control.admission_queue import Admission, AdmissionRequest, QueueFull
from upriver.control.body_memory import BodyMemory, IncomingBodyMemory
from upriver.control.concurrency_limit import ConcurrencyLimit
from upriver.control.memory_budget import MemoryBudget
from upriver.control.service_costs import ServiceCosts
from upriver.engine.clock import Clock
from upriver.engine.read import read_samples_async
from upriver.errors import Overloaded, ProtocolError, QuotaExceeded, StoreError, UpriverError, bare
from upriver.protocol import KEPT, PREFIX_NBYTES, End, RunRequest, data_head, encode, lay_out
from upriver.server.code_allowlist import check_code
from upriver.server.config import ServerConfig
from upriver.server.execution.run_context import (
    AdmittedRequest,
    RequestWork,
    ResolvedRequest,
    groups_of,
    until,
)
from upriver.server.execution.user_code_runs import LargestAnswers, WorkloadKind, code_run
from upriver.server.execution.worker_pool import WorkerPool
from upriver.server.execution.worker_process import Job, Result
from upriver.server.features.feature_store import FeatureStore, RequestRows
from upriver.server.http.errors import ErrorWording
from upriver.server.http.request_body import read_body
from upriver.server.http.requests import IncomingBody
from upriver.server.http.response_stream import LastBuffer
from upriver.server.ipc.messages import Run, RunCode, Weighed
from upriver.server.ipc.shared_memory import SealedFile
from upriver.server.observability import tracing
from upriver.server.observability.metrics import ServerMetrics
from upriver.server.programs.datasets import Datasets
from upriver.server.programs.program_files import ProgramFiles
from upriver.server.programs.registry import KnownProgram, ProgramRegistry
from upriver.server.programs.streaming_weights import ColdFile
from upriver.server.scheduling.admission_gate import AdmissionGate
from upriver.server.scheduling.answer_memory import AnswerRoom, MemoryUse
from upriver.server.scheduling.footprint import (
    END,
    TAIL_BYTES,
    FootprintCache,
    ProgramFootprints,
    StageRange,
    kept_rows_bytes,
    request_bytes,
    unheld_bytes,
    works_ahead,
)
from upriver.server.scheduling.turn_gate import TurnGate
from upriver.server.tenants import Tenant
from upriver.store import Store
from upriver.types import Timings

if TYPE_CHECKING:
    from upriver.pipeline import SampleRef

log = logging.getLogger(__name__)

JOINED_BYTES = 64 << 10
"""Payloads up to this size leave in one piece with their head and timings, and the last one with the end
frame. A copy takes less time than another send."""

_END = b"".join(encode(End()))

COMING_TOO = 2
"""Factor over a tenant's quota of requests, counting those that are still being read: a slow sender takes
places from others, too. The factor is above one, as a request may arrive just before the previous one has
left."""


class _RowsGone(Exception):
    """Rows that a request was admitted to be answered from are gone or damaged."""


class RunHandler:
    """Run requests: resolve their names, queue them for admission, and compute them in turns.

    Args:
        line: Queue of requests that wait for memory.
        turns: Fair queue that decides which request computes next.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        pool: WorkerPool,
        programs: ProgramRegistry,
        datasets: Datasets,
        features: FeatureStore,
        budget: MemoryBudget,
        line: AdmissionGate,
        turns: TurnGate,
        metrics: ServerMetrics,
        wording: ErrorWording,
    ) -> None:
        self._config = config
        self._pool, self._programs, self._datasets, self._features = pool, programs, datasets, features
        self._budget, self._line, self._turns = budget, line, turns
        self._metrics, self._wording = metrics, wording
        self._bodies = BodyMemory(budget, self._make_room)
        self._weights = FootprintCache(self)
        self._forms = ProgramFootprints(self._held)
        self._costs = ServiceCosts()
        self._answers = LargestAnswers(config.code_bytes)
        self._places = ConcurrencyLimit(config.max_requests, (tenant.name for tenant in config.everyone()))

    @property
    def running(self) -> int:
        """Number of requests in progress, including queued ones."""
        return self._places.taken

    def running_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests in progress."""
        return self._places.taken_by(tenant)

    def enter(self, stack: AsyncExitStack, tenant: Tenant) -> None:
        """Count a request until ``stack`` closes.

        Raises:
            QuotaExceeded: If the tenant has `COMING_TOO` times its quota here, so that some can only be
                arriving.
            Overloaded: If the server is full, or only places reserved for other tenants are left.
        """
        quota, here = tenant.max_requests, self._places.taken_by(tenant.name)
        if quota is not None and here >= COMING_TOO * quota:
            raise QuotaExceeded(
                f"{here} requests of {tenant.name} are here or on their way, and at most {quota} may be here",
                retry_after_s=self._line.retry_after_s(),
            )
        if not self._places.take(tenant.name):
            raise Overloaded(
                f"{self.running} requests are active, {here} of them by {tenant.name}: there is no room",
                retry_after_s=self._line.retry_after_s(),
            ) from QueueFull()
        self._metrics.running.inc()
        stack.callback(self._leave, tenant)

    # ------------------------------------------------------------------------------------ coming in

    async def read(
        self,
        body: AsyncIterator[bytes],
        stack: AsyncExitStack,
        tenant: Tenant,
        *,
        on_request: Callable[[RunRequest], None] = lambda request: None,
        announced: int = 0,
    ) -> ResolvedRequest:
        """Read a request and resolve its names; ``stack`` releases its body.

        Args:
            on_request: Called with the decoded request before it is checked.
            announced: Content length of the body, if the client sent one.

        Raises:
            DoesNotFit: If the request can never fit in memory.
            Overloaded: If memory has no room now.
            DeadlineExceeded: If its deadline passed first.
            UpriverError: If it is invalid or not allowed.
        """
        began = asyncio.get_running_loop().time()
        self._budget.check_fits(announced)
        self.enter(stack, tenant)
        coming, arriving = IncomingBodyMemory(self._bodies, tenant.name), IncomingBody(body)
        use = stack.enter_context(MemoryUse(coming.release))
        async with until(began + self._config.deadline_s):
            request, batches = await read_body(arriving, self._config.caps, room=coming.room)
            if not batches:
                coming.release()  # the body is decoded by now
            on_request(request)
            if request.code is not None:
                check_code(request.code, self._config.allow)
            deadline_s = min(self._config.deadline_s, request.deadline_s or self._config.deadline_s)
            return ResolvedRequest(
                request=request,
                tenant=tenant,
                dataset=await self._datasets.ask(request, tenant),
                batches=batches,
                known=await self._programs_of(request, tenant),
                deadline=began + deadline_s,
                body=use,
                body_nbytes=coming.nbytes,
                received_s=arriving.seconds,
            )

    async def admit(self, asked: ResolvedRequest, stack: AsyncExitStack) -> AdmittedRequest:
        """Wait until memory has room for a request, and load its program; ``stack`` releases both.

        A request whose rows are all kept needs memory for these alone, and no program.

        Raises:
            Overloaded: If the request waited too long, or too many wait.
            DoesNotFit: If it needs more memory than the budget.
            DeadlineExceeded: If its deadline passed first.
            ProtocolError: If its program lacks these stages, or does not accept its inputs.
        """
        held = stack.enter_context(ExitStack())
        async with until(asked.deadline):
            weighed = await self._weigh(asked)
            sizes = self._sizes(asked, weighed)
            rows = await self._rows_of(asked, weighed)
            size, batches = asked.request.micro_batch, asked.request.micro_batches
            kept = await rows.footprints(batches, micro_batch=size) if rows is not None else None
            if kept is not None:
                sizes, weighed = {size: min(kept_rows_bytes(kept), sizes[size])}, {}
            order = await self._admitted(
                asked, sizes, weighed, rows=rows, from_rows=kept is not None, held=held
            )
        self._metrics.admitted(asked.tenant.name)
        return order

    async def _admit_again(self, order: AdmittedRequest) -> AdmittedRequest:
        """Admit a request whose kept rows are gone, now for its computation.

        Its memory is released before. Requests that wait and hold memory could wait for each other.
        """
        asked = order.asked
        log.info("a request of tenant %s is computed: its kept rows cannot be read", asked.tenant.name)
        async with until(asked.deadline):
            weighed = await self._weigh(asked)
            sizes = self._sizes(asked, weighed)
            order.held.close()
            return await self._admitted(asked, sizes, weighed, rows=order.rows, held=order.held)

    async def _admitted(
        self,
        asked: ResolvedRequest,
        sizes: Mapping[int, int],
        weighed: Mapping[int, Weighed],
        *,
        rows: RequestRows | None,
        held: ExitStack,
        from_rows: bool = False,
    ) -> AdmittedRequest:
        """Wait for memory, and load the program of the weighed stages if there are any."""
        programs = {
            size: asked.known[size].need(found, workers=self._config.workers)
            for size, found in weighed.items()
        }
        began = time.perf_counter()
        wanted = AdmissionRequest(
            tenant=asked.tenant, nbytes=sizes, programs=programs, body_nbytes=asked.body_nbytes
        )
        admitted = await self._line.wait(wanted)
        waited_s = time.perf_counter() - began
        use = self._used(admitted, held, body=asked.body)
        tracing.admitted(waited_s)
        known = asked.known.get(admitted.size)
        stretch, program = weighed.get(admitted.size), None
        if known is not None and stretch is not None:
            work = _kind(known.key, asked.request, admitted.size)
            program = await self._come(asked.tenant, known, stretch, self._costs.of(work))
        return AdmittedRequest(
            asked=asked,
            admitted=admitted,
            program=program,
            use=use,
            groups=tuple(groups_of(asked.request, admitted.size // asked.request.micro_batch)),
            to_end=stretch is not None and stretch.to_end,
            ahead=stretch is not None and works_ahead(stretch),
            waited_s=waited_s,
            rows=rows,
            from_rows=from_rows,
            held=held,
        )

    async def rows_of_question(self, asked: ResolvedRequest) -> RequestRows:
        """Return the kept rows that a question about a request with ``keep`` names.

        Raises:
            ProtocolError: If the request does not ask to keep rows, its program lacks these stages, or is not
                of its micro-batch size.
            Overloaded: If no worker is ready yet, whose processor they depend on.
            StoreError: If the store cannot be listed.
        """
        await self._weigh(asked)
        return await self._rows_for(asked)

    async def _rows_for(self, asked: ResolvedRequest) -> RequestRows:
        if asked.dataset is None or not asked.request.keep:
            raise ProtocolError("a question about kept rows is a run request with keep, got one without")
        if self._pool.hello is None:
            raise Overloaded(self._pool.why)
        return await self._features.rows_for(
            asked.request,
            asked.dataset,
            asked.tenant,
            fingerprint=self._pool.hello.fingerprint,
            num_threads=self._config.threads_per_worker,
        )

    async def _rows_of(self, asked: ResolvedRequest, weighed: Mapping[int, Weighed]) -> RequestRows | None:
        """Return the same for a run; None if it keeps no rows, or the store fails."""
        stretch = weighed.get(asked.request.micro_batch)
        if not asked.request.keep or (stretch is not None and not stretch.rows):
            return None
        try:
            return await self._rows_for(asked)
        except StoreError as error:  # the samples may be readable all the same
            log.warning("kept features of tenant %s cannot be listed: %s", asked.tenant.name, error)
            return None

    async def _come(
        self, tenant: Tenant, known: KnownProgram, weighed: Weighed, seconds: float
    ) -> ProgramFiles:
        """Load a program until enough weights are there to begin a stretch that takes ``seconds``."""
        program = await self._programs.load(tenant, known, weighed)
        if (cold := program.cold) is not None:
            first, all_read = program.places(weighed.first), program.places(weighed.weights)
            await cold.ready(first, all_read, within_s=seconds)
        return program

    def _used(
        self, admitted: Admission, stack: ExitStack | AsyncExitStack, *, body: MemoryUse | None = None
    ) -> MemoryUse:
        """Release all memory when neither the request nor a worker needs it."""
        if body is not None:
            body.enter()

        def release() -> None:
            if body is not None:
                body.leave()
            self._line.leave(admitted)

        return stack.enter_context(MemoryUse(release))

    def _make_room(self, nbytes: int) -> None:
        self._programs.make_room(nbytes)

    async def _programs_of(self, request: RunRequest, tenant: Tenant) -> dict[int, KnownProgram]:
        """Return programs by micro-batch size: the request's own, and larger ones to choose from."""
        if request.program is None or request.stop <= 0:
            return {}
        named = {request.micro_batch: request.program}
        if self._config.admission == "adaptive" and not request.sent:  # tensors come as they are
            named |= {larger.micro_batch: larger.program for larger in request.larger}
        return {size: await self._programs.know(tenant, digest) for size, digest in named.items()}

    def _sizes(self, asked: ResolvedRequest, weighed: Mapping[int, Weighed]) -> dict[int, int]:
        """Return the bytes that a request needs besides its program, by the samples of a forward pass."""
        request = asked.request
        if request.code is None:
            return request_bytes(request, dataset=asked.dataset, weighed=weighed, batches=asked.batches)
        most = self._budget.most_bytes
        return {request.micro_batch: self._answers.bytes_of(asked, request.code, most_bytes=most)}

    async def _weigh(self, asked: ResolvedRequest) -> dict[int, Weighed]:
        """Return stage footprints by the samples of a forward pass; larger ones only if rows are known."""
        start, stop = max(0, asked.request.start), asked.request.stop
        weighed: dict[int, Weighed] = {}
        for size, known in asked.known.items():
            stretch = StageRange(key=known.key, start=start, stop=stop)
            found = await self._weights.of(known.graph, stretch, asked.tenant)
            form = self._forms.of(known.key, known.graph, start, asked.tenant)  # the program is sound by now
            form.check_size(size)
            form.check_given(asked.request, asked.batches)
            if size == asked.request.micro_batch or (found.rows and weighed[asked.request.micro_batch].rows):
                weighed[size] = found
        return weighed

    async def weigh(self, graph: SealedFile, stretch: StageRange, tenant: Tenant) -> Weighed:
        """Let a worker compute the footprint of a stretch of a program, in the tenant's turn."""
        with self._held(unheld_bytes(graph), tenant) as use:
            async with self.turn(tenant, "weigh"):
                return await self._pool.weigh(graph, stretch, use)

    def _held(self, nbytes: int, tenant: Tenant) -> MemoryUse:
        """Hold memory for a tenant until the last user of the block has left."""
        self._make_room(nbytes)
        return MemoryUse(self._budget.hold(nbytes, owner=tenant.name).release)

    @asynccontextmanager
    async def borrowed(
        self, tenant: Tenant, digest: str, *, stop: int | None
    ) -> AsyncIterator[tuple[ProgramFiles, MemoryUse]]:
        """Yield a program in its tenant's turn, with the memory to run it once.

        The run has made-up inputs, and goes up to ``stop`` or the program's end.

        Raises:
            Overloaded: If memory has no room now.
            UpriverError: If the program does not exist or is invalid.
        """
        known = await self._programs.know(tenant, digest)
        stretch = StageRange(key=known.key, start=0, stop=END if stop is None else stop)
        weighed = await self._weights.of(known.graph, stretch, tenant)
        async with AsyncExitStack() as stack:
            program = known.need(weighed, workers=self._config.workers)
            admitted = await self._line.wait(
                AdmissionRequest(tenant=tenant, nbytes={1: weighed.peak_bytes}, programs={1: program})
            )
            use = self._used(admitted, stack)
            file = await self._come(tenant, known, weighed, self._costs.of(stretch))
            async with self.turn(tenant, stretch):
                yield file, use

    @asynccontextmanager
    async def turn(self, tenant: Tenant, work: Hashable) -> AsyncIterator[None]:
        """Wait for a tenant's turn for work that belongs to no run request's answer.

        Args:
            work: Kind of the work. Its earlier runs tell how long it is expected to take.
        """
        expected = self._costs.of(work)
        async with self._turn(tenant, object(), expected):
            began = time.perf_counter()
            with self._charged(tenant, expected, Clock()):
                yield
            took = time.perf_counter() - began
        self._costs.saw(work, took)

    @contextmanager
    def _charged(self, tenant: Tenant, expected: float, clock: Clock) -> Iterator[None]:
        """Charge a tenant for a worker's time in the block, including program loads and failures.

        If the block is cancelled, a worker is still busy, and the expected time stays charged.

        Args:
            expected: Seconds charged already.
            clock: Clock that holds the wait for a worker, which is not charged.
        """
        waited, began = clock.phases.get("queue", 0.0), time.perf_counter()
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._turns.queue.spent(tenant.name, expected, _since(began, clock, waited))
            raise
        self._turns.queue.spent(tenant.name, expected, _since(began, clock, waited))

    @asynccontextmanager
    async def _turn(self, tenant: Tenant, request: Hashable, seconds: float) -> AsyncIterator[None]:
        """Wait for a turn; the wait counts in the server's load."""
        turn = self._turns.turn(tenant=tenant.name, weight=tenant.weight, request=request, seconds=seconds)
        async with AsyncExitStack() as stack:
            with self._pool.load.waiting():
                await stack.enter_async_context(turn)
            yield

    # -------------------------------------------------------------------------------------- answers

    async def answer(
        self, order: AdmittedRequest, *, on_error: Callable[[UpriverError], None] = lambda error: None
    ) -> AsyncGenerator[bytes | memoryview]:
        """Yield the frames of the answer.

        An error ends the answer with an error frame, and ``on_error`` is called.
        """
        try:
            async with aclosing(self._frames(order)) as frames:
                async for buffer in frames:
                    yield buffer
                    if isinstance(buffer, LastBuffer):
                        return
                    del buffer  # the slot is free as soon as the socket has the last byte
            yield LastBuffer(_END)
        except UpriverError as error:
            yield self._told(error, on_error)
        except Exception:
            log.exception("a run request failed")
            unexpected = UpriverError("internal error; the server's log says more")
            yield self._told(unexpected, on_error)

    async def _checked(self, order: AdmittedRequest) -> None:
        """Check, for an answer up to the program's end, that all weights are those that the program names.

        Raises:
            UpriverError: If they differ, or cannot be checked before the deadline.
        """
        cold = self._unchecked(order)
        if cold is not None:
            async with until(order.asked.deadline):
                await cold.checked()

    def _unchecked(self, order: AdmittedRequest) -> ColdFile | None:
        """Return the weights that must be checked before the answer ends, or None."""
        return order.program.cold if order.program is not None and order.to_end else None

    def _told(self, error: UpriverError, on_error: Callable[[UpriverError], None]) -> LastBuffer:
        self._metrics.errors.labels(error.code).inc()
        on_error(error)
        return LastBuffer(b"".join(encode(self._wording.of(bare(error)))))

    async def _frames(self, order: AdmittedRequest) -> AsyncGenerator[bytes | memoryview]:
        """Yield heads, payloads and timings in the order of the request."""
        work = RequestWork(order, self)
        try:
            for stop, index in enumerate(range(len(order.groups)), start=1):
                try:
                    result, timings = await work.result(index)
                except _RowsGone:
                    await work.close()
                    order = await self._admit_again(order)
                    work = RequestWork(order, self, first=index)
                    result, timings = await work.result(index)
                frames, stats = result.frames, encode(timings)
                del result
                while frames:
                    head, payload = frames.pop(0)
                    ends = False
                    self._metrics.micro_batch(order.asked.tenant.name, timings)
                    with tracing.sending(self._metrics, index):
                        if len(payload) <= JOINED_BYTES:
                            ends = stop == len(order.groups) and not frames and not self._unchecked(order)
                            parts = (head, payload, *stats, _END if ends else b"")
                            head, payload = b"", memoryview(b"".join(parts))
                        else:
                            yield head
                        if not frames:
                            if len(payload) > TAIL_BYTES:
                                yield payload[:-TAIL_BYTES]
                                payload = memoryview(bytes(payload[-TAIL_BYTES:]))  # the slot is free now
                            work.sent(index)
                        yield LastBuffer(payload) if ends else payload
                        del payload
                    for buffer in stats if head else ():
                        yield buffer
            await self._checked(order)
        finally:
            await work.close()

    async def compute(
        self, order: AdmittedRequest, index: int, job: Job | Result, clock: Clock, begun: Callable[[], None]
    ) -> tuple[Result, Timings]:
        """Run one forward pass when the request's turn comes, and call ``begun`` then."""
        asked = order.asked
        if isinstance(job, Result):
            begun()
            return job, self._timings(order, index, clock)
        work = _work_of(order, job.run)
        expected, began = self._costs.of(work), time.perf_counter()
        async with self._turn(asked.tenant, order, expected):
            waited = time.perf_counter() - began
            clock.add("queue", waited)
            tracing.over("queue", waited, index)
            begun()
            with self._charged(asked.tenant, expected, clock):
                result = await self._pool.run(job, clock, order.use)
            tracing.computed(result.timings, index)
        self._costs.saw(work, _seconds_of(result.timings))
        if isinstance(job.run, RunCode):
            self._answers.saw(WorkloadKind.of(job.run), result.nbytes)
        self._metrics.batch(asked.tenant.name, len(job.run.ids))
        for phase, seconds in result.timings.phases.items():
            clock.add(phase, seconds)
        for position, seconds in result.timings.stages.items():
            clock.stage(position, seconds)
        if order.rows is not None and asked.dataset is not None:
            [frame] = result.frames
            await order.rows.keep(asked.dataset.locate(job.run.ids), job.run.ids, frame)
        return result, self._timings(order, index, clock)

    def _timings(self, order: AdmittedRequest, index: int, clock: Clock) -> Timings:
        """Return each micro-batch's share of a group's timings, with what the next request may expect."""
        tenant = order.asked.tenant
        wait_s = self._turns.queue.expected_wait_s(tenant.name, tenant.weight)
        wait_s += order.admitted.waited_s / len(order.groups)  # the next request would wait as long
        return _shared(clock.timings(), len(order.groups[index]), wait_s, self._pool.load.k)

    async def job(self, order: AdmittedRequest, index: int, clock: Clock) -> Job | Result:
        """Return the job of one forward pass, with its inputs; its result if all its rows are kept.

        Raises:
            _RowsGone: If a row is gone, and the request has no memory to compute it.
        """
        asked, request = order.asked, order.asked.request
        held = asked.body_nbytes + (order.program.nbytes if order.program is not None else 0)
        room = AnswerRoom(
            order.admitted.hold,
            asyncio.get_running_loop(),
            self._make_room,
            partial(self._budget.check_fits, beside=held),
        )
        first = order.groups[index].start
        refs: list[SampleRef] = []
        run = code_run(asked, request.code, first) if request.code is not None else _run_of(order, index)
        if asked.dataset is not None:
            refs = asked.dataset.locate(run.ids)
            names = tuple(ref.object for ref in refs)
            chain = msgspec.json.encode(asked.dataset.chain.to_json())
            run = msgspec.structs.replace(run, object_names=names, chain=chain)
        if order.rows is not None:
            with clock.phase(KEPT):
                frame = await order.rows.frame(refs, run.ids, micro_batch=request.micro_batch, room=room)
            if frame is not None:
                return Result(frames=[frame], timings=clock.timings())
            if order.from_rows:
                raise _RowsGone
            del clock.phases[KEPT]
        program, parts = order.program, list[memoryview]()
        if asked.batches:
            layout = lay_out(asked.batches[first].tensors)
            header = data_head(asked.batches[first], layout, "")[PREFIX_NBYTES:]
            run = msgspec.structs.replace(run, header=header, payload_nbytes=layout.nbytes)
            parts = list(layout.parts)
        elif asked.dataset is not None:
            parts = await self._read(asked.dataset.store, refs, clock)
        else:
            program = None
        owner = asked.tenant.name
        return Job(run=run, program=program, parts=parts, owner=owner, room=room, beside=room.beside)

    async def _read(self, store: Store, refs: Sequence[SampleRef], clock: Clock) -> list[memoryview]:
        began = time.perf_counter()
        try:
            with clock.phase("read"):
                blobs = await read_samples_async(store, refs)
        except StoreError as error:
            self._metrics.store_error(store.name, error.code)
            raise
        nbytes = sum(len(blob) for blob in blobs)
        self._metrics.store_read(store.name, time.perf_counter() - began, nbytes)
        return blobs

    def _leave(self, tenant: Tenant) -> None:
        self._places.give_back(tenant.name)
        self._metrics.running.dec()


def _run_of(order: AdmittedRequest, index: int) -> Run:
    """Return the description of one forward pass, without its inputs."""
    request, program = order.asked.request, order.program
    return Run(
        program=program.key if program is not None else None,
        micro_batch=order.admitted.size if program is not None else request.micro_batch,
        rows=request.micro_batch,
        start=request.start,
        stop=request.stop,
        ids=tuple(sample for at in order.groups[index] for sample in request.micro_batches[at]),
        slot=0,
        seed=request.seed,
        epoch=request.epoch,
        on_bad_sample=request.on_bad_sample,
    )


def _work_of(order: AdmittedRequest, run: Run | RunCode) -> Hashable:
    """Return the key of all that decides how long a forward pass takes."""
    request = order.asked.request
    if isinstance(run, RunCode):
        return WorkloadKind.of(run), request.start, request.micro_batch
    return _kind(run.program, request, run.micro_batch)


def _kind(program: str | None, request: RunRequest, size: int) -> Hashable:
    """Return that key for a program's stages, from what is known before a job exists."""
    return program, request.start, request.stop, size


def _seconds_of(timings: Timings) -> float:
    """Return the seconds that the work would have taken with all its weights present."""
    return sum(seconds for phase, seconds in timings.phases.items() if phase != "weights")


def _since(began: float, clock: Clock, waited: float) -> float:
    """Return the seconds since ``began``, less the added wait for a worker."""
    return time.perf_counter() - began - (clock.phases.get("queue", 0.0) - waited)


def _shared(timings: Timings, count: int, wait_s: float, k: float) -> Timings:
    """Return each micro-batch's share of the timings of a joint forward pass."""
    return Timings(
        phases={phase: seconds / count for phase, seconds in timings.phases.items()},
        stages={position: seconds / count for position, seconds in timings.stages.items()},
        expected_wait_s=wait_s,
        k=k,
    )
