"""Stream a model's weights from the store into their final memory, and check them before use.

One thread sends the requests of :mod:`upriver.coldstart.fetch.range_planner`. It writes each piece into the
memory of the model that waits for it. There is no temporary file, and no body in memory besides its weights.
Requests are sent as in PISeL: the next one leaves when the rest of the earlier ones arrives while it waits
for its first byte. Where one connection does not fill the link, the thread keeps more requests in flight
(:mod:`upriver.coldstart.fetch.concurrency`).

The thread runs an event loop, because a blocking request cannot be interrupted. After a cancel, or with a
silent store, it would hold its thread and its connection until the store's own timeouts expire.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from crc32c import crc32c

from upriver._threads.background import BackgroundThread
from upriver.coldstart.fetch.c_runtime import HeapTrimmer, sleep_sooner
from upriver.coldstart.fetch.concurrency import ConcurrencySearch
from upriver.coldstart.fetch.range_planner import (
    PADDING,
    RangeRequest,
    TensorPart,
    apart,
    chunk_of,
    cut,
    requests_for,
)
from upriver.coldstart.fetch.stream_limits import DEFAULT_LIMITS, MIB, StreamLimits
from upriver.coldstart.format.checkpoint import WeightSource, damaged_error
from upriver.coldstart.format.readahead import Loop, Readahead
from upriver.coldstart.link_cache import StoreLink
from upriver.errors import Cancelled, ObjectChanged, StoreError, UpriverError, bare
from upriver.link import TokenBucket
from upriver.program.graph.weights_file import ALIGNMENT
from upriver.store.buffers import BufferSequence
from upriver.store.direct import Direct
from upriver.text import error_text

log = logging.getLogger("upriver")

REQUEST_S = 0.0005
"""Cost of a request for both sides besides its latency. Gaps that arrive in less time are read along."""

MOST_ALONG_BYTES = MIB

PIECE_S = 0.01
MOST_PIECE_BYTES, FIRST_PIECE_BYTES, FEWEST_PIECE_BYTES = 2 * MIB, 256 * 1024, 64 * 1024
"""Size of a piece that is written at once: the bytes of `PIECE_S`, so that no weight waits long for the end
of a piece. `FIRST_PIECE_BYTES` is the bound until the link was measured: a slow link may bring less than a
piece while a request may be silent. `MOST_PIECE_BYTES` is for one request alone; several share it, down to
the first bound. Each piece takes the processor from the threads that compute. With at most half a MiB a load
takes a few per cent longer on one core."""


CAP_BURST_S = 0.05
"""Burst of a capped bandwidth after a pause, in seconds of the cap."""


class Sink(Protocol):
    """Receiver of a model's weights.

    Only the stream's thread calls its methods, and it reads nothing during a call.
    """

    def room(self, index: int) -> memoryview:
        """Return the destination of a tensor: writable memory of exactly its bytes.

        The stream asks once, before it requests the first byte, and never for an empty tensor.
        """

    def filled(self, index: int) -> None:
        """Take note that all bytes of a tensor have arrived with correct checksums."""

    def failed(self, error: UpriverError) -> None:
        """Take note that the remaining tensors will never arrive.

        The stream calls this at most once, and calls and writes nothing afterwards.
        """


Kind = Literal["request", "first_byte", "filled", "refetch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEvent:
    """Event of a stream, for a timeline.

    Attributes:
        kind: A request was sent, or sent again after a wrong checksum; its response began; or a tensor is
            filled.
        tensors: Indices in the source, from the first to the last tensor of these bytes.
        at_s: Seconds since the start; negative if the request was sent earlier.
    """

    kind: Kind
    tensors: range
    at_s: float
    nbytes: int


class WeightStream:
    """Stream the tensors of a source to a sink."""

    def __init__(
        self,
        source: WeightSource,
        groups: Sequence[range],
        sink: Sink,
        *,
        limits: StreamLimits = DEFAULT_LIMITS,
        link: StoreLink,
        joins_s: float = 0.0,
        ahead: Readahead | None = None,
    ) -> None:
        """Plan the requests without sending any.

        Args:
            groups: Ranges over the tensors, in the order in which they are requested.
            joins_s: Bytes that arrive within this time may be one request, even across groups.
            ahead: Readahead, if one was started. A started stream ends it.
        """
        rate = min(link.bandwidth_bytes_per_s, limits.bandwidth_bytes_per_s)
        self.events: list[StreamEvent] = []
        self._source, self._sink, self._limits = source, sink, limits
        along_bytes = int(min(max(rate * REQUEST_S, ALIGNMENT), MOST_ALONG_BYTES))
        self._ahead = ahead
        requests = requests_for(
            source,
            groups,
            request_bytes=limits.request_bytes,
            along_bytes=along_bytes,
            join_bytes=int(min(rate * joins_s, limits.request_bytes)),
        )
        there, others = (
            ([], requests) if ahead is None else apart(requests, ahead.path, ahead.stop_of(source.etags))
        )
        self._there, self._news = set(there), asyncio.Event()
        self._waiting = deque((*there, *others))
        self._urgent: deque[RangeRequest] = deque()
        self._bodies: set[_Body] = set()
        self._flow = ConcurrencySearch(
            replace(link, bandwidth_bytes_per_s=rate),
            most=limits.concurrency,
            bound_bytes_per_s=limits.bandwidth_bytes_per_s,
        )
        cap = limits.bandwidth_bytes_per_s
        self._cap, self._heap = TokenBucket(cap, burst_bytes=CAP_BURST_S * cap), HeapTrimmer()
        self._padding = memoryview(bytearray(along_bytes))
        self._rooms: dict[int, memoryview] = {}
        self._missing = [tensor.nbytes for tensor in source.tensors]
        self._num_unfilled = len(source.tensors)
        self._partly: dict[tuple[int, int], int] = {}
        self._refetched: set[TensorPart] = set()
        self._broken: UpriverError | None = None
        self._began_s = 0.0
        self._lock = threading.RLock()  # the garbage collector may cancel on top of any frame
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._direct: Direct | None = None
        self._told: list[Callable[[], None]] = []
        self._thread = BackgroundThread(self._work, name="coldstart-stream")

    # ------------------------------------------------------------------------- from any thread

    @property
    def measured(self) -> StoreLink:
        """Return the measured link; before the first measurement, the given one."""
        return self._flow.link

    @property
    def bounded(self) -> bool:
        """True if `measured` is the bandwidth cap and not the bandwidth of the link."""
        return self._flow.bounded

    def start(self) -> None:
        """Start the thread. A stream is started once."""
        self._began_s = time.monotonic()
        self._thread.start()
        if self._ahead is not None:
            self._ahead.taken = True

    def hurry(self, index: int) -> None:
        """Request a tensor before all others that were not requested yet: a caller waits for it."""
        self._tell(partial(self._prefer, index))

    def cancel(self, error: UpriverError | None = None) -> None:
        """End soon. A stream that was not started ends when it is."""
        told = error or Cancelled(f"the load of {self._source.path!r} was cancelled")
        self._tell(partial(self._break_off, told))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait up to `timeout_s` until the stream's thread has ended; return at once in that thread."""
        self._thread.join(timeout_s)

    def forked(self) -> None:
        """Discard the thread's state in a forked child. No method is called there afterwards."""
        self._lock, self._loop = threading.RLock(), None

    def _tell(self, what: Callable[[], None]) -> None:
        with self._lock:
            if self._loop is None:
                self._told.append(what)
            else:
                self._loop.call_soon_threadsafe(what)

    # --------------------------------------------------------------------- in the stream's thread

    def _work(self) -> None:
        try:
            sleep_sooner()
            with asyncio.Runner(loop_factory=Loop) as runner:
                runner.run(self._run())
        except BaseException as raised:
            self._fail(raised)
        finally:
            self._rooms.clear()
            if self._ahead is not None:
                self._ahead.close()
            del self._sink  # as a rule the sink holds this stream

    def _fail(self, raised: BaseException) -> None:
        """Report an error to the sink, without references to this stream."""
        error = _taken_apart(raised)
        if not isinstance(error, UpriverError):
            log.error("a cold start's stream broke off", exc_info=error)
            error = UpriverError(f"the load of {self._source.path!r} broke off: {error_text(error)}")
        try:
            self._sink.failed(bare(error))
        except Exception:
            log.exception("a cold start's sink failed while it received the error %s", error_text(error))

    async def _run(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        for what in self._told:
            what()
        self._told.clear()
        for index, nbytes in enumerate(self._missing):
            if not nbytes and self._broken is None:
                self._fill(index)
        if self._ahead is not None and self._there:
            self._ahead.tell(partial(self._tell, self._more_is_there))
        self._ahead_is_used()
        direct = self._source.store.direct(self._limits.concurrency)
        async with direct or nullcontext() as self._direct, asyncio.TaskGroup() as fetching:
            while self._num_unfilled:
                if self._broken is not None:
                    raise self._broken
                while (queue := self._next()) is not None:
                    body = self._open(queue.popleft(), urgent=queue is self._urgent)
                    self._connect(body.request.path)
                    fetching.create_task(self._fetch(body))
                self._changed.clear()
                await self._changed.wait()

    def _connect(self, path: str) -> None:
        """Open connections for the requests after this one."""
        num_others = len(self._waiting) + len(self._urgent) - len(self._there)
        if self._direct is not None and num_others > 0:
            # One more request is sent while the last bytes of the earlier ones arrive.
            self._direct.open(path, min(self._flow.wanted + 1, num_others))

    def _prefer(self, index: int) -> None:
        wanted = [each for each in (*self._urgent, *self._waiting) if index in each.tensors]
        self._urgent = deque((*wanted, *(each for each in self._urgent if index not in each.tensors)))
        self._waiting = deque(each for each in self._waiting if index not in each.tensors)
        self._changed.set()

    def _break_off(self, error: UpriverError) -> None:
        self._broken = self._broken or error
        self._changed.set()

    def _next(self) -> deque[RangeRequest] | None:
        """Return the queue of the next request, or None if none may be sent now."""
        queue = self._urgent or self._waiting
        if not queue or len(self._bodies) >= self._limits.concurrency:
            return None
        in_flight = sum(body.left for body in self._bodies)
        if self._bodies and in_flight + queue[0].nbytes > self._limits.in_flight_bytes:
            return None
        hidden, wanted = self._flow.link.hidden_bytes, self._flow.wanted
        coming = [body.coming for body in self._bodies if body.urgent or queue is self._waiting]
        if not coming or sum(coming) <= hidden:
            return queue
        if wanted > 1 and sum(wanted * nbytes > hidden for nbytes in coming) < wanted:
            return queue
        return None

    def _open(self, request: RangeRequest, *, urgent: bool) -> _Body:
        """Reserve memory for the bytes of a request."""
        for index in sorted(request.tensors - self._rooms.keys()):
            self._rooms[index] = self._sink.room(index).cast("B")
        ahead = self._ahead if request in self._there else None
        body = _Body(request, self._piece_bytes(), urgent=urgent, ahead=ahead)
        self._note("request", request.span, request.nbytes, body.sent_s)
        self._bodies.add(body)
        return body

    def _piece_bytes(self) -> int:
        """Return the piece size for a request that is sent now."""
        most = FIRST_PIECE_BYTES
        if self._flow.known:
            most = max(most, MOST_PIECE_BYTES // self._flow.wanted)
        return int(min(max(self._flow.link.bandwidth_bytes_per_s * PIECE_S, FEWEST_PIECE_BYTES), most))

    async def _fetch(self, body: _Body) -> None:
        request, store, timeout_s = body.request, self._source.store, self._limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:

                async def came(num_bytes: int) -> None:
                    pause_s = self._came(body, num_bytes)
                    until_s = asyncio.get_running_loop().time() + pause_s + timeout_s
                    deadline.reschedule(until_s)  # noqa: F821 - deleted when no more comes
                    await asyncio.sleep(pause_s)

                if body.ahead is not None:
                    await self._take_over(body, body.ahead, came)
                    return
                await store.read_into_async(
                    request.path,
                    request.start,
                    [self._memory(part) for part in request.segments()],
                    etag=self._source.etags.get(request.path) or None,
                    on_bytes=came,
                    piece_bytes=body.piece_bytes,
                    direct=self._direct,
                )
        except ObjectChanged:
            raise ObjectChanged(
                f"object {request.path!r} in store {store.name!r} was replaced since its weights were looked "
                "up; load again"
            ) from None
        except TimeoutError:
            if not deadline.expired():
                raise  # raised by other code
            raise StoreError(
                f"object {request.path!r} in store {store.name!r}: not a byte came for {timeout_s:g} s"
            ) from None
        finally:
            del deadline  # holds this task, and with it everything on its stack
            self._bodies.remove(body)
            if body.begun and body.ahead is None:
                self._flow.ended(time.monotonic())
            self._changed.set()

    async def _take_over(self, body: _Body, ahead: Readahead, came: Callable[[int], Awaitable[None]]) -> None:
        """Write bytes of the readahead to their destination, and request again what does not arrive."""
        request = body.request
        places = BufferSequence([self._memory(part) for part in request.segments()])
        while places.left:
            self._news.clear()
            piece = ahead.at(request.stop - places.left)
            if piece is None:
                break
            if not piece:
                await self._news.wait()
                continue
            piece = piece[: min(places.left, MOST_PIECE_BYTES)]
            if not body.begun:
                await came(0)
            places.take(piece)
            await came(len(piece))
        if rest := body.rest():
            num_bytes = sum(part.nbytes for part in rest)
            self._urgent.appendleft(RangeRequest.of(request.path, request.stop - num_bytes, rest))
        self._there.remove(request)
        self._ahead_is_used()

    def _more_is_there(self) -> None:
        self._news.set()
        self._changed.set()

    def _ahead_is_used(self) -> None:
        """Release the readahead when no request needs it any more."""
        if self._ahead is not None and not self._there:
            self._ahead.cancel()

    def _memory(self, part: TensorPart) -> memoryview:
        if part.tensor == PADDING:
            return self._padding[: part.nbytes]
        return self._rooms[part.tensor][part.start : part.stop]

    def _came(self, body: _Body, num_bytes: int) -> float:
        """Note the start of a response, or written bytes. Return the seconds to pause before more."""
        now_s = time.monotonic()
        self._changed.set()
        ahead = body.ahead  # its bytes say nothing about the link
        if not body.begun:
            body.begun = True
            if ahead is None:
                self._flow.begun(now_s, now_s - body.sent_s)
            at_s = now_s if ahead is None else ahead.first_s
            self._note("first_byte", body.request.span, body.request.nbytes, at_s)
        if num_bytes:
            if ahead is None:
                self._flow.came(now_s, num_bytes)
            self._heap.came(num_bytes)
            for part in body.came(num_bytes):
                self._check(part)
        return self._cap.take(num_bytes, now_s)

    def _check(self, part: TensorPart) -> None:
        """Check a part that has arrived against the checksum of its chunk, if the chunk is complete."""
        if part.tensor == PADDING:
            return
        tensor, chunk_bytes = self._source.tensors[part.tensor], self._source.chunk_bytes
        if not tensor.crc32c:
            self._right(part)
            return
        number = part.start // chunk_bytes
        chunk = chunk_of(part.tensor, tensor, number, chunk_bytes=chunk_bytes)
        left = self._partly.pop((part.tensor, number), chunk.nbytes) - part.nbytes
        if left:
            self._partly[part.tensor, number] = left
        elif crc32c(self._memory(chunk)) == tensor.crc32c[number]:
            self._right(chunk)
        elif chunk not in self._refetched:
            self._refetched.add(chunk)
            self._note("refetch", range(part.tensor, part.tensor + 1), chunk.nbytes)
            pieces = cut(chunk, self._limits.request_bytes)
            self._urgent.extendleft(
                RangeRequest.of(tensor.path, tensor.start + each.start, [each]) for each in pieces
            )
        else:
            raise damaged_error(self._source, tensor, range(chunk.start, chunk.stop))

    def _right(self, part: TensorPart) -> None:
        """Count bytes of a tensor that have arrived and are correct."""
        self._missing[part.tensor] -= part.nbytes
        if not self._missing[part.tensor]:
            self._fill(part.tensor)

    def _fill(self, index: int) -> None:
        self._rooms.pop(index, None)
        self._num_unfilled -= 1
        if not self._num_unfilled:
            self._heap.ended()  # a call that waits for the last weight may need the most memory then
        self._note("filled", range(index, index + 1), self._source.tensors[index].nbytes)
        self._sink.filled(index)

    def _note(self, kind: Kind, tensors: range, nbytes: int, at_s: float | None = None) -> None:
        at_s = (time.monotonic() if at_s is None else at_s) - self._began_s
        self.events.append(StreamEvent(kind=kind, tensors=tensors, at_s=at_s, nbytes=nbytes))


class _Body:
    """Track the bytes of one request.

    Attributes:
        piece_bytes: Fewest bytes that are written at once.
        urgent: True if a caller waits for this request.
        ahead: Readahead that brings the bytes, if they were requested earlier.
        sent_s: Time at which the request was sent.
        left: Bytes that are not written yet.
    """

    def __init__(
        self, request: RangeRequest, piece_bytes: int, *, urgent: bool, ahead: Readahead | None
    ) -> None:
        self.request, self.piece_bytes, self.urgent, self.ahead = request, piece_bytes, urgent, ahead
        self.sent_s = time.monotonic() if ahead is None else ahead.sent_s
        self.begun = False
        self.left = request.nbytes
        self._parts = deque(request.parts)
        self._unclaimed = 0

    @property
    def coming(self) -> int:
        """Bytes that are certain to be in flight. An incomplete piece may have arrived already."""
        if self.ahead is not None:
            return max(0, self.request.stop - self.ahead.come)
        return max(0, self.left - self.piece_bytes) if self.begun else self.left

    def came(self, num_bytes: int) -> Iterator[TensorPart]:
        """Count bytes that were written. Yield the parts that they complete."""
        self.left -= num_bytes
        self._unclaimed += num_bytes
        while self._parts and self._parts[0].nbytes <= self._unclaimed:
            part = self._parts.popleft()
            self._unclaimed -= part.nbytes
            yield part

    def rest(self) -> list[TensorPart]:
        """Return the incomplete parts."""
        return list(self._parts)


def _taken_apart(raised: BaseException) -> BaseException:
    """Return the first error of a group, and strip references to stacks from the others."""
    while isinstance(raised, BaseExceptionGroup):
        raised.__traceback__ = raised.__context__ = None  # their frames hold the group itself
        raised, *others = raised.exceptions
        for other in others:
            bare(other)
    return raised
