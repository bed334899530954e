"""Hold parts of the memory budget for a request, its body and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from types import TracebackType

from upriver.errors import Overloaded
from upriver.server.scheduling.memory_budget import MemoryBudget, MemoryHold
from upriver.server.tenants import Tenant

MakeRoom = Callable[[int], object]
"""Evict idle programs until this many bytes are free, if possible."""

BODIES_SHARE = 0.5
"""Share of the memory that bodies may hold together while they arrive and wait.

Requests that all hold a body, with no memory left to compute, would wait for each other.
"""

DECISION_S = 10.0
"""Seconds that a worker's thread waits for the event loop's decision.

The decision takes milliseconds, but an event loop that is being closed never answers.
"""


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


class BodyMemory:
    """Hold the memory of bodies that are being read, or wait for admission.

    Args:
        budget: Budget that provides the memory.
        make_room: See `MakeRoom`.
    """

    def __init__(self, budget: MemoryBudget, make_room: MakeRoom) -> None:
        self._budget, self._make_room = budget, make_room
        self._nbytes = 0

    def hold(self, hold: MemoryHold | None, nbytes: int, tenant: Tenant) -> MemoryHold:
        """Hold this many bytes for a body, or resize its hold to them.

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

    def release(self, hold: MemoryHold) -> None:
        """Release a body."""
        self._nbytes -= hold.nbytes
        hold.release()


class IncomingBodyMemory:
    """Hold the memory of a body that is being read, in steps as it arrives."""

    STEP_BYTES = 1 << 20

    def __init__(self, bodies: BodyMemory, tenant: Tenant) -> None:
        self._bodies, self._tenant = bodies, tenant
        self._hold: MemoryHold | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for the body."""
        return 0 if self._hold is None else self._hold.nbytes

    def room(self, nbytes: int) -> None:
        """Hold at least this many bytes.

        Raises:
            Overloaded: If there is no memory for them.
        """
        if nbytes <= self.nbytes:
            return
        wanted = -(-nbytes // self.STEP_BYTES) * self.STEP_BYTES
        self._hold = self._bodies.hold(self._hold, wanted, self._tenant)

    def release(self) -> None:
        """Release the body. May be called again."""
        if self._hold is not None:
            self._bodies.release(self._hold)


class AnswerRoom:
    """Decide whether an answer fits its request's memory. A worker's thread asks, the event loop decides.

    Args:
        hold: The request's memory.
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
