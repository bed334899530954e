"""Anonymous shared memory between the front and a worker.

Every piece is a memfd that travels as a file descriptor: it has no name that could be left behind, and its
memory is gone with the last process that maps it, however that died. Its size is sealed, so that neither side
can pull the ground from under the other.
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
"""Slots kept with their memory for the next micro-batch: one being filled, two waiting to be sent, one
input."""

KEPT_BYTES = 32 << 20
"""Memory that the free slots of a worker keep together; the budget counts it with what idle workers take. Two
answers of 16 samples at ResNet-18's first maps (12.8 MB each) fit. To take memory again costs page faults:
a fifth of a server's processor time where each answer did."""

F_SEAL_FUTURE_WRITE = 0x10
"""Of Linux 5.1, which `fcntl` has no name for."""

Bytes = npt.NDArray[np.uint8]


class Slot:
    """Memory that both sides may write; the front owns it, and knows when nobody looks at it any more.

    Attributes:
        owner: Tenant whose bytes it holds.
        written: Whether it may hold memory, and bytes.
    """

    _ids = itertools.count(1)

    def __init__(self, nbytes: int) -> None:
        self.fd: int | None = None  # before anything can fail: it is closed at the end
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
        """The first ``nbytes`` bytes; the array and all views of it keep the mapping alive."""
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes)

    def clear(self) -> None:
        """Give its memory back to the system, on both sides; the mapping stays, and is all zeros."""
        if self.written:
            self._map.madvise(mmap.MADV_REMOVE)
            self.written = False

    def close_fd(self) -> None:
        """The worker has mapped it: the descriptor is not needed any more."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __del__(self) -> None:
        self.close_fd()


class SlotPool:
    """The slots of one worker.

    One thread takes; whichever thread drops the last view of a lent slot gives it back, hence only the atomic
    operations of a deque, and no lock that a finalizer could find taken by its own thread.
    """

    def __init__(self) -> None:
        self._free: deque[Slot] = deque()
        self._dropped: deque[int] = deque()

    def take(self, nbytes: int, *, owner: str = "") -> Slot:
        """Return a slot of at least ``nbytes`` bytes that nobody looks at, without another tenant's bytes.

        Args:
            nbytes: How many.
            owner: The tenant whose bytes it is to hold.
        """
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
        """Nobody looks at it any more."""
        try:
            room = _has_room(tuple(self._free), slot.nbytes)
        except RuntimeError:  # another one comes back in this moment
            room = False
        if not room:
            slot.clear()
        self._free.append(slot)

    def rest(self) -> None:
        """Give the memory of all free slots back; from the thread that takes them."""
        free = self._taken_out()
        for slot in free:
            slot.clear()
        self._free.extend(free)

    def _taken_out(self) -> list[Slot]:
        """Those that are free: from here on nobody else touches them."""
        free = []
        while self._free:
            free.append(self._free.popleft())
        return free

    def lend(self, slot: Slot, nbytes: int) -> memoryview:
        """A view for sending: the slot comes back by itself when this view and all slices of it are gone."""
        array = slot.array(nbytes)
        weakref.finalize(array, self.give_back, slot)
        return array.data

    def dropped(self) -> list[int]:
        """Slots that the worker may unmap, each told once."""
        ids = []
        while self._dropped:
            ids.append(self._dropped.popleft())
        return ids


def _has_room(free: Iterable[Slot], nbytes: int) -> bool:
    """Whether one more slot may keep its memory."""
    kept = [slot.nbytes for slot in free if slot.written]
    return len(kept) < FREE_SLOTS and sum(kept) + nbytes <= KEPT_BYTES


def _make_room(free: Sequence[Slot], nbytes: int) -> None:
    """Clear free slots, those that came back first before others, until one more can be kept with them."""
    for slot in free:
        if nbytes > KEPT_BYTES or _has_room(free, nbytes):
            return
        slot.clear()


class SealedFile:
    """Bytes that are written once, then sealed and shared by all workers, which map them without a copy."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("upriver-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.nbytes = 0
        self._finalizer = weakref.finalize(self, os.close, self.fd)

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end."""
        rest = memoryview(data)
        while len(rest):
            written = os.write(self.fd, rest)
            rest = rest[written:]
            self.nbytes += written

    def seal(self) -> None:
        """From here on nobody can change a byte, not even this process."""
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def view(self) -> memoryview:
        """All of it, mapped."""
        return map_privately(self.fd, self.nbytes)


class FillingFile:
    """Bytes that come in any order while workers map them already; only this object can write them.

    Its pages are there once something was written to them, or has read them, so what never comes takes none.

    Raises:
        OSError: If there is no such memory: Linux has it since 5.1.
    """

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("upriver-program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.nbytes = nbytes
        self._finalizer = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, nbytes)
        self._map: mmap.mmap | None = mmap.mmap(self.fd, nbytes)
        seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)  # whatever is mapped from here on cannot be written

    def room(self, start: int, stop: int) -> memoryview:
        """Some of its bytes, to write or to read; the mapping is there as long as such a view is."""
        assert self._map is not None, "it is whole"
        return memoryview(self._map)[start:stop]

    def close(self) -> None:
        """Nothing more comes: from here on nobody can change a byte, not even this process."""
        self._map = None


def map_privately(fd: int, nbytes: int) -> memoryview:
    """Map a file of the front's: its pages are everyone's, a write would change this process's copy alone.

    What the front writes to one that is being filled shows here, in all pages that were not written here.
    """
    if nbytes == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY))


def map_shared(fd: int, nbytes: int) -> Bytes:
    """Map a slot on the worker's side."""
    return np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
