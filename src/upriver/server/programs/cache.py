"""Cache programs and the memory that they hold: unused ones are evicted when memory is short.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from upriver.control.memory_budget import MemoryBudget, MemoryHold
from upriver.errors import DoesNotFit, Overloaded
from upriver.server.programs.program_files import ProgramFiles

RETRY_S = 2.0
"""``Retry-After`` if programs in use fill the memory: a request ends within some seconds."""


@dataclass(slots=True)
class _Entry:
    """Hold a program that is kept, or will be once it is loaded."""

    owner: str
    hold: MemoryHold
    users: int = 0
    files: ProgramFiles | None = None
    loading: asyncio.Future[ProgramFiles] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedProgram:
    """Describe one cached program for monitoring.

    Attributes:
        owner: Name of the tenant.
        users: Requests that hold it.
        loaded: Whether all requested parts are here; if False, it is being read.
    """

    key: str
    owner: str
    nbytes: int
    users: int
    loaded: bool


class ProgramCache:
    """Keep programs within a budget; evict the least recently used first.

    Args:
        most_bytes: Bytes that unused programs may hold.
        on_evict: Called with each evicted key.
        quotas: Bytes that unused programs may hold, by owner.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        *,
        most_bytes: int,
        on_evict: Callable[[str], None],
        quotas: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._budget, self._most_bytes, self._on_evict = budget, most_bytes, on_evict
        self._quotas = quotas
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[CachedProgram]:
        for key, entry in self._entries.items():
            yield CachedProgram(
                key=key,
                owner=entry.owner,
                nbytes=entry.hold.nbytes,
                users=entry.users,
                loaded=entry.files is not None and entry.loading is None,
            )

    @property
    def nbytes(self) -> int:
        """Bytes that all programs hold."""
        return sum(entry.hold.nbytes for entry in self._entries.values())

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of programs that are kept or expected."""
        return frozenset(self._entries)

    def files(self, key: str) -> ProgramFiles | None:
        """Return the program, or None if it is not here."""
        entry = self._entries.get(key)
        return None if entry is None else entry.files

    def idle_bytes(self, *, but: Collection[str] = (), owner: str | None = None) -> int:
        """Return the bytes that evicting unused programs would free, of all tenants or of one."""
        idle = [self._entries[key] for key in self._idle(but)]
        return sum(entry.hold.nbytes for entry in idle if owner in (None, entry.owner))

    def make_room(self, nbytes: int, *, but: Collection[str] = ()) -> bool:
        """Evict idle programs until ``nbytes`` are free in the budget, or evict none and return False."""
        if self._budget.free_bytes + self.idle_bytes(but=but) < nbytes:
            return False
        for key in self._idle(but):
            if self._budget.free_bytes >= nbytes:
                break
            self._drop(key)
        return True

    def take(self, key: str, nbytes: int, *, owner: str) -> None:
        """Hold a program; hold its memory too if it is not kept yet.

        Raises:
            DoesNotFit: If there is never enough memory for it.
            Overloaded: If there is no memory for it now.
        """
        if key not in self._entries:
            self._need(nbytes, whole=nbytes)
            self._entries[key] = _Entry(owner, self._budget.hold(nbytes, owner=owner))
        self._entries[key].users += 1
        self._entries.move_to_end(key)

    def give_back(self, key: str) -> None:
        """Release a program that `take` held."""
        entry = self._entries[key]
        entry.users -= 1
        if entry.users:
            return
        if entry.files is None and entry.loading is None:
            self._drop(key)  # it was never loaded
        self._trim(entry.owner)
        self._budget.changed()  # idle programs can be evicted

    async def load(self, key: str, read: Callable[[], Awaitable[ProgramFiles]]) -> ProgramFiles:
        """Return a held program; the first caller reads it while others wait.

        Its weights may still have to arrive: see `come`.
        """
        entry = self._entries[key]
        if entry.files is not None and entry.loading is None and entry.files.broken:
            entry.files = None
            self._on_evict(key)
        if entry.files is None and entry.loading is None:
            entry.loading = asyncio.ensure_future(read())
            entry.loading.add_done_callback(lambda done: self._settle(key, entry, done))
        if entry.files is not None:
            return entry.files
        assert entry.loading is not None
        # Shielded: other requests may wait for the same program when this one is cancelled.
        return await asyncio.shield(entry.loading)

    def come(self, key: str, files: ProgramFiles) -> None:
        """Keep a program while more of its weights are read; drop it if they do not arrive."""
        entry, cold = self._entries[key], files.cold
        if cold is None or entry.files is not files or entry.loading is not None:
            return
        if not cold.coming and cold.error is None:
            return

        async def come() -> ProgramFiles:
            await cold.over()
            return files

        entry.loading = asyncio.ensure_future(come())
        entry.loading.add_done_callback(lambda done: self._settle(key, entry, done))

    def coming(self, *, owner: str) -> MemoryHold:
        """Return memory for a program that is being uploaded: empty, enlarged by `grow`, ended by `over`."""
        return self._budget.hold(0, owner=owner)

    def grow(self, hold: MemoryHold, nbytes: int) -> None:
        """Enlarge the memory of an upload; raise as `take` does."""
        if nbytes > hold.nbytes:
            self._need(nbytes - hold.nbytes, whole=nbytes)
            hold.resize(nbytes)

    def put(self, files: ProgramFiles, hold: MemoryHold) -> None:
        """Keep a complete and valid upload, unless a request has loaded the same program meanwhile."""
        if files.key not in self._entries:
            self._entries[files.key] = _Entry(hold.owner, hold, files=files)

    def over(self, key: str, hold: MemoryHold) -> None:
        """End an upload; release its memory unless it was `put`."""
        entry = self._entries.get(key)
        if entry is None or entry.hold is not hold:
            hold.release()
        if entry is None:
            self._on_evict(key)  # a worker may have loaded it
        self._trim(hold.owner)
        self._budget.changed()

    def drop_idle(self, owner: str, nbytes: int) -> None:
        """Evict a tenant's unused programs until its programs hold at most this many bytes."""
        mine = [key for key, entry in self._entries.items() if entry.owner == owner]
        kept = sum(self._entries[key].hold.nbytes for key in mine)
        for key in mine:
            if kept <= nbytes:
                return
            if not self._entries[key].users and self._entries[key].loading is None:
                kept -= self._entries[key].hold.nbytes
                self._drop(key)

    def _settle(self, key: str, entry: _Entry, task: asyncio.Future[ProgramFiles]) -> None:
        entry.loading = None
        broken = task.cancelled() or task.exception() is not None
        if broken and entry.files is not None:  # workers may have begun with it
            self._on_evict(key)
        entry.files = None if broken else task.result()
        if entry.users:
            return
        if entry.files is None:
            self._drop(key)
        self._trim(entry.owner)
        self._budget.changed()

    def _need(self, more: int, *, whole: int) -> None:
        """Free ``more`` bytes for a program that needs ``whole`` bytes in all."""
        most = self._budget.most_bytes
        if whole > most:
            raise DoesNotFit(f"this program takes {whole} bytes of memory, and the server has {most}")
        if not self.make_room(more):
            raise Overloaded("programs in use leave no room for another one", retry_after_s=RETRY_S)

    def _idle(self, but: Collection[str]) -> list[str]:
        return [
            key
            for key, entry in self._entries.items()
            if not entry.users and entry.loading is None and key not in but
        ]

    def _trim(self, owner: str) -> None:
        """Evict unused programs beyond the limit of all, and beyond their owner's quota."""
        if owner in self._quotas:
            self.drop_idle(owner, self._quotas[owner])
        over = self.idle_bytes() - self._most_bytes
        for key in self._idle(()):
            if over <= 0:
                return
            over -= self._entries[key].hold.nbytes
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._entries.pop(key).hold.release()
        self._on_evict(key)
