"""``POST /v1/run``: read, compute and send one micro-batch after the other, each as soon as it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import msgspec

from upriver.engine.clock import Clock
from upriver.engine.read import read_samples_async
from upriver.errors import ObjectNotFound, Overloaded, ProtocolError, TooLarge, UpriverError
from upriver.pipeline import Dataset
from upriver.protocol import (
    PREFIX_NBYTES,
    Caps,
    DatasetRef,
    End,
    FrameDecoder,
    RunRequest,
    data_head,
    encode,
    lay_out,
)
from upriver.server.config import ServerConfig
from upriver.server.handle import Job, ProgramFiles, Result
from upriver.server.jobs import Run
from upriver.server.metrics import Metrics
from upriver.server.pool import WorkerPool
from upriver.server.programs import Programs
from upriver.store import Store
from upriver.types import MicroBatch, Timings

log = logging.getLogger(__name__)

AHEAD = 1
"""Micro-batches of a request under way beyond one for each worker: the next read overlaps this compute."""


class Datasets:
    """Indexes that were opened, least recently used out first.

    Args:
        stores: By the names that clients use.
        prefix: The operator's, in every store.
        most: Kept between requests.
    """

    def __init__(self, stores: Mapping[str, Store], *, prefix: str, most: int) -> None:
        self._stores = stores
        self._prefix = prefix
        self._most = most
        self._open: OrderedDict[DatasetRef, Dataset] = OrderedDict()

    async def get(self, ref: DatasetRef) -> Dataset:
        """The dataset.

        Raises:
            ObjectNotFound: If there is no store of that name, or no such dataset in it.
            DatasetError: If it is damaged.
        """
        if ref not in self._open:
            if ref.store not in self._stores:
                raise ObjectNotFound(f"no store {ref.store!r} here; there are {', '.join(self._stores)}")
            store = self._stores[ref.store]
            self._open[ref] = await asyncio.to_thread(Dataset.open, store, ref.digest, prefix=self._prefix)
            if len(self._open) > self._most:
                self._open.popitem(last=False)
        self._open.move_to_end(ref)
        return self._open[ref]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A run request with everything it names at hand.

    Attributes:
        batches: The tensors sent along, one for each micro-batch; empty with a dataset.
    """

    request: RunRequest
    dataset: Dataset | None
    program: ProgramFiles | None
    batches: Sequence[MicroBatch]


