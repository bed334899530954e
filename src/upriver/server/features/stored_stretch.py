"""Read and append the rows of one stretch in an object store: immutable shards in one folder."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, TypeAlias

from upriver.engine.read import plan_gets, read_samples_async
from upriver.errors import Damaged, ObjectChanged, ObjectNotFound, StoreError
from upriver.features import Row
from upriver.features.listing import SHARD_FILE, shard_name
from upriver.features.row_form import RowBuffer
from upriver.features.shard import INDEX_NBYTES, OtherVersion, ShardIndex, pack
from upriver.pipeline import SampleRef
from upriver.store import ObjectInfo, Store

log = logging.getLogger(__name__)

IndexRoom: TypeAlias = Callable[[int], AbstractContextManager[object]]

INDEX_BYTES_PER_ROW = 250
"""Memory of a row in an index: some 200 bytes measured."""


class _StoredRow(NamedTuple):
    """Place of a row: its shard, and its number there."""

    info: ObjectInfo
    shard: ShardIndex
    number: int

    @property
    def ref(self) -> SampleRef:
        """Bytes of the row in the store."""
        start = self.shard.start_of(self.number)
        stop = start + self.shard.nbytes_of(self.number)
        return SampleRef(object=self.info.path, etag=self.info.etag, start=start, stop=stop)


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

    @property
    def index_nbytes(self) -> int:
        """Memory of the index."""
        with self._lock:
            return INDEX_BYTES_PER_ROW * sum(len(index.keys) for _, index in self._shards.values())

    def refresh(self, index_room: IndexRoom) -> None:
        """Look for shards that were written or removed since. Blocks.

        Args:
            index_room: Returns a context with the memory of rows that are added to the index; raises if there
                is none.

        Raises:
            StoreError: If the store cannot be read.
        """
        infos = {info.path: info for info in self.store.list(self.folder, on_unreachable=lambda entry: None)}
        listed = {
            path: min(int(match[1]), info.size // INDEX_NBYTES)
            for path, info in infos.items()
            if (match := SHARD_FILE.fullmatch(self._name(path)))
        }
        with self._lock:
            for path in self._shards.keys() - listed.keys():
                self._forget(path)
            self._foreign &= listed.keys()
            fresh = sorted(listed.keys() - self._shards.keys() - self._foreign)
        with index_room(INDEX_BYTES_PER_ROW * sum(listed[path] for path in fresh)):
            for path in fresh:
                self._add(infos[path])

    def sizes(self, keys: Sequence[bytes]) -> tuple[int, list[int]] | None:
        """Return the bytes that reading these rows fetches, and those of each row in memory.

        Return None if a row is missing.
        """
        rows = self._find(keys)
        if rows is None:
            return None
        fetched = sum(get.stop - get.start for get in plan_gets([row.ref for row in rows]))
        return fetched, [row.shard.memory_nbytes_of(row.number) for row in rows]

    async def read(self, keys: Sequence[bytes]) -> list[Row] | None:
        """Return rows in main memory; None if one of them is missing or damaged.

        A damaged shard is removed.

        Raises:
            StoreError: If the store cannot be read.
        """
        rows = self._find(keys)
        if rows is None:
            return None
        try:
            blobs = await read_samples_async(self.store, [row.ref for row in rows])
            return await asyncio.to_thread(_rows, rows, blobs)
        except (ObjectNotFound, ObjectChanged):  # removed as unused, in this moment
            with self._lock:
                for path in {row.info.path for row in rows}:
                    self._forget(path)
        except _DamagedRow as found:
            await asyncio.to_thread(self._drop_damaged, rows[found.at].info.path, found.error)
        return None

    def append(
        self,
        rows: Mapping[bytes, Row],
        *,
        writing: Callable[[str, int], AbstractContextManager[object]],
        index_room: IndexRoom,
    ) -> int:
        """Write rows that are not there yet as one shard, whole or not at all. Blocks.

        Args:
            writing: Returns a context for the write, from the shard's path and bytes.
            index_room: As in :meth:`refresh`.

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
        with index_room(INDEX_BYTES_PER_ROW * len(shard.keys)):
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

    def _find(self, keys: Sequence[bytes]) -> list[_StoredRow] | None:
        """Return the places of rows; None if one is missing."""
        with self._lock:
            if not all(key in self._places for key in keys):
                return None
            places = [self._places[key] for key in keys]
            return [_StoredRow(*self._shards[path], number) for path, number in places]

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


def _rows(places: Sequence[_StoredRow], blobs: Sequence[memoryview]) -> list[Row]:
    """Return rows from their bytes, in one allocation, each checked there."""
    buffer, start, rows = RowBuffer(sum(map(len, blobs))), 0, list[Row]()
    for at, (place, blob) in enumerate(zip(places, blobs, strict=True)):
        buffer.array[start : start + len(blob)] = blob
        try:
            rows.append(place.shard.build(place.number, buffer, start))
        except Damaged as error:
            raise _DamagedRow(at, error) from None
        start += len(blob)
    return rows
