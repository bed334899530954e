"""Decide whether the body of a request may come in: bodies share one part of the memory budget."""

from __future__ import annotations

from collections.abc import Callable

from upriver.control.memory_budget import MemoryBudget, MemoryHold
from upriver.errors import Overloaded

MakeRoom = Callable[[int], object]
"""Evict idle programs until this many bytes are free, if possible."""

BODIES_SHARE = 0.5
"""Share of the memory that bodies may hold together while they arrive and wait.

Requests that all hold a body, with no memory left to compute, would wait for each other.
"""


class BodyMemory:
    """Hold the memory of bodies that are being read, or wait for admission."""

    def __init__(self, budget: MemoryBudget, make_room: MakeRoom) -> None:
        self._budget, self._make_room = budget, make_room
        self._nbytes = 0

    def hold(self, hold: MemoryHold | None, nbytes: int, owner: str) -> MemoryHold:
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
            hold = self._budget.hold(nbytes, owner=owner)
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

    def __init__(self, bodies: BodyMemory, owner: str) -> None:
        self._bodies, self._owner = bodies, owner
        self._hold: MemoryHold | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held for the body."""
        return 0 if self._hold is None else self._hold.nbytes

    def room(self, nbytes: int) -> None:
        """Hold at least this many bytes, or raise `Overloaded` if there is no memory for them."""
        if nbytes <= self.nbytes:
            return
        wanted = -(-nbytes // self.STEP_BYTES) * self.STEP_BYTES
        self._hold = self._bodies.hold(self._hold, wanted, self._owner)

    def release(self) -> None:
        """Release the body. May be called again."""
        if self._hold is not None:
            self._bodies.release(self._hold)
