"""Keep the rows that a server computes in its stores, and find them again.

A request asks for it. Rows lie in the folder of the request's tenant, in the store of the samples. They are
collected in memory, within the server's budget, and written in the background as shards of some megabytes.
The service of a request never waits for a write.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from upriver.coldstart.garbage_collection import (
    TOUCH_S,
    begin_upload,
    end_upload,
    features_path,
    note_use,
)
from upriver.control.memory_budget import MemoryHold
from upriver.engine.read import CONCURRENCY
from upriver.errors import (
    ConfigError,
    DoesNotFit,
    ObjectNotFound,
    Overloaded,
    StorageFull,
    StoreError,
    UpriverError,
)
from upriver.imports import imported
from upriver.protocol import Caps, RunRequest
from upriver.server.http.errors import ErrorWording
from upriver.server.observability.metrics import ServerMetrics
from upriver.server.programs.quota import check_stored
from upriver.server.programs.registry import own_prefix
from upriver.server.scheduling.footprint import KeptRowsFootprint
from upriver.server.tenants import ANYONE, Tenant
from upriver.store import Store

if TYPE_CHECKING:
    from upriver.features import Row
    from upriver.features.stretch import Stretch
    from upriver.pipeline import Dataset, SampleRef
    from upriver.server.features.stored_stretch import IndexRoom, StoredStretch

log = logging.getLogger(__name__)

_T = TypeVar("_T")

SHARD_BYTES = 16 << 20
"""Bytes of rows that are written together: an object that a store serves at its full rate."""

COLLECT_S = 2.0
"""Seconds for which rows are collected at most: what a server that is killed may lose."""

REFRESH_S = 10.0
"""Seconds after which a folder is listed again for rows that another server has written."""

RETRY_S = 300.0
"""Seconds without writes to a folder after one failed: a full quota or store rarely has room before."""

MOST_STRETCHES = 64
"""Most stretches of a tenant whose index is kept in memory; the one used longest ago is dropped."""

WAITING_BYTES = 128 << 20
"""Most memory of one tenant's rows that wait to be written. More are not kept: the store is slower than what
computes them."""

WRITERS = 2
"""Threads that list and write one store. A store that does not answer blocks only its own."""


@dataclass(eq=False, slots=True)
class _Open:
    """A stretch in use, and its rows that are not written yet.

    Attributes:
        index: Memory of the index.
        users: Requests for rows of the stretch.
        listed_s: Time of the last listing, by the monotonic clock.
        noted_s: Time at which its use was last noted in the store.
        closed_s: Time until which no row is taken, after a failed write.
        why_not: Reason for that, in words for a client.
        full: Set when there is enough to write.
        writes: Held while rows are written or removed.
    """

    tenant: Tenant
    place: str
    rows: StoredStretch
    index: MemoryHold
    users: weakref.WeakSet[RequestRows] = field(default_factory=weakref.WeakSet)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    listed_s: float = -REFRESH_S
    noted_s: float = -TOUCH_S
    closed_s: float = 0.0
    why_not: str = ""
    waiting: dict[bytes, Row] = field(default_factory=dict)
    writing: dict[bytes, Row] = field(default_factory=dict)
    holds: list[MemoryHold] = field(default_factory=list)
    nbytes: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)
    writes: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether nobody reads or writes the stretch."""
        return not (self.users or self.waiting or self.task or self.looking.locked())

    def taken(self) -> tuple[dict[bytes, Row], list[MemoryHold]]:
        """Return the rows that wait, and their memory, and let none wait any more."""
        rows, holds = self.waiting, self.holds
        self.waiting, self.holds, self.nbytes = {}, [], 0
        return rows, holds


