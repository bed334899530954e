"""Share anonymous memory between the front and a worker.

Every piece is a memfd that travels as a file descriptor. It has no name that could be left behind. Its
memory is freed with the last process that maps it, even after a crash. Its size is sealed, so neither side
can shrink it under the other.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

SMALLEST_SLOT = 64 * 1024
FREE_SLOTS = 4
"""Free slots that keep their memory for the next micro-batch. One is being filled, two wait to be sent, one
is input."""

KEPT_BYTES = 32 << 20
"""Bytes that the free slots of a worker keep together, counted in the budget as memory of idle workers. Two
answers of 16 samples at ResNet-18's first maps (12.8 MB each) fit. New memory costs page faults: a fifth of a
server's processor time if each answer needed it."""

F_SEAL_FUTURE_WRITE = 0x10
"""Flag of Linux 5.1 that `fcntl` has no name for."""

Bytes = npt.NDArray[np.uint8]


class Slot:
    """Hold memory that both sides may write. The front owns it, and knows when no view uses it any more.

    Attributes:
        owner: Tenant whose bytes it holds.
        written: Whether it may hold memory and bytes.
    """

    _ids = itertools.count(1)

    def __init__(self, nbytes: int) -> None:
        self.fd: int | None = None  # before anything can fail, since `close_fd` reads it
        self.owner = ""
        self.written = False
        self.id = next(self._ids)
        self.nbytes = max(SMALLEST_SLOT, 1 << (nbytes - 1).bit_length()) if nbytes else SMALLEST_SLOT
        self.fd = os.memfd_create("upriver-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            self.close_fd()
            raise

    def array(self, nbytes: int) -> Bytes:
        """Return the first ``nbytes`` bytes; the array and all its views keep the mapping alive."""
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes)

    def clear(self) -> None:
        """Return its memory to the system, on both sides; the mapping stays and reads as zeros."""
        if self.written:
            self._map.madvise(mmap.MADV_REMOVE)
            self.written = False

    def close_fd(self) -> None:
        """Close the descriptor, which is not needed after the worker has mapped the memory."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __del__(self) -> None:
        self.close_fd()


class SlotPool:
    """Manage the slots of one worker.

    One thread takes slots. Any thread may drop the last view of a lent slot and so give it back. Therefore
    the pool uses only atomic operations of a deque: a finalizer could find a lock held by its own thread.
    """

    def __init__(self) -> None:
        self._free: deque[Slot] = deque()
        self._dropped: deque[int] = deque()

    def take(self, nbytes: int, *, owner: str = "") -> Slot:
        """Return a slot of at least ``nbytes`` bytes that no view uses, without another tenant's bytes."""
        free = self._taken_out()
        fitting = [slot for slot in free if nbytes <= slot.nbytes <= 4 * max(nbytes, SMALLEST_SLOT)]
        found = next((slot for slot in fitting if slot.owner == owner), None) or next(iter(fitting), None)
        if found is not None:
            free.remove(found)
        slot = found or Slot(nbytes)
        if slot.owner != owner:
            slot.clear()
        if not slot.written:
            _make_room(free, slot.nbytes)
        slot.owner, slot.written = owner, True
        self._dropped.extend(each.id for each in free[:-FREE_SLOTS])
        self._free.extend(free[-FREE_SLOTS:])
        return slot

    def give_back(self, slot: Slot) -> None:
        """Give a slot back that no view uses any more."""
        try:
            room = _has_room(tuple(self._free), slot.nbytes)
        except RuntimeError:  # another slot comes back at this moment
            room = False
        if not room:
            slot.clear()
        self._free.append(slot)

    def rest(self) -> None:
        """Free the memory of all free slots; call it in the thread that takes them."""
        free = self._taken_out()
        for slot in free:
            slot.clear()
        self._free.extend(free)

    def _taken_out(self) -> list[Slot]:
        """Remove and return the free slots: no other thread uses them from then on."""
        free = []
        while self._free:
            free.append(self._free.popleft())
        return free

    def lend(self, slot: Slot, nbytes: int) -> memoryview:
        """Return a view for sending. The slot comes back when the view and all its slices are gone."""
        array = slot.array(nbytes)
        weakref.finalize(array, self.give_back, slot)
        return array.data

    def dropped(self) -> list[int]:
        """Return the slots that the worker may unmap, each once."""
        ids = []
        while self._dropped:
            ids.append(self._dropped.popleft())
        return ids


def _has_room(free: Iterable[Slot], nbytes: int) -> bool:
    """Return whether one more slot may keep its memory."""
    kept = [slot.nbytes for slot in free if slot.written]
    return len(kept) < FREE_SLOTS and sum(kept) + nbytes <= KEPT_BYTES


def _make_room(free: Sequence[Slot], nbytes: int) -> None:
    """Clear free slots, the earliest given back first, until one more can be kept with them."""
    for slot in free:
        if nbytes > KEPT_BYTES or _has_room(free, nbytes):
            return
        slot.clear()


class SealedFile:
    """Hold bytes that are written once, then sealed; all workers map them without a copy."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("upriver-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.nbytes = 0
        self._finalizer = weakref.finalize(self, os.close, self.fd)

    def append(self, data: bytes | memoryview) -> None:
        """Append data."""
        rest = memoryview(data)
        while len(rest):
            written = os.write(self.fd, rest)
            rest = rest[written:]
            self.nbytes += written

    def seal(self) -> None:
        """Seal the file: no process, not even this one, can change a byte from then on."""
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def view(self) -> memoryview:
        """Return all of the file, mapped."""
        return map_privately(self.fd, self.nbytes)


class FillingFile:
    """Hold bytes that arrive in any order while workers map them; only this object can write them.

    A page exists once it was written or read, so bytes that never arrive need no memory.

    Raises:
        OSError: If this kind of memory is not available: Linux has it since 5.1.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("upriver-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.nbytes = nbytes
        self._finalizer = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, nbytes)
        self._map: mmap.mmap | None = mmap.mmap(self.fd, nbytes)
        seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)  # later mappings cannot be written

    def room(self, start: int, stop: int) -> memoryview:
        """Return a view of some bytes to write or read; the mapping lives as long as its views."""
        assert self._map is not None, "it is whole"
        return memoryview(self._map)[start:stop]

    def close(self) -> None:
        """End the writing: no process, not even this one, can change a byte from then on."""
        self._map = None


def map_privately(fd: int, nbytes: int) -> memoryview:
    """Map a file of the front privately: pages are shared, and a write changes only this process's copy.

    Later writes of the front to a `FillingFile` appear here, except in pages that were written here.
    """
    if nbytes == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY))


def map_shared(fd: int, nbytes: int) -> Bytes:
    """Map a slot on the worker's side."""
    return np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
