"""Account for the memory that requests may use together, by owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType

from upriver.errors import DoesNotFit, Overloaded
from upriver.text import bytes_text

BASE = "server"
"""Owner of memory that is held before any request: that of idle workers."""

INDEXES = "indexes"
"""Owner of the memory of datasets' indexes, which tenants share."""


class MemoryBudget:
    """Memory that is handed out in parts, each held by an owner."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._held: Counter[str] = Counter()
        self._reserved_bytes = self._most_reserved_bytes = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are held in total; never more than ``total_bytes``."""
        return self._reserved_bytes

    @property
    def most_reserved_bytes(self) -> int:
        """Most bytes that were ever held at once."""
        return self._most_reserved_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are not held."""
        return self.total_bytes - self._reserved_bytes

    @property
    def most_bytes(self) -> int:
        """Most bytes that a request could have if all others were released: all but those held by `BASE`."""
        return self.total_bytes - self.held_by(BASE)

    def hold(self, nbytes: int, *, owner: str) -> MemoryHold:
        """Hold a part on behalf of an owner until it is released.

        Raises:
            DoesNotFit: If this many bytes are never free.
            Overloaded: If they are not free now.
        """
        self._take(nbytes, owner, whole=nbytes)
        return MemoryHold(self, nbytes, owner)

    def held_by(self, owner: str) -> int:
        """Return the bytes that are held on behalf of an owner."""
        return self._held[owner]

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever bytes were released, or could be evicted."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Notify the listeners that held bytes could now be evicted."""
        for listener in tuple(self._listeners):  # a listener may add another
            listener()

    def check_fits(self, nbytes: int, *, beside: int = 0) -> None:
        """Check that one request may ever hold this many bytes, ``beside`` those that it holds already.

        Raises:
            DoesNotFit: If it never may.
        """
        if nbytes + beside > self.most_bytes:
            raise DoesNotFit(
                f"this takes {bytes_text(nbytes + beside)} of memory, and the server has "
                f"{bytes_text(self.most_bytes)} for requests: request less at once, or compute elsewhere"
            )

    def _take(self, nbytes: int, owner: str, *, whole: int) -> None:
        if nbytes < 0:
            raise ValueError(f"held bytes must be >= 0, got {nbytes}")
        if owner != BASE:
            self.check_fits(whole)
        if nbytes > self.free_bytes:
            raise Overloaded(
                f"there is no memory for this now: it takes {bytes_text(nbytes)}, and of "
                f"{bytes_text(self.total_bytes)} only {bytes_text(self.free_bytes)} are free"
            )
        self._reserved_bytes += nbytes
        self._most_reserved_bytes = max(self._most_reserved_bytes, self._reserved_bytes)
        self._held[owner] += nbytes

    def _give_back(self, nbytes: int, owner: str) -> None:
        self._reserved_bytes -= nbytes
        self._held[owner] -= nbytes
        if not self._held[owner]:
            del self._held[owner]
        self.changed()


class MemoryHold:
    """Hold a part of a budget; a ``with`` block releases it at the end."""

    def __init__(self, budget: MemoryBudget, nbytes: int, owner: str) -> None:
        self._budget, self._nbytes, self.owner = budget, nbytes, owner
        self._released = False

    @property
    def nbytes(self) -> int:
        """Bytes held; 0 after the release."""
        return self._nbytes

    def resize(self, nbytes: int) -> None:
        """Hold more bytes, or fewer; after an error as many as before.

        Raises:
            DoesNotFit: If this many bytes are never free.
            Overloaded: If the further bytes are not free now, or the hold was released.
        """
        if self._released:
            raise Overloaded("the memory of this request was released: it has ended")
        if nbytes < 0:
            raise ValueError(f"held bytes must be >= 0, got {nbytes}")
        more = nbytes - self._nbytes
        if more > 0:
            self._budget._take(more, self.owner, whole=nbytes)
        self._nbytes = nbytes
        if more < 0:
            self._budget._give_back(-more, self.owner)

    def release(self) -> None:
        """Release all bytes; further calls have no effect."""
        if not self._released:
            self._released = True
            nbytes, self._nbytes = self._nbytes, 0
            self._budget._give_back(nbytes, self.owner)

    def __enter__(self) -> MemoryHold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