class Runner:
    """Runs orders; as many at once as the operator allows."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        pool: WorkerPool,
        programs: Programs,
        datasets: Datasets,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._pool = pool
        self._programs = programs
        self._datasets = datasets
        self._metrics = metrics
        self._running = 0
        self._waiting_bytes = 0

    @property
    def running(self) -> int:
        """Requests in progress."""
        return self._running

    def enter(self, stack: AsyncExitStack) -> None:
        """Count one more request until ``stack`` lets go of it.

        Raises:
            Overloaded: If enough is running already.
        """
        if self._running >= self._config.max_requests:
            raise Overloaded(f"{self._running} requests are running, and no more may")
        self._running += 1
        self._metrics.running.inc()
        stack.callback(self._leave)

    async def admit(self, body: AsyncIterator[bytes], stack: AsyncExitStack) -> Order:
        """Read a request and get hold of what it names; ``stack`` lets go of it.

        Raises:
            Overloaded: If enough is running already.
            UpriverError: If it cannot be done; nothing has been computed yet then.
        """
        self.enter(stack)
        request, batches = await read_body(body, self._config.caps)
        dataset = await self._datasets.get(request.dataset) if request.dataset is not None else None
        if dataset is not None:
            _check_against(request, dataset)
        program = None
        if request.program is not None and request.stop > 0:
            program = await stack.enter_async_context(self._programs.use(request.program))
        return Order(request=request, dataset=dataset, program=program, batches=batches)

    async def answer(self, order: Order) -> AsyncGenerator[bytes | memoryview]:
        """The frames of the answer; an error ends it with an error frame."""
        try:
            async with aclosing(self._in_order(order)) as results:
                async for result, timings in results:
                    self._metrics.micro_batch(timings)
                    yield result.head
                    yield result.payload
                    del result  # the slot is free as soon as the socket has the last byte
                    for buffer in encode(timings):
                        yield buffer
            for buffer in encode(End()):
                yield buffer
        except UpriverError as error:
            for buffer in self._told(error):
                yield buffer
        except Exception:
            log.exception("a run request failed")
            for buffer in self._told(UpriverError("internal error; the server's log says more")):
                yield buffer

    def _told(self, error: UpriverError) -> list[bytes | memoryview]:
        self._metrics.errors.labels(error.code).inc()
        return encode(error)

    async def _in_order(self, order: Order) -> AsyncGenerator[tuple[Result, Timings]]:
        """Results in the order of the request, a few computed ahead while earlier ones are sent."""
        todo = deque(range(len(order.request.micro_batches)))
        line: deque[asyncio.Event] = deque(maxlen=self._config.workers)
        pending: deque[asyncio.Task[tuple[Result, Timings]]] = deque()
        nbytes = 0
        try:
            while todo or pending:
                self._start_more(order, todo, pending, nbytes, line)
                result, timings = await pending.popleft()
                nbytes = len(result.payload)
                self._waiting_bytes += nbytes
                try:
                    self._start_more(order, todo, pending, nbytes, line)
                    yield result, timings
                finally:
                    self._waiting_bytes -= nbytes
                    del result
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _start_more(
        self,
        order: Order,
        todo: deque[int],
        pending: deque[asyncio.Task[tuple[Result, Timings]]],
        nbytes: int,
        line: deque[asyncio.Event],
    ) -> None:
        """What is due now always starts; what is ahead does not while answers pile up for slow readers.

        What is ahead is read, but stands in no line for a worker before what is due of other requests: each
        waits until the one as many places before it as there are workers is computed, whichever was read
        first.
        """
        while todo and len(pending) < self._config.workers + AHEAD:
            ahead_bytes = (len(pending) + 1) * nbytes
            if pending and self._waiting_bytes + ahead_bytes > self._config.buffer_budget_bytes:
                return
            before = line[0] if len(line) == line.maxlen else None
            line.append(asyncio.Event())
            pending.append(asyncio.ensure_future(self._one(order, todo.popleft(), before, line[-1])))

    async def _one(
        self, order: Order, index: int, before: asyncio.Event | None, computed: asyncio.Event
    ) -> tuple[Result, Timings]:
        clock = Clock()
        job = await self._job(order, index, clock)
        if before is not None:
            with clock.phase("queue"):
                await before.wait()
        try:
            result = await self._pool.run(job, clock)
        finally:
            computed.set()
        for phase, seconds in result.timings.phases.items():
            clock.add(phase, seconds)
        for position, seconds in result.timings.stages.items():
            clock.stage(position, seconds)
        return result, clock.timings()

    async def _job(self, order: Order, index: int, clock: Clock) -> Job:
        request = order.request
        ids = request.micro_batches[index]
        run = Run(
            program=order.program.digest if order.program is not None else None,
            micro_batch=request.micro_batch,
            start=request.start,
            stop=request.stop,
            ids=ids,
            slot=0,
            seed=request.seed,
            epoch=request.epoch,
            on_bad_sample=request.on_bad_sample,
        )
        if order.dataset is None:
            batch = order.batches[index]
            layout = lay_out(batch.tensors)
            header = data_head(batch, layout, "")[PREFIX_NBYTES:]
            run = msgspec.structs.replace(run, header=header, payload_nbytes=layout.nbytes)
            return Job(run=run, program=order.program, parts=layout.parts)
        with clock.phase("read"):
            blobs = await read_samples_async(order.dataset, ids)
        self._metrics.bytes_read.inc(sum(len(blob) for blob in blobs))
        names = tuple(ref.object for ref in order.dataset.locate(ids))
        chain = msgspec.json.encode(order.dataset.chain.to_json())
        run = msgspec.structs.replace(run, object_names=names, chain=chain)
        return Job(run=run, program=order.program, parts=blobs)

    def _leave(self) -> None:
        self._running -= 1
        self._metrics.running.dec()


async def read_body(body: AsyncIterator[bytes], caps: Caps) -> tuple[RunRequest, list[MicroBatch]]:
    """A request and the tensors sent along. All of it is read first: a client that sends does not read yet.

    Raises:
        ProtocolError: If it is malformed, ends early or goes on too long.
        TooLarge: If it has more bytes than allowed.
    """
    decoder, got = FrameDecoder(caps), 0
    request: RunRequest | None = None
    batches: list[MicroBatch] = []
    async for chunk in body:
        got += len(chunk)
        if got > caps.body_bytes:
            raise TooLarge(f"a request has at most {caps.body_bytes} bytes; ask for less at once")
        for message in decoder.feed(chunk):
            if request is None and isinstance(message, RunRequest):
                request = message
            elif request is not None and isinstance(message, MicroBatch):
                _check_sent(request, len(batches), message)
                batches.append(message)
            else:
                raise ProtocolError(f"a request frame, then data frames, got {type(message).__name__}")
    if request is None or not decoder.between_frames:
        raise ProtocolError(f"the body ended after {got} bytes, in the middle of a frame")
    expected = 0 if request.dataset is not None else len(request.micro_batches)
    if len(batches) != expected:
        raise ProtocolError(f"{expected} data frames were announced, got {len(batches)}")
    return request, batches


def _check_sent(request: RunRequest, index: int, batch: MicroBatch) -> None:
    if request.dataset is not None or index >= len(request.micro_batches):
        raise ProtocolError("more data frames than announced")
    wanted = (request.micro_batches[index], request.start)
    if (batch.ids, batch.position) != wanted:
        raise ProtocolError(
            f"data frame {index} must hold samples {wanted[0]} at position {wanted[1]}, "
            f"got {batch.ids} at {batch.position}"
        )


def _check_against(request: RunRequest, dataset: Dataset) -> None:
    if request.start != dataset.chain.start:
        raise ProtocolError(f"this dataset's chain starts at {dataset.chain.start}, got {request.start}")
    for ids in request.micro_batches:
        outside = [sample for sample in ids if sample >= len(dataset)]
        if outside:
            raise ProtocolError(f"sample ids lie in 0..{len(dataset) - 1}, got {outside[0]}")
