"""Bound the front's time for requests that compute nothing: pages, probes, refusals, unknown clients.

The front is one thread: time spent on one client is lost to the others. So light requests start one at a
time, in turns of tenants. While any request works, all light requests together get at most `SHARE` of the
thread. The time of each is measured step by step, so a new route needs no entry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import coroutine
from typing import Any

from upriver.control.fair_queue import LEAST_S, FairQueue
from upriver.server.scheduling.turn_gate import TurnGate

SHARE = 0.25
"""Most of the front's time that light requests get while others work. Requests that work take a third longer
then, and a second still has room for 250 pages of a millisecond."""

RECENT_S = 1.0
"""Seconds for which `SHARE` holds after a request that worked. A job's next request arrives within them."""

MAX_STRANGERS = 64
"""Most refusals that wait for their turn, as many as fit in a second. Further unknown clients are
disconnected without a response, which takes less time than sending one."""

STRANGERS, HEALTH = "*strangers*", "*health*"
"""Names that take turns like a tenant. No tenant can have such a name."""


class LightRequests:
    """Schedule light requests on the front. Use it from the event loop's thread only.

    Args:
        now: Seconds of a monotonic clock.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._turns = TurnGate(FairQueue(1))
        self._next_at = self._worked_until = now() - RECENT_S
        self._working = 0

    @property
    def strangers_waiting(self) -> int:
        """Number of unknown clients that wait for a response."""
        return self._turns.queue.waiting_of(STRANGERS)

    @property
    def behind(self) -> bool:
        """Return whether light requests have used up their share of the next `RECENT_S`."""
        return self._anyone_works and self._next_at > self._now() + RECENT_S

    @contextmanager
    def works(self) -> Iterator[None]:
        """Hold light requests to `SHARE` while the block runs, and for `RECENT_S` after it."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._worked_until = self._now()

    async def turn(self, who: str, weight: float = 1.0) -> None:
        """Wait until the front has time for a light request.

        Args:
            who: A tenant's name, `STRANGERS` or `HEALTH`.
            weight: Share relative to others'.
        """
        async with self._turns.turn(tenant=who, weight=weight, request=object(), seconds=LEAST_S):
            await asyncio.sleep(0)  # other ready tasks run between two light requests
            while (left_s := self._next_at - self._now()) > 0 and self._anyone_works:
                await asyncio.sleep(left_s)

    async def look(self, who: str, work: Awaitable[None]) -> None:
        """Run a light request, and charge its time."""
        spent = SpentSeconds()

        def add(seconds: float) -> None:
            spent.add(seconds)
            self._charge(seconds)

        await metered(work, add)
        self._turns.queue.spent(who, LEAST_S, spent.seconds)

    def charge(self, who: str, seconds: float) -> None:
        """Charge seconds that the front has already spent as a light request's."""
        self._charge(seconds)
        self._turns.queue.spent(who, LEAST_S, seconds)

    def _charge(self, seconds: float) -> None:
        self._next_at = max(self._next_at, self._now()) + seconds * (1 / SHARE - 1)

    @property
    def _anyone_works(self) -> bool:
        return self._working > 0 or self._now() < self._worked_until + RECENT_S


class SpentSeconds:
    """Sum of seconds of the front's thread."""

    seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add seconds."""
        self.seconds += seconds


@coroutine
def metered(work: Awaitable[None], add: Callable[[float], None]) -> Generator[Any, None, None]:
    """Await ``work``, and pass the seconds of each step to ``add``, without the waits between steps."""
    steps = work.__await__()
    step: Callable[[], Any] = partial(steps.send, None)
    while True:
        began = time.perf_counter()
        try:
            waits_for = step()
        except StopIteration:
            return
        finally:
            add(time.perf_counter() - began)
        try:
            yield waits_for
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:
            step = partial(steps.throw, error)
        else:
            step = partial(steps.send, None)