class FeatureStore:
    """Kept rows of all tenants of a server, in all its stores.

    Args:
        stores: Stores by the names that clients use.
        prefix: The operator's prefix, in every store.
        stored_bytes: Bytes that a tenant without a limit of its own may store, programs included.
        hold: Holds memory, or raises `Overloaded` or `DoesNotFit`.
        wording: Words errors for clients.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        prefix: str,
        stored_bytes: int,
        caps: Caps,
        hold: Callable[[int], MemoryHold],
        metrics: ServerMetrics,
        wording: ErrorWording,
    ) -> None:
        self._wording = wording
        self._prefix, self._stored_bytes = prefix, stored_bytes
        self._caps, self._hold, self._metrics = caps, hold, metrics
        self._open: OrderedDict[tuple[str, str, str], _Open] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._busy: set[_Open] = set()
        self._closed = False
        self._threads = {
            name: ThreadPoolExecutor(WRITERS, thread_name_prefix="upriver-features") for name in stores
        }

    async def rows_for(
        self,
        request: RunRequest,
        dataset: Dataset,
        tenant: Tenant,
        *,
        fingerprint: Mapping[str, str],
        num_threads: int,
    ) -> RequestRows:
        """Return the rows of the stretch that a request names, as they were at most `REFRESH_S` ago.

        Raises:
            StoreError: If the store cannot be listed.
        """
        batches = await imported("upriver.server.features.row_batches")
        stretch: Stretch = batches.stretch_of_request(
            request, dataset, fingerprint=fingerprint, num_threads=num_threads
        )
        rows = RequestRows(self, await self._opened(tenant, dataset.store, stretch.digest), dataset, stretch)
        await self._look(rows.entry)
        return rows

    async def close(self) -> None:
        """Write the rows that wait."""
        self._closed = True
        for entry in self._busy:
            entry.full.set()
        await asyncio.gather(*(entry.task for entry in self._busy if entry.task is not None))
        for executor in self._threads.values():
            executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------- opening

    async def _opened(self, tenant: Tenant, store: Store, digest: str) -> _Open:
        key = (tenant.name, store.name, digest)
        stretches = await imported("upriver.server.features.stored_stretch")
        if key not in self._open:
            place = self._prefix if tenant.name == ANYONE.name else own_prefix(self._prefix, tenant)
            rows: StoredStretch = stretches.StoredStretch(store, features_path(place, digest), digest)
            self._open[key] = _Open(tenant, place, rows, self._hold(0))
        self._open.move_to_end(key)
        if len(self._open) > MOST_STRETCHES:
            self._drop_oldest(tenant)
        return self._open[key]

    def _drop_oldest(self, tenant: Tenant) -> None:
        """Drop a tenant's stretches that nobody uses, as many as are too many; never the one used last."""
        own = [key for key, entry in self._open.items() if entry.tenant.name == tenant.name]
        idle = [key for key in own[:-1] if self._open[key].is_idle]
        for key in idle[: max(0, len(own) - MOST_STRETCHES)]:
            self._open.pop(key).index.release()

    async def _look(self, entry: _Open) -> None:
        """List a folder if that was long ago. Rows without memory for their index count as missing."""
        async with entry.looking:
            if time.monotonic() - entry.listed_s < REFRESH_S:
                return
            entry.listed_s = time.monotonic()
            room = partial(self._index_room, entry, asyncio.get_running_loop())
            try:
                await self._run(entry, partial(entry.rows.refresh, room))
            except (Overloaded, DoesNotFit) as error:
                log.info("kept features of %s are not used: %s", entry.tenant.name, error)
            if entry.rows.keys and time.monotonic() - entry.noted_s >= TOUCH_S:
                await self._note_use(entry)

    @contextmanager
    def _index_room(self, entry: _Open, loop: asyncio.AbstractEventLoop, nbytes: int) -> Iterator[None]:
        """Hold the memory of what is added to an index, then that of the whole index. Runs in a thread."""

        async def hold() -> MemoryHold:
            return self._hold(nbytes)

        async def added(room: MemoryHold) -> None:
            room.release()
            self._weigh_index(entry)

        room = asyncio.run_coroutine_threadsafe(hold(), loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(added(room), loop).result()

    def _weigh_index(self, entry: _Open) -> None:
        with suppress(Overloaded, DoesNotFit):  # another thread holds what it adds
            entry.index.resize(entry.rows.index_nbytes)

    async def _note_use(self, entry: _Open) -> None:
        entry.noted_s = time.monotonic()
        try:
            await self._run(entry, partial(note_use, entry.rows.store, entry.place, [entry.rows.digest]))
        except StoreError as error:
            log.warning("cannot note that kept features are used, and upriver gc may remove them: %s", error)

    # ------------------------------------------------------------------------------------- writing

    def room_for(self, entry: _Open, keys: Collection[bytes], nbytes: int) -> MemoryHold | None:
        """Hold the memory of rows that are to be written; None if they are here, or have no room."""
        known = (entry.rows.keys, entry.waiting, entry.writing)
        if all(any(key in some for some in known) for key in keys):
            return None
        needed = 2 * nbytes  # the rows, and the shard when it is written
        if self._held[entry.tenant.name] + needed > WAITING_BYTES or time.monotonic() < entry.closed_s:
            return None
        try:
            hold = self._hold(needed)
        except (Overloaded, DoesNotFit):
            return None
        self._held[entry.tenant.name] += needed
        return hold

    def release(self, entry: _Open, holds: Iterable[MemoryHold]) -> None:
        """Give back the memory of rows that are written, or are not to be."""
        for hold in holds:
            self._held[entry.tenant.name] -= hold.nbytes
            hold.release()

    def take(self, entry: _Open, rows: Mapping[bytes, Row], hold: MemoryHold) -> None:
        """Take rows that are to be written."""
        entry.holds.append(hold)
        entry.waiting.update(rows)
        entry.nbytes += hold.nbytes // 2
        if entry.nbytes >= SHARD_BYTES:
            entry.full.set()
        if entry.task is None:
            self._busy.add(entry)
            entry.task = asyncio.create_task(self._write_soon(entry))

    async def _write_soon(self, entry: _Open) -> None:
        """Write what waits when there is enough, or `COLLECT_S` after the first row has come."""
        try:
            while entry.waiting:
                if not self._closed:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(entry.full.wait(), COLLECT_S)
                    entry.full.clear()
                async with entry.writes:
                    await self._write(entry)
        finally:
            entry.task = None
            self._busy.discard(entry)

    async def clear(self, entry: _Open) -> None:
        """Remove all rows, also those that wait to be written.

        Raises:
            StoreError: If the store cannot be read or written.
        """
        async with entry.writes:
            self.release(entry, entry.taken()[1])
            await self._run(entry, entry.rows.clear)
            self._weigh_index(entry)
        log.info(
            "kept features %s of tenant %s were removed, as a job asked", entry.rows.digest, entry.tenant.name
        )

    async def _write(self, entry: _Open) -> None:
        rows, holds = entry.taken()
        entry.writing = rows
        entry.noted_s = time.monotonic()  # a shard's write notes the use
        try:
            room = partial(self._index_room, entry, asyncio.get_running_loop())
            count, error = await self._run(entry, partial(self._append, entry, rows, room))
            self._metrics.features("written", entry.tenant.name, count)
            entry.why_not = "" if error is None else str(self._wording.of(error))
            if error is not None:
                entry.closed_s = time.monotonic() + RETRY_S
                log.warning("features of tenant %s are not kept for now: %s", entry.tenant.name, error)
        finally:
            entry.writing = {}
            self.release(entry, holds)

    def _append(
        self, entry: _Open, rows: Mapping[bytes, Row], index_room: IndexRoom
    ) -> tuple[int, UpriverError | None]:
        """Write rows, as many as there is room for. Runs in a thread.

        Returns:
            Number of rows written, and the reason why others were not.
        """
        full: UpriverError | None = None
        try:
            entry.rows.refresh(index_room)  # for rows that another server has written meanwhile
            while rows:
                try:
                    writing = partial(self._writing, entry)
                    return entry.rows.append(rows, writing=writing, index_room=index_room), full
                except StorageFull as error:
                    full, rows = full or error, dict(list(rows.items())[: len(rows) // 2])
        except (StoreError, ConfigError, Overloaded, DoesNotFit) as error:
            return 0, error
        return 0, full

    @contextmanager
    def _writing(self, entry: _Open, path: str, nbytes: int) -> Iterator[None]:
        """Count a shard in its tenant's storage while it is written. Runs in a thread."""
        store, tenant = entry.rows.store, entry.tenant
        check = partial(check_stored, tenant, default=self._stored_bytes, what="these features")
        note = begin_upload(store, entry.place, {path: nbytes}, check=check)
        try:
            note_use(store, entry.place, [entry.rows.digest])
            yield
        finally:
            end_upload(store, note)

    async def _run(self, entry: _Open, work: Callable[[], _T]) -> _T:
        executor = self._threads[entry.rows.store.name]
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def count(self, tenant: Tenant, samples: int) -> None:
        """Count samples that were answered from kept rows."""
        self._metrics.features("found", tenant.name, samples)

    @property
    def caps(self) -> Caps:
        """Limits of frames."""
        return self._caps


class RequestRows:
    """The kept rows that one request asks for."""

    def __init__(self, owner: FeatureStore, entry: _Open, dataset: Dataset, stretch: Stretch) -> None:
        self._owner, self.entry, self._dataset, self._stretch = owner, entry, dataset, stretch
        entry.users.add(self)

    @property
    def why_not(self) -> str:
        """Return the reason why no further rows are written now; empty while they are."""
        return self.entry.why_not

    async def found(self, ids: Sequence[int]) -> list[int]:
        """Return the samples whose rows are kept."""
        batches = await imported("upriver.server.features.row_batches")

        def look() -> list[int]:
            keys = batches.keys_of(self._stretch, self._dataset.locate(ids), ids)
            there = self.entry.rows.keys
            return [sample for sample, key in zip(ids, keys, strict=True) if key in there]

        return await asyncio.to_thread(look)  # a question may name many thousand samples

    async def footprints(
        self, micro_batches: Sequence[Sequence[int]], *, micro_batch: int
    ) -> list[KeptRowsFootprint] | None:
        """Return the memory that an answer from kept rows needs for each micro-batch.

        Return None if a row is missing.
        """
        batches = await imported("upriver.server.features.row_batches")

        def footprint(ids: Sequence[int]) -> KeptRowsFootprint | None:
            keys = batches.keys_of(self._stretch, self._dataset.locate(ids), ids)
            sizes = self.entry.rows.sizes(keys)
            if sizes is None:
                return None
            fetched, rows = sizes
            out = sum(rows) if self._stretch.cut < 0 else micro_batch * max(rows)
            return KeptRowsFootprint(fetched_bytes=fetched, row_bytes=sum(rows), out_bytes=out)

        def look() -> list[KeptRowsFootprint] | None:
            found = list[KeptRowsFootprint]()
            for ids in micro_batches:
                if (each := footprint(ids)) is None:
                    return None
                found.append(each)
            return found

        return await asyncio.to_thread(look)

    async def frame(
        self, refs: Sequence[SampleRef], ids: Sequence[int], *, micro_batch: int, room: Callable[[int], bool]
    ) -> tuple[bytes, memoryview] | None:
        """Return the data frame of a micro-batch; None if a row is missing, damaged or of another object.

        Args:
            refs: Places of the stored samples, with the ETags that they had when they were indexed.
            room: Returns whether an answer of this many bytes has memory; called in a thread.
        """
        keys = await self._keys(refs, ids)
        there = self.entry.rows.keys
        if not all(key in there for key in keys):
            return None
        batches = await imported("upriver.server.features.row_batches")
        try:
            if not await _unchanged(self._dataset.store, refs):
                return None
            rows = await self.entry.rows.read(keys)
        except StoreError as error:  # the samples themselves are then read, and meet it too
            log.info("kept features cannot be read: %s", error)
            return None
        if rows is None:
            return None
        sizes = [sum(tensor.nbytes for tensor in row) for row in rows]
        nbytes = sum(sizes) if self._stretch.cut < 0 else micro_batch * sizes[0]
        if not await asyncio.to_thread(room, nbytes):
            return None
        frame: tuple[bytes, memoryview] | None = await asyncio.to_thread(
            batches.frame_of, rows, ids, position=self._stretch.cut, micro_batch=micro_batch
        )
        if frame is not None:
            self._owner.count(self.entry.tenant, len(ids))
        return frame

    async def keep(
        self, refs: Sequence[SampleRef], ids: Sequence[int], frame: tuple[bytes, memoryview]
    ) -> None:
        """Keep the rows of a data frame that a worker has computed."""
        keys = dict(zip(ids, await self._keys(refs, ids), strict=True))
        hold = self._owner.room_for(self.entry, keys.values(), len(frame[1]))
        if hold is None:
            return
        batches = await imported("upriver.server.features.row_batches")
        try:
            rows: dict[bytes, Row] = await asyncio.to_thread(
                batches.rows_of, frame[0], frame[1], keys, self._owner.caps
            )
        except BaseException as error:
            self._owner.release(self.entry, [hold])
            if not isinstance(error, UpriverError):
                raise
            log.warning("features of tenant %s are not kept: %s", self.entry.tenant.name, error)
        else:
            self._owner.take(self.entry, rows, hold)

    async def clear(self) -> None:
        """Remove all rows of the stretch from the tenant's folder.

        Raises:
            StoreError: If the store cannot be read or written.
        """
        await self._owner.clear(self.entry)

    async def _keys(self, refs: Sequence[SampleRef], ids: Sequence[int]) -> list[bytes]:
        batches = await imported("upriver.server.features.row_batches")
        keys: list[bytes] = batches.keys_of(self._stretch, refs, ids)
        return keys


async def _unchanged(store: Store, refs: Sequence[SampleRef]) -> bool:
    """Return whether all objects have the ETags that they had when they were indexed."""
    etags, slots = {ref.object: ref.etag for ref in refs}, asyncio.Semaphore(CONCURRENCY)

    async def same(name: str, etag: str) -> bool:
        async with slots:
            try:
                return (await store.head_async(name)).etag == etag
            except ObjectNotFound:
                return False

    return all(await asyncio.gather(*(same(name, etag) for name, etag in etags.items())))
