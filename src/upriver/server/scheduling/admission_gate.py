"""Let tasks of the event loop wait for the memory that `upriver.control.admission_queue` grants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from upriver.control.admission_queue import MAX_WAIT_S, Admission, AdmissionQueue, AdmissionRequest, Waiter
from upriver.control.memory_budget import MemoryBudget


class AdmissionGate:
    """Admission that tasks wait for. All methods belong to the event loop's thread.

    Args:
        budget: The queue's memory; bytes that come free in it start a round.
        collect_s: Seconds that a round waits for further requests.
    """

    def __init__(self, queue: AdmissionQueue, budget: MemoryBudget, *, collect_s: float = 0.0) -> None:
        self.queue, self._collect_s = queue, collect_s
        self._futures: dict[Waiter, asyncio.Future[Admission]] = {}
        self._round: asyncio.TimerHandle | None = None
        budget.add_listener(self._soon)

    async def wait(self, wanted: AdmissionRequest) -> Admission:
        """Wait for memory. The caller calls `leave` after admission.

        Raises:
            DoesNotFit: If the request can never be admitted.
            QuotaExceeded: If its tenant has reached its quota.
            Overloaded: If the queue is full, or the wait took too long.
        """
        self._drop_cancelled()
        waiter, sent_back = self.queue.enter(wanted, time.monotonic())
        self._settle(sent_back)
        future = self._futures[waiter] = asyncio.get_running_loop().create_future()
        self._soon(self._collect_s)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await self._outcome(future)
        except TimeoutError:
            raise self.queue.time_out(waiter, time.monotonic()) from None
        finally:
            if self._futures.pop(waiter, None) is not None:
                self.queue.give_up(waiter)
                self._soon()

    def leave(self, admitted: Admission) -> None:
        """Release the memory of a request that is done, and for which no work runs."""
        self.queue.leave(admitted, time.monotonic())
        self._soon()

    def retry_after_s(self) -> float:
        """Return the seconds until the waiting requests are done, at the recent rate."""
        return self.queue.retry_after_s(time.monotonic())

    async def _outcome(self, future: asyncio.Future[Admission]) -> Admission:
        """Wait for admission. If the caller is cancelled at that very moment, release everything."""
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.leave(future.result())
            raise

    def _soon(self, seconds: float = 0.0) -> None:
        """Schedule a round, one for all events until then."""
        if self._futures and self._round is None:
            self._round = asyncio.get_running_loop().call_later(seconds, self._decide)

    def _decide(self) -> None:
        self._round = None
        self._drop_cancelled()
        found = self.queue.decide(time.monotonic())
        self._settle(found.decided)
        if found.again_s is not None:
            self._soon(found.again_s)

    def _settle(self, decided: Iterable[Waiter]) -> None:
        for waiter in decided:
            future = self._futures.pop(waiter)
            if isinstance(waiter.outcome, Admission):
                future.set_result(waiter.outcome)
            elif waiter.outcome is not None:
                future.set_exception(waiter.outcome)

    def _drop_cancelled(self) -> None:
        """Stop requests from waiting whose tasks are cancelled and have not run since."""
        for waiter in [waiter for waiter, future in self._futures.items() if future.cancelled()]:
            del self._futures[waiter]
            self.queue.give_up(waiter)
            self._soon()
