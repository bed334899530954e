"""A bounded share of the front for requests that compute nothing: pages, probes, refusals, strangers.

The front is one thread. What it does for one client it does not do for another. So requests that only look
are dealt out: one starts at a time, tenants take turns, and while anyone works all of them together take no
more than `SHARE` of the thread. What a request takes is measured step by step, so a new route needs no entry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import coroutine
from typing import Any

from upriver.server.scheduling.fair_queue import LEAST_S, Turns

SHARE = 0.25
"""Of the front's time, what looking takes at most while others work: their requests take a third longer then,
and a second still has room for 250 pages of a millisecond."""

RECENT_S = 1.0
"""After a request that worked the share holds for so long: the next one of a job comes within it."""

MAX_STRANGERS = 64
"""Refusals that may wait for their turn, as many as a second has room for. A further stranger is disconnected
without an answer, which takes less time than one."""

STRANGERS, HEALTH = "*strangers*", "*health*"
"""Those who take turns like a tenant. No tenant can have such a name."""


class Looks:
    """Deals out the front's time to requests that only look. Belongs to the event loop's thread.

    Args:
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._turns = Turns(1)
        self._next_at = self._worked_until = now() - RECENT_S
        self._working = 0

    @property
    def strangers_waiting(self) -> int:
        """Strangers that wait for an answer."""
        return self._turns.waiting_of(STRANGERS)

    @property
    def behind(self) -> bool:
        """Whether looking has taken its share of the next `RECENT_S` already."""
        return self._anyone_works and self._next_at > self._now() + RECENT_S

    @contextmanager
    def works(self) -> Iterator[None]:
        """Hold looking to its share while the block runs, and for `RECENT_S` after it."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._worked_until = self._now()

    async def turn(self, who: str, weight: float = 1.0) -> None:
        """Wait for the moment at which the front has time for a look.

        Args:
            who: A tenant's name, `STRANGERS` or `HEALTH`.
            weight: Its share relative to others'.
        """
        async with self._turns.turn(tenant=who, weight=weight, request=object(), seconds=LEAST_S):
            await asyncio.sleep(0)  # whatever else is ready goes between two looks
            while (left_s := self._next_at - self._now()) > 0 and self._anyone_works:
                await asyncio.sleep(left_s)

    async def look(self, who: str, work: Awaitable[None]) -> None:
        """Do work that counts as looking."""
        spent = Spent()

        def add(seconds: float) -> None:
            spent.add(seconds)
            self._charge(seconds)

        await metered(work, add)
        self._turns.spent(who, LEAST_S, spent.seconds)

    def charge(self, who: str, seconds: float) -> None:
        """Count seconds of the front's thread as looking that are over."""
        self._charge(seconds)
        self._turns.spent(who, LEAST_S, seconds)

    def _charge(self, seconds: float) -> None:
        self._next_at = max(self._next_at, self._now()) + seconds * (1 / SHARE - 1)

    @property
    def _anyone_works(self) -> bool:
        return self._working > 0 or self._now() < self._worked_until + RECENT_S


class Spent:
    """Seconds of the front's thread."""

    seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count some more."""
        self.seconds += seconds


@coroutine
def metered(work: Awaitable[None], add: Callable[[float], None]) -> Generator[Any, None, None]:
    """Await ``work``, and tell ``add`` the seconds of each of its steps; waiting is no part of them."""
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
