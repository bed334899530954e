"""What a request holds of the memory budget, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import TracebackType

from upriver.errors import Overloaded
from upriver.server.scheduling.memory_budget import Budget, Hold
from upriver.server.tenants import Tenant

MakeRoom = Callable[[int], object]
"""Lets go of idle programs until so many bytes are free, if that can be."""

BODIES_SHARE = 0.5
"""Of the memory, what bodies may hold together as they come and wait: requests that all have their body here
and no memory to compute would wait for each other."""

DECISION_S = 10.0
"""A worker's thread waits so long for the loop to say yes or no. It takes milliseconds; a loop that is being
closed never does."""


class MemoryUse:
    """Memory that is given back when the last user has left: the request, or a worker that is still at it.

    As a context manager it has one more user while the block runs.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._users = 0

    def enter(self) -> None:
        """One more user."""
        self._users += 1

    def leave(self) -> None:
        """One user less."""
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


class Bodies:
    """Memory of the bodies that are being read, or wait in line.

    Args:
        budget: Where it is held.
        make_room: See `MakeRoom`.
    """

    def __init__(self, budget: Budget, make_room: MakeRoom) -> None:
        self._budget, self._make_room = budget, make_room
        self._nbytes = 0

    def hold(self, hold: Hold | None, nbytes: int, tenant: Tenant) -> Hold:
        """Hold as much for one of them, or more than so far.

        Raises:
            Overloaded: If there is no memory for it.
        """
        before = 0 if hold is None else hold.nbytes
        more, others = nbytes - before, self._nbytes - before
        if others and self._nbytes + more > BODIES_SHARE * self._budget.most_bytes:
            raise Overloaded("bodies of other requests take the room; come again")
        self._make_room(more)
        if hold is None:
            hold = self._budget.hold(nbytes, owner=tenant.name)
        else:
            hold.resize(nbytes)
        self._nbytes += more
        return hold

    def release(self, hold: Hold) -> None:
        """One of them is not needed any more."""
        self._nbytes -= hold.nbytes
        hold.release()


class Coming:
    """A body that is being read: as much is held as has come, a step at a time."""

    STEP_BYTES = 1 << 20

    def __init__(self, bodies: Bodies, tenant: Tenant) -> None:
        self._bodies, self._tenant = bodies, tenant
        self._hold: Hold | None = None

    @property
    def nbytes(self) -> int:
        """What is held for it."""
        return 0 if self._hold is None else self._hold.nbytes

    def room(self, nbytes: int) -> None:
        """There are to be so many bytes.

        Raises:
            Overloaded: If there is no memory for them.
        """
        if nbytes <= self.nbytes:
            return
        wanted = -(-nbytes // self.STEP_BYTES) * self.STEP_BYTES
        self._hold = self._bodies.hold(self._hold, wanted, self._tenant)

    def release(self) -> None:
        """It is not needed any more; may be called again."""
        if self._hold is not None:
            self._bodies.release(self._hold)


class AnswerRoom:
    """Whether an answer fits what a request holds; asked by a worker's thread, decided in the loop's.

    Args:
        hold: The request's.
        loop: The one that the hold belongs to.
        make_room: See `MakeRoom`.
        check_fits: Raises DoesNotFit where the request never may hold so many bytes.
    """

    def __init__(
        self,
        hold: Hold,
        loop: asyncio.AbstractEventLoop,
        make_room: MakeRoom,
        check_fits: Callable[[int], None],
    ) -> None:
        self._hold, self._loop, self._make_room, self._check_fits = hold, loop, make_room, check_fits
        self._beside = 0

    def __call__(self, nbytes: int) -> bool:
        """Whether there is; what is missing is held from here on if so. Input stages are through.

        Raises:
            DoesNotFit: If there never is.
        """
        if not self._beside and 2 * nbytes <= self._hold.nbytes:
            return True
        return self._decided(self._for_answer(nbytes))

    def beside(self, nbytes: int) -> bool:
        """Whether so many bytes more are there, while input stages work: until it is asked for an answer.

        Raises:
            DoesNotFit: If there never are.
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
        """Twice an answer: what was laid out, beside what it was laid out from."""
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
