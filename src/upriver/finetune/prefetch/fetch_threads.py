"""Run the threads that fetch an epoch's micro-batches, and hold their shared state.

Two kinds of threads take work from one table of slots (see `upriver.control.delivery_table`), under
one lock. Remote threads send runs of micro-batches to servers. Local threads make one micro-batch at a time,
straight from the store. They work when there is no server to use, and on micro-batches that servers failed on
repeatedly. An epoch therefore ends with the same numbers however many servers are left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from upriver._threads.background import BackgroundThread
from upriver.control.delivery_table import (
    Claim,
    DealtRoute,
    Delivery,
    DeliveryTable,
    Pin,
    PrefetchWindow,
    Way,
)
from upriver.errors import (
    DeadlineExceeded,
    DoesNotFit,
    Forbidden,
    NotAuthorized,
    Overloaded,
    ProgramNotFound,
    ProtocolError,
    ServerUnavailable,
    StoreError,
    TooLarge,
    UpriverError,
    WorkerCrashed,
)
from upriver.retry import Backoff, CircuitBreaker
from upriver.rpc.server_pool import AnswerStream, Lease, ServerPool
from upriver.types import MicroBatch, Timings

if TYPE_CHECKING:
    from upriver.protocol import RunRequest

log = logging.getLogger("upriver")

LOCAL = "local"
"""Name of the local source in reports, in place of a server's URL."""

MakeLocally = Callable[[tuple[int, ...]], tuple[MicroBatch, Timings]]
"""Makes the micro-batch of some sample ids locally."""

Finish = Callable[[MicroBatch], MicroBatch]
"""Runs the local stages on a micro-batch that arrived; returns the same on every call."""

RequestMaker = Callable[[Sequence[int], "int | None"], "RunRequest"]
"""Returns the request for indices of micro-batches on one route, and for the route's cut if it has one."""

STORE_BACKOFF = Backoff(base_s=30.0, cap_s=480.0, jitter=0.0)
"""Pauses of an unreadable store. An attempt delays its micro-batch by the store's own retries, some 15 s."""

NOT_THERE = (DoesNotFit, DeadlineExceeded, TooLarge)
"""Errors meaning that a micro-batch cannot run on servers, although they are healthy."""

FAILED = (ServerUnavailable, ProtocolError, ProgramNotFound, NotAuthorized, Forbidden, WorkerCrashed)
"""Errors of a server, not of the samples: other servers can do the missing work. The types in `NOT_THERE` are
handled first, even if they are subclasses of these."""


class LoaderClosed(UpriverError):
    """The loader was closed before its last micro-batch had been taken."""

    code = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFetch:
    """Servers, and how to send requests to them.

    Attributes:
        pool: The servers; stays open when a loader is closed.
        make_request: Called in the threads that send.
        connections: Requests in flight at once.
        per_request: Most micro-batches in a request; fewer if the window is small.
        open_cut: Used if no micro-batch is dealt to servers: runs the canary on them at some cut and returns
            the cut; None if they fail. Takes as long as a canary does.
    """

    pool: ServerPool
    make_request: RequestMaker
    connections: int
    per_request: int
    open_cut: Callable[[], int | None] = lambda: None


