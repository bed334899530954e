"""Read and append the rows of one stretch in an object store: immutable shards in one folder."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress

from upriver.engine.read import read_samples_async
from upriver.errors import Damaged, ObjectChanged, ObjectNotFound, StoreError
from upriver.features import Row
from upriver.features.listing import SHARD_FILE, shard_name
from upriver.features.row_form import RowBuffer
from upriver.features.shard import INDEX_NBYTES, OtherVersion, ShardIndex, pack
from upriver.pipeline import SampleRef
from upriver.store import ObjectInfo, Store

log = logging.getLogger(__name__)

INDEX_BYTES_PER_ROW = 250
"""Memory of a row in an index: some 200 bytes measured."""


class StoredStretch:
    """The kept rows of one stretch in a store. Any thread may call any method.

    Only servers write to the folder. A shard that is damaged or gone costs its rows and one warning.

    Args:
        folder: Folder of the stretch's shards.
        digest: Digest of the stretch.
    """

    def __init__(self, store: Store, folder: str, digest: str) -> None:
        self.store, self.folder, self.digest = store, folder, digest
        self._shards: dict[str, tuple[ObjectInfo, ShardIndex]] = {}
        self._places: dict[bytes, tuple[str, int]] = {}
        self._foreign: set[str] = set()
        self._lock = threading.Lock()

    @property
    def keys(self) -> AbstractSet[bytes]:
        """Keys of the rows, as they are now."""
        return self._places.keys()

    def refresh(self, admit: Callable[[int], None] = lambda nbytes: None) -> None:
        """Look for shards that were written or removed since. Blocks.

        Args:
            admit: Called with the memory of all rows' index before it is read; raises if there is none.

        Raises:
            StoreError: If the store cannot be read.
        """
        infos = {info.path: info for info in self.store.list(self.folder, on_unreachable=lambda entry: None)}
        listed = {
            path: min(int(match[1]), info.size // INDEX_NBYTES)
            for path, info in infos.items()
            if (match := SHARD_FILE.fullmatch(self._name(path)))
        }
        admit(INDEX_BYTES_PER_ROW * sum(listed.values()))
        with self._lock:
            for path in self._shards.keys() - listed.keys():
                self._forget(path)
            self._foreign &= listed.keys()
            fresh = sorted(listed.keys() - self._shards.keys() - self._foreign)
        for path in fresh:
            self._add(infos[path])

    async def read(self, keys: Sequence[bytes]) -> list[Row] | None:
        """Return rows in main memory; None if one of them is missing or damaged.

        A damaged shard is removed.

        Raises:
            StoreError: If the store cannot be read.
        """
        with self._lock:
            if not all(key in self._places for key in keys):
                return None
            paths, numbers = zip(*(self._places[key] for key in keys), strict=True)
            shards = [self._shards[path] for path in paths]
        refs = [
            SampleRef(object=info.path, etag=info.etag, start=start, stop=start + index.nbytes_of(number))
            for (info, index), number in zip(shards, numbers, strict=True)
            for start in [index.start_of(number)]
        ]
        try:
            blobs = await read_samples_async(self.store, refs)
            return await asyncio.to_thread(_rows, [index for _, index in shards], numbers, blobs)
        except (ObjectNotFound, ObjectChanged):  # removed as unused, in this moment
            with self._lock:
                for path in set(paths):
                    self._forget(path)
        except _DamagedRow as found:
            await asyncio.to_thread(self._drop_damaged, paths[found.at], found.error)
        return None

    def append(
        self, rows: Mapping[bytes, Row], *, writing: Callable[[str, int], AbstractContextManager[object]]
    ) -> int:
        """Write rows that are not there yet as one shard, whole or not at all. Blocks.

        Args:
            writing: Returns a context for the write, from the shard's path and bytes.

        Returns:
            Number of rows written.

        Raises:
            StoreError: If the store cannot be written.
            ConfigError: If a row holds a tensor that cannot be stored.
        """
        shard = pack(self.digest, {key: row for key, row in rows.items() if key not in self._places})
        if not shard.keys:
            return 0
        path = f"{self.folder}/{shard_name(len(shard.keys), secrets.token_hex(8))}"
        with writing(path, shard.nbytes):
            self.store.put(path, b"".join(shard.pieces()), private=True)
        self._add(self.store.head(path))
        return len(shard.keys)

    def clear(self) -> None:
        """Remove all rows. Blocks.

        Raises:
            StoreError: If the store cannot be read or written.
        """
        for info in self.store.list(self.folder, on_unreachable=lambda entry: None):
            self._remove(info.path)
        with self._lock:
            for path in list(self._shards):
                self._forget(path)

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/")

    def _add(self, info: ObjectInfo) -> None:
        """Read the index of a shard. Blocks, so it holds no lock meanwhile."""

        def read(start: int, stop: int) -> bytes:
            return self.store.get_range(info.path, start, stop, etag=info.etag or None)

        try:
            index = ShardIndex(read, info.size, self.digest)
        except (ObjectNotFound, ObjectChanged):
            return
        except OtherVersion as error:
            self._foreign.add(info.path)
            log.warning("%s counts as missing: %s", info.path, error)
            return
        except Damaged as error:
            self._drop_damaged(info.path, error)
            return
        with self._lock:
            self._shards[info.path] = info, index
            self._places.update((key, (info.path, number)) for number, key in enumerate(index.keys))

    def _drop_damaged(self, path: str, error: Damaged) -> None:
        log.warning("%s is damaged, and its rows are lost: %s", path, error)
        with self._lock:
            self._forget(path)
            self._foreign.add(path)  # if it cannot be removed
        with suppress(StoreError):
            self._remove(path)

    def _remove(self, path: str) -> None:
        with suppress(ObjectNotFound):
            self.store.delete(path)

    def _forget(self, path: str) -> None:
        _, index = self._shards.pop(path, (None, None))
        for number, key in enumerate(index.keys if index is not None else ()):
            if self._places.get(key) == (path, number):
                del self._places[key]


class _DamagedRow(Exception):
    """A row that differs from the one that was written."""

    def __init__(self, at: int, error: Damaged) -> None:
        super().__init__(str(error))
        self.at, self.error = at, error


def _rows(indexes: Sequence[ShardIndex], numbers: Sequence[int], blobs: Sequence[memoryview]) -> list[Row]:
    """Return rows from their bytes, in one allocation, each checked there."""
    buffer, start, rows = RowBuffer(sum(map(len, blobs))), 0, list[Row]()
    for at, (index, number, blob) in enumerate(zip(indexes, numbers, blobs, strict=True)):
        buffer.array[start : start + len(blob)] = blob
        try:
            rows.append(index.build(number, buffer, start))
        except Damaged as error:
            raise _DamagedRow(at, error) from None
        start += len(blob)
    return rows
