"""Hold parts of the memory budget for a request and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import TracebackType

from upriver.control.body_memory import MakeRoom
from upriver.control.memory_budget import MemoryHold
from upriver.errors import Overloaded

DECISION_S = 10.0
"""Seconds that a worker's thread waits for the event loop's decision. The decision takes milliseconds, but an
event loop that is being closed never answers."""


class MemoryUse:
    """Release memory when its last user leaves: the request, or a worker that still computes for it.

    As a context manager it adds one user while the block runs.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._users = 0

    def enter(self) -> None:
        """Add a user."""
        self._users += 1

    def leave(self) -> None:
        """Remove a user."""
        self._users -= 1
        if not self._users:
            self._release()

    def __enter__(self) -> MemoryUse:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()


class AnswerRoom:
    """Decide whether an answer fits its request's memory. A worker's thread asks, the event loop decides.

    Args:
        loop: Event loop that the hold belongs to.
        make_room: See `MakeRoom`.
        check_fits: Raises DoesNotFit if the request may never hold this many bytes.
    """

    def __init__(
        self,
        hold: MemoryHold,
        loop: asyncio.AbstractEventLoop,
        make_room: MakeRoom,
        check_fits: Callable[[int], None],
    ) -> None:
        self._hold, self._loop, self._make_room, self._check_fits = hold, loop, make_room, check_fits
        self._beside = 0

    def __call__(self, nbytes: int) -> bool:
        """Return whether the answer fits, and hold the missing bytes if so. Call it after the input stages.

        Raises:
            DoesNotFit: If the answer never fits.
        """
        if not self._beside and 2 * nbytes <= self._hold.nbytes:
            return True
        return self._decided(self._for_answer(nbytes))

    def beside(self, nbytes: int) -> bool:
        """Return whether this many more bytes are available to input stages, until an answer is asked for.

        Raises:
            DoesNotFit: If they never are.
        """
        return nbytes <= self._beside or self._decided(self._for_stages(nbytes))

    def _decided(self, decision: Coroutine[None, None, bool]) -> bool:
        decided = asyncio.run_coroutine_threadsafe(decision, self._loop)
        try:
            return decided.result(DECISION_S)
        except (TimeoutError, CancelledError):
            decided.cancel()
            return False

    async def _for_answer(self, nbytes: int) -> bool:
        """Reserve twice an answer: the source of the layout and its result coexist."""
        self._hold.resize(self._hold.nbytes - self._beside)
        self._beside = 0
        return self._grow(max(0, 2 * nbytes - self._hold.nbytes))

    async def _for_stages(self, nbytes: int) -> bool:
        if not self._grow(nbytes - self._beside):
            return False
        self._beside = nbytes
        return True

    def _grow(self, more: int) -> bool:
        self._check_fits(self._hold.nbytes + more)
        self._make_room(more)
        try:
            self._hold.resize(self._hold.nbytes + more)
        except Overloaded:
            return False
        return True
