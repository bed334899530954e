"""Let tasks of the event loop wait for the turns that `upriver.control.fair_queue` deals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from upriver.control.fair_queue import FairQueue, Turn


class TurnGate:
    """Turns that tasks wait for. All methods belong to the event loop's thread.

    A free slot is never kept while a turn waits.
    """

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self._granted: dict[Turn, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(
        self, *, tenant: str, weight: float, request: Hashable, seconds: float
    ) -> AsyncIterator[None]:
        """Wait for a turn, and have it while the block runs; see `FairQueue.ask`."""
        turn = self.queue.ask(tenant=tenant, weight=weight, request=request, seconds=seconds)
        granted = self._granted[turn] = asyncio.get_running_loop().create_future()
        self._deal()
        try:
            await granted
        except BaseException:
            self._granted.pop(turn, None)
            self.queue.give_up(turn)  # it may have been granted at that very moment
            self._deal()
            raise
        try:
            yield
        finally:
            self.queue.end(turn)
            self._deal()

    def _deal(self) -> None:
        """Grant turns while slots are free."""
        while (turn := self.queue.grant()) is not None:
            granted = self._granted.pop(turn)
            if granted.done():  # cancelled, and its task has not run since
                self.queue.give_up(turn)
            else:
                granted.set_result(None)