class FetchThreads:
    """The loader's threads and their shared state.

    A crew holds no reference to its `Prefetcher`, which can be collected.
    """

    def __init__(
        self,
        micro_batches: Sequence[tuple[int, ...]],
        table: DeliveryTable,
        *,
        local: MakeLocally,
        remote: RemoteFetch | None,
    ) -> None:
        self.table = table
        self._micro_batches = micro_batches
        self._local = local
        self._remote = remote
        self._changed = threading.Condition()
        self._stopped = False
        self._failure: BaseException | None = None
        self.store_lost = ""
        self._store = CircuitBreaker(STORE_BACKOFF)
        self._answers: set[AnswerStream] = set()
        self._threads: list[BackgroundThread] = []

    def start(self, *, num_workers: int) -> None:
        """Start the threads."""
        self._start([self._work_locally] * num_workers)
        if self._remote is not None:
            self._start_remote(self._remote)

    def _start_remote(self, remote: RemoteFetch) -> None:
        remote.pool.add_listener(self._wake)
        self._start([partial(self._work_remotely, remote)] * remote.connections)

    def _start(self, mains: Sequence[Callable[[], None]]) -> None:
        for main in mains:
            thread = BackgroundThread(self._guard, main, name=f"loader-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()

    def take_servers(
        self,
        remote: RemoteFetch,
        local: MakeLocally,
        dealt: Sequence[DealtRoute],
        window: PrefetchWindow,
        expected_bytes: Mapping[Way | DealtRoute, int],
    ) -> None:
        """Let servers take part from now on; see `Prefetcher.take_servers`."""
        with self._changed:
            if self._stopped:
                return
            self._remote, self._local = remote, local
            self.table.deal(dealt, window, expected_bytes)
        self._start_remote(remote)
        self._wake()

    def take(self, finish: Finish | None) -> tuple[int, Delivery]:
        """Wait for the micro-batch that is due, or the error in its place; raise StopIteration at the end.

        Args:
            finish: Local stages, run meanwhile on other micro-batches that have arrived.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._failure
                        or self._stopped
                        or self.table.done
                        or self.table.ready
                        or (finish is not None and self.table.unfinished())
                    )
                )
                if self._failure is not None:
                    raise self._failure
                if self.table.done:
                    raise StopIteration
                if self._stopped:
                    raise LoaderClosed(f"the loader was closed at micro-batch {self.table.taken}")
                if self.table.ready:
                    index = self.table.taken
                    delivery = self.table.take()
                    self._failure = delivery.error
                    self._changed.notify_all()  # the window has moved on
                    return index, delivery
                ahead = self.table.unfinished()
            if ahead is not None and finish is not None:
                self._finish(*ahead, finish)

    def _finish(self, index: int, delivery: Delivery, finish: Finish) -> None:
        """Run the local stages on a micro-batch; an error is suppressed, since it recurs when it is due."""
        batch: MicroBatch | None = None
        with suppress(Exception):
            batch = finish(delivery.result())
        with self._changed:
            self.table.finish(index, delivery.finished(batch))

    def deal(self, dealt: Sequence[DealtRoute], window: PrefetchWindow | None) -> None:
        """Set new routes; see `Prefetcher.deal`."""
        with self._changed:
            self.table.deal(dealt, window)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop and join the threads."""
        with self._changed:
            self._stopped = True
            answers = list(self._answers)
            self._changed.notify_all()
        for answer in answers:
            answer.close()
        if self._remote is not None:
            self._remote.pool.remove_listener(self._wake)
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _guard(self, main: Callable[[], None]) -> None:
        """Run a thread's loop; pass internal errors to the consumer, which would otherwise wait for ever."""
        try:
            main()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._stopped = True
                self._changed.notify_all()

    # --------------------------------------------------------------------------------- servers

    def _work_remotely(self, remote: RemoteFetch) -> None:
        pool = remote.pool
        while (work := self._next_request(remote)) is not None:
            lease, claim = work
            try:
                with lease:
                    self._fetch(lease, claim, remote.make_request)
            except Overloaded:
                self._release(claim)
            except NOT_THERE as error:
                self._leave_to_others(claim, lease.client.url, error, may_retry=lambda: False)
            except FAILED as error:
                self._leave_to_others(claim, lease.client.url, error, may_retry=pool.budget.withdraw)
            except StoreError as error:
                # Only the base class: a missing or changed object is permanent, and no retry helps.
                if type(error) is StoreError:
                    self._leave_to_others(claim, lease.client.url, error, may_retry=lambda: False)
                else:
                    self._put_error(claim, lease.client.url, error)
            except Exception as error:
                self._put_error(claim, lease.client.url, error)

    def _leave_to_others(
        self, claim: Claim, source: str, error: Exception, *, may_retry: Callable[[], bool]
    ) -> None:
        """Leave a server's missing work to other servers or the plain way; if pinned, put the error there."""
        if self.table.pin(claim.indices[0]) is not None:
            self._put_error(claim, source, error)
        else:
            self._give_up(claim, retry=may_retry())

    def _next_request(self, remote: RemoteFetch) -> tuple[Lease, Claim] | None:
        """Wait for a run of free micro-batches and a server with room; return None at the end."""
        pool = remote.pool
        with self._changed:
            while not self._stopped:
                if run := self.table.find(Way.REMOTE, self._longest(remote), stride=remote.connections):
                    pin = self.table.pin(run[0])
                    if lease := pool.borrow(None if pin is None else pin.source):
                        return lease, self.table.claim(Way.REMOTE, run)
                    if pin is not None and (why := pool.lost(pin.source)) is not None:
                        self._cannot_replay(run, pin, why)
                        continue
                self._changed.wait()
        return None

    def _longest(self, remote: RemoteFetch) -> int:
        """Return the most micro-batches for one request.

        A request for the whole window would leave nothing to send while the consumer is at work. A request
        also holds one route only, so the more routes there are, the shorter it is. Otherwise a due
        micro-batch would wait for later ones of another route, until a thread is free for its own.
        """
        even = self.table.window.micro_batches // (remote.connections + 1)
        in_turn = remote.per_request // max(1, self.table.num_kinds(Way.REMOTE))
        return max(1, min(in_turn, even))

    def _cannot_replay(self, run: Sequence[int], pin: Pin, why: str) -> None:
        """Put an error in place of a run whose server is lost: another server might give other bits."""
        error = ServerUnavailable(
            f"micro-batch {run[0]} came from {pin.source}, which cannot be asked now ({why}); "
            "a replay asks no other"
        )
        self._put_error(self.table.claim(Way.REMOTE, run), pin.source, error)

    def _fetch(self, lease: Lease, claim: Claim, make_request: RequestMaker) -> None:
        """Send one request; the consumer can take each micro-batch as soon as it has arrived."""
        url = lease.client.url
        answer = lease.client.run(make_request(claim.indices, claim.cut))
        with self._open(answer):
            arrived = 0
            for batch, timings in answer:
                lease.heard()
                self._check(batch, claim.indices[arrived : arrived + 1], url)
                self._put(claim, claim.indices[arrived], Delivery(source=url, batch=batch, timings=timings))
                arrived += 1
        if arrived < len(claim.indices):
            raise ProtocolError(f"{url} answered {arrived} of {len(claim.indices)} micro-batches")

    def _check(self, batch: MicroBatch, expected: tuple[int, ...], url: str) -> None:
        """Raise `ProtocolError` if a server answers other samples than it was asked for."""
        if not expected or batch.ids != tuple(self._micro_batches[expected[0]]):
            raise ProtocolError(
                f"{url} answered with samples {batch.ids}, which were not requested at this position"
            )

    @contextmanager
    def _open(self, answer: AnswerStream) -> Iterator[None]:
        """Let `close` interrupt the response while it is read."""
        with self._changed:
            stopped = self._stopped
            self._answers.add(answer)
        try:
            if stopped:
                raise LoaderClosed("the loader was closed")
            yield
        finally:
            with self._changed:
                self._answers.discard(answer)
            answer.close()

    # ---------------------------------------------------------------------------- the plain way

    def _work_locally(self) -> None:
        while (claim := self._next_local()) is not None:
            [index] = claim.indices
            try:
                batch, timings = self._local(tuple(self._micro_batches[index]))
            except Exception as error:
                if not self._ask_servers(claim, error):
                    self._put_error(claim, LOCAL, error)
            else:
                self._store.succeed(time.monotonic())
                self._put(claim, index, Delivery(source=LOCAL, batch=batch, timings=timings))

    def _ask_servers(self, claim: Claim, error: Exception) -> bool:
        """Hand local work to servers if the store fails here and a server answers; return whether it did."""
        if type(error) is not StoreError:  # a missing or changed object is permanent
            return False
        cut = self._cut_for_all()
        with self._changed:
            if cut is None or not self.table.ask_servers(claim, cut):
                return False
            if not self.store_lost:
                log.warning("the store cannot be read from here, servers make all: %s", error)
                self._store.fail(time.monotonic(), error)
            self.store_lost = str(error)
            self._changed.notify_all()
        return True

    def _cut_for_all(self) -> int | None:
        """Return a cut at which servers can now do the local work; None if there is none."""
        remote = self._remote
        if remote is None or not remote.pool.usable:
            return None
        with self._changed:
            cut = self.table.common_cut
        return remote.open_cut() if cut is None else cut

    def _try_store_again(self) -> None:
        if self.store_lost and not self._store.left_s(time.monotonic()):
            self.store_lost = ""
            self.table.ask_servers_no_more()

    def _next_local(self) -> Claim | None:
        """Wait for a micro-batch to make locally; return None at the end."""
        with self._changed:
            while not self._stopped:
                self._try_store_again()
                servers = self._remote is not None and self._remote.pool.usable
                if run := self.table.find(Way.LOCAL, 1, only_failed=servers):
                    return self.table.claim(Way.LOCAL, run)
                self._changed.wait()
        return None

    # --------------------------------------------------------------------------------- the table

    def _put(self, claim: Claim, index: int, delivery: Delivery) -> None:
        with self._changed:
            self.table.deliver(claim, index, delivery)
            self._changed.notify_all()

    def _put_error(self, claim: Claim, source: str, error: Exception) -> None:
        """Put the error in place of the first missing micro-batch, and free the rest."""
        with self._changed:
            for index in self.table.missing(claim)[:1]:
                self.table.deliver(claim, index, Delivery(source=source, error=error))
            self.table.release(claim)
            self._changed.notify_all()

    def _release(self, claim: Claim) -> None:
        with self._changed:
            self.table.release(claim)
            self._changed.notify_all()

    def _give_up(self, claim: Claim, *, retry: bool) -> None:
        with self._changed:
            self.table.give_up(claim, retry=retry)
            self._changed.notify_all()
