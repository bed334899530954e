"""Copy objects that hold tensors to another process of this program, as they are at this moment.

Bytes of tensors lie in anonymous shared memory, at the distance from a cache line that they have here: the
distance decides low bits. Both processes belong to the user, and nothing is read from a file or a network.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
from typing import Any

import cloudpickle
import torch

from upriver.errors import ConfigError
from upriver.text import error_text

ALIGNMENT = 64
"""A cache line, and the widest vector of any CPU that PyTorch has kernels for."""

_LENGTH = struct.Struct("<Q")

_Place = tuple[int, int, str]
"""A storage as the pickle names it: its offset and bytes in shared memory, and its device."""


class NoSnapshot(ConfigError):
    """An object cannot be copied to another process."""


class SharedMemory:
    """Anonymous memory that a started process inherits, by its descriptor.

    Attributes:
        descriptor: The descriptor, the same number in both processes.
    """

    def __init__(self) -> None:
        try:
            self.descriptor = os.memfd_create("upriver-preparation")
        except OSError as error:
            raise NoSnapshot(f"there is no shared memory: {error.strerror}") from error

    def close(self) -> None:
        """Close the descriptor here. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def store(value: object, descriptor: int) -> None:
    """Write an object to shared memory. Tensors are copied, and the object stays unchanged.

    Raises:
        NoSnapshot: If the object does not pickle, or there is not enough memory.
    """
    stream, storages = io.BytesIO(), _Storages()
    try:
        _Pickler(stream, storages).dump(value)
    except Exception as error:  # the user's own classes may raise anything
        raise NoSnapshot(f"it does not pickle: {error_text(error)}") from error
    text = stream.getbuffer()
    begin = _aligned(_LENGTH.size + text.nbytes)
    try:
        os.ftruncate(descriptor, begin + storages.nbytes)
        with mmap.mmap(descriptor, begin + storages.nbytes) as memory:
            memory[: _LENGTH.size] = _LENGTH.pack(text.nbytes)
            memory[_LENGTH.size : _LENGTH.size + text.nbytes] = text
            storages.write(memory, begin)
    except OSError as error:
        raise NoSnapshot(f"there is no shared memory: {error.strerror}") from error


def restore(descriptor: int) -> Any:
    """Return the object in shared memory. Its tensors are this process's own; writes to them stay here."""
    nbytes = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    length = _LENGTH.unpack(memory[: _LENGTH.size])[0]
    stream = io.BytesIO(memory[_LENGTH.size : _LENGTH.size + length])
    return _Unpickler(stream, memory, _aligned(_LENGTH.size + length)).load()


class _Storages:
    """Storages of tensors, each once, and their places in shared memory."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._places: dict[int, _Place] = {}
        self._held: list[tuple[torch.UntypedStorage, int]] = []

    def place(self, storage: torch.UntypedStorage) -> _Place:
        """Return the place of a storage."""
        key = int(storage._cdata)
        if key not in self._places:
            in_memory = storage.device.type == "cpu" and storage.nbytes() > 0
            skew = storage.data_ptr() % ALIGNMENT if in_memory else 0
            offset = _aligned(self.nbytes) + skew
            self._places[key] = (offset, storage.nbytes(), str(storage.device))
            self._held.append((storage, offset))  # alive, so that no other storage gets its address
            self.nbytes = offset + storage.nbytes()
        return self._places[key]

    def write(self, memory: mmap.mmap, begin: int) -> None:
        """Copy the bytes of all storages."""
        for storage, offset in self._held:
            if storage.nbytes():
                data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                view = memoryview(memory)[begin + offset : begin + offset + storage.nbytes()]
                target = torch.frombuffer(view, dtype=torch.uint8)
                target.copy_(data)
                del target
                view.release()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Write storages as places, and all else as Python does. Classes of the user's script go by value."""

    def __init__(self, stream: io.BytesIO, storages: _Storages) -> None:
        super().__init__(stream)
        self._storages = storages

    def persistent_id(self, value: object) -> tuple[_Place, torch.dtype | None] | None:
        """Return the place of a storage; None for any other object."""
        if isinstance(value, torch.storage.TypedStorage):
            return self._storages.place(value._untyped_storage), value.dtype
        if isinstance(value, torch.UntypedStorage):
            return self._storages.place(value), None
        return None


class _Unpickler(pickle.Unpickler):
    """Read storages from shared memory."""

    def __init__(self, stream: io.BytesIO, memory: mmap.mmap, begin: int) -> None:
        super().__init__(stream)
        self._memory, self._begin = memory, begin
        self._made: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, named: tuple[_Place, torch.dtype | None]) -> object:
        """Return the storage at a place, the same one each time."""
        (offset, nbytes, device), dtype = named
        empty = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        storage = self._made.get(offset) if nbytes else empty
        if storage is None:
            storage = self._made[offset] = self._storage(offset, nbytes).to(device=torch.device(device))
        if dtype is None:
            return storage
        typed: Any = torch.storage.TypedStorage  # torch does not type its constructor
        return typed(wrap_storage=storage, dtype=dtype, _internal=True)

    def _storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        whole = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=self._begin + offset)
        return whole.untyped_storage()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
