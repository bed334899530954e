"""The memory that requests may take together: how much there is, and who holds how much of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType

from upriver.errors import ConfigError, DoesNotFit, Overloaded
from upriver.profile.resources import available_bytes
from upriver.program.graph.devices import check_device
from upriver.text import bytes_text
from upriver.types import require_finite

BASE = "server"
"""Owner of what is held before any request: idle workers."""

INDEXES = "indexes"
"""Owner of what the indexes of datasets hold: tenants share them."""


def memory_budget(device: str, *, reserve: float, given: int | None, held_bytes: int = 0) -> int:
    """Bytes that requests may take together on a device.

    Args:
        device: Where workers compute.
        reserve: Share of what is available that is left alone, in [0, 1).
        given: What the operator says it is; worked out from the device, or the machine and the control groups
            of this process, if None.
        held_bytes: Available bytes that the server itself has taken already, and counts in its budget: on a
            CPU what idle workers hold.

    Raises:
        ConfigError: If nothing is left, or there is no such device.
    """
    require_finite("memory_reserve", reserve)
    if reserve >= 1:
        raise ConfigError(f"memory_reserve is a share below 1 of what is available, got {reserve:g}")
    if given is not None:
        if given < 1:
            raise ConfigError(f"memory_budget_bytes must be a whole number >= 1, got {given}")
        return given
    available = available_bytes(check_device(device)) + held_bytes
    budget = int((1 - reserve) * available)
    if budget < 1:
        raise ConfigError(
            f"no memory is left for requests on {device}: {available} bytes are available, and of these a "
            f"share of {reserve:g} stays free"
        )
    return budget


class Budget:
    """One pool of memory, of which parts are held. Belongs to the event loop's thread.

    Args:
        total_bytes: What there is.

    Attributes:
        total_bytes: What there is.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes < 1:
            raise ConfigError(f"a memory budget has 1 byte or more, got {total_bytes}")
        self.total_bytes = total_bytes
        self._held: Counter[str] = Counter()
        self._reserved_bytes = self._most_reserved_bytes = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def reserved_bytes(self) -> int:
        """What all hold together; never more than there is."""
        return self._reserved_bytes

    @property
    def most_reserved_bytes(self) -> int:
        """The most that was ever held at once."""
        return self._most_reserved_bytes

    @property
    def free_bytes(self) -> int:
        """What nobody holds."""
        return self.total_bytes - self._reserved_bytes

    @property
    def most_bytes(self) -> int:
        """What can be had at best, whoever gives back: all but what is held before any request."""
        return self.total_bytes - self.held_by(BASE)

    def hold(self, nbytes: int, *, owner: str) -> Hold:
        """Hold a part from here on until it is released.

        Args:
            nbytes: How much; may be 0.
            owner: On whose behalf: a tenant's name.

        Raises:
            DoesNotFit: If that much never is free.
            Overloaded: If it is not free now.
        """
        self._take(nbytes, owner, whole=nbytes)
        return Hold(self, nbytes, owner)

    def held_by(self, owner: str) -> int:
        """Bytes that are held on behalf of an owner."""
        return self._held[owner]

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called whenever bytes have come back, or could be had."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Some of what is held would be given back from here on if it were asked for."""
        for listener in tuple(self._listeners):  # one may add another
            listener()

    def check_fits(self, nbytes: int, *, beside: int = 0) -> None:
        """Insist that one request may have so many bytes at some time.

        Args:
            nbytes: What it is to hold.
            beside: What it holds otherwise as long as it holds these.

        Raises:
            DoesNotFit: If it never may.
        """
        if nbytes + beside > self.most_bytes:
            raise DoesNotFit(
                f"this takes {bytes_text(nbytes + beside)} of memory, and the server has "
                f"{bytes_text(self.most_bytes)} for requests: ask for less at once, or compute it elsewhere"
            )

    def _take(self, nbytes: int, owner: str, *, whole: int) -> None:
        if nbytes < 0:
            raise ValueError(f"bytes that are held are 0 or more, got {nbytes}")
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


class Hold:
    """A part of a budget; as a context manager it is released at the end of the block.

    Attributes:
        owner: On whose behalf it is held.
    """

    def __init__(self, budget: Budget, nbytes: int, owner: str) -> None:
        self._budget, self._nbytes, self.owner = budget, nbytes, owner
        self._released = False

    @property
    def nbytes(self) -> int:
        """How much; 0 once it is released."""
        return self._nbytes

    def resize(self, nbytes: int) -> None:
        """Hold more, or less; after an error as much as before.

        Raises:
            DoesNotFit: If there never is that much.
            Overloaded: If there is not that much more now, or all was released.
        """
        if self._released:
            raise Overloaded("the memory of this was given back: it is over")
        if nbytes < 0:
            raise ValueError(f"bytes that are held are 0 or more, got {nbytes}")
        more = nbytes - self._nbytes
        if more > 0:
            self._budget._take(more, self.owner, whole=nbytes)
        self._nbytes = nbytes
        if more < 0:
            self._budget._give_back(-more, self.owner)

    def release(self) -> None:
        """Give all of it back; once, however often it is called."""
        if not self._released:
            self._released = True
            nbytes, self._nbytes = self._nbytes, 0
            self._budget._give_back(nbytes, self.owner)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
