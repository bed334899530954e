"""Open indexes of datasets, and check which samples a tenant may read."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from upriver.control.memory_budget import MemoryHold
from upriver.errors import DoesNotFit, Forbidden, ObjectNotFound, Overloaded, ProtocolError
from upriver.imports import imported
from upriver.protocol import DatasetRef, RunRequest
from upriver.server.tenants import Tenant, inside, outside_nbytes
from upriver.store import Store
from upriver.text import bytes_text

if TYPE_CHECKING:
    from upriver.pipeline import Dataset


@dataclass(frozen=True, kw_only=True, slots=True)
class _Open:
    """Hold an open index.

    Attributes:
        holds: Memory of the index, and of the lists of samples that tenants may not read.
    """

    dataset: Dataset
    holds: list[MemoryHold] = field(default_factory=list)

    @property
    def missing_bytes(self) -> int:
        """Bytes that it needs and does not hold."""
        held = sum(hold.nbytes for hold in self.holds)
        return self.dataset.nbytes + outside_nbytes(self.dataset) - held


class Datasets:
    """Keep open indexes; drop the least recently used first.

    Args:
        stores: Stores by the names that clients use.
        prefix: The operator's prefix, in every store.
        most: Indexes kept between requests.
        most_bytes: Returns the bytes that opening one may need.
        hold: Holds this many bytes for one, or raises `Overloaded`.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        *,
        prefix: str,
        most: int,
        most_bytes: Callable[[], int],
        hold: Callable[[int], MemoryHold],
    ) -> None:
        self._stores = stores
        self._prefix = prefix
        self._most, self._most_bytes = most, most_bytes
        self._hold = hold
        self._open: OrderedDict[DatasetRef, _Open] = OrderedDict()
        self._opening: WeakValueDictionary[DatasetRef, asyncio.Lock] = WeakValueDictionary()

    async def get(self, ref: DatasetRef, tenant: Tenant) -> Dataset:
        """Return the dataset.

        Raises:
            ObjectNotFound: If the tenant may read no store of that name, or it has no such dataset.
            Forbidden: If its samples lie under the server's own prefix.
            DatasetError: If it is damaged.
            DoesNotFit: If opening its index needs more memory than one index may have.
            Overloaded: If there is no memory for its index now.
        """
        store = self._stores.get(ref.store)
        if store is None or not tenant.may_read(ref.store):
            raise ObjectNotFound(
                _no_store(ref.store, [name for name in self._stores if tenant.may_read(name)])
            )
        opening = self._opening.setdefault(ref, asyncio.Lock())
        async with opening:  # concurrent callers wait, and need no memory for it
            if ref not in self._open:
                await self._read(store, ref)
        self._open.move_to_end(ref)
        return self._open[ref].dataset

    async def _read(self, store: Store, ref: DatasetRef) -> None:
        """Open an index in a thread, and hold its memory before it is allocated."""
        loop, holds = asyncio.get_running_loop(), list[MemoryHold]()

        def admit(nbytes: int) -> None:
            if nbytes > (most := self._most_bytes()):
                raise DoesNotFit(
                    f"dataset {ref.digest} takes {bytes_text(nbytes)} of memory to open its index; at most "
                    f"{bytes_text(most)} are taken for one here"
                )
            asyncio.run_coroutine_threadsafe(self._admit(nbytes, holds), loop).result()

        def release(reading: asyncio.Future[Dataset]) -> None:
            for hold in holds:
                hold.release()
            if not reading.cancelled():
                reading.exception()  # if the client is gone, nothing else retrieves the exception

        await imported("upriver.pipeline.dataset")
        reading = asyncio.ensure_future(asyncio.to_thread(_open, store, ref.digest, self._prefix, admit))
        reading.add_done_callback(release)
        dataset = await asyncio.shield(reading)
        while len(self._open) >= self._most:
            self.drop_oldest()
        self._open[ref] = _Open(dataset=dataset)
        self._count(ref)

    async def _admit(self, nbytes: int, holds: list[MemoryHold]) -> None:
        """Hold this many bytes in all for an index that is being opened; drop other indexes for them."""
        missing = nbytes - sum(hold.nbytes for hold in holds)
        while missing > 0:
            try:
                holds.append(self._hold(missing))
            except (Overloaded, DoesNotFit):
                if not self.drop_oldest():
                    raise
            else:
                return

    def _count(self, ref: DatasetRef) -> None:
        """Hold the bytes of the last used index; drop others for them, and finally the index itself."""
        entry = self._open[ref]
        missing = entry.missing_bytes
        while missing:
            try:
                entry.holds.append(self._hold(missing))
            except (Overloaded, DoesNotFit):
                self.drop_oldest()
                if ref not in self._open:
                    raise
            else:
                return

    def drop_oldest(self) -> bool:
        """Drop the least recently used index; return whether there was one."""
        if not self._open:
            return False
        _, oldest = self._open.popitem(last=False)
        for hold in oldest.holds:
            hold.release()
        return True

    async def ask(self, request: RunRequest, tenant: Tenant) -> Dataset | None:
        """Return the dataset that a request names, if any, after checking request and tenant against it.

        Raises:
            ObjectNotFound: If it does not exist.
            Forbidden: If its samples lie where this tenant, or every tenant, may not read.
            ProtocolError: If it has no such samples, or starts at another position.
            Overloaded: If there is no memory now for its index, or for the list of samples barred to the
                tenant.
        """
        if request.dataset is None:
            return None
        dataset = await self.get(request.dataset, tenant)
        ids = [sample for batch in request.micro_batches for sample in batch]
        try:  # first: other errors reveal facts about the dataset
            tenant.check_objects(request.dataset.store, dataset, ids)
        finally:
            self._count(request.dataset)
        start = dataset.chain.start
        if request.start < start or (request.start > start and not request.given):
            raise ProtocolError(f"this dataset's chain starts at {start}, got {request.start}")
        if max(ids) >= len(dataset):
            raise ProtocolError(f"sample ids lie in 0..{len(dataset) - 1}, got {max(ids)}")
        return dataset


def _open(store: Store, digest: str, prefix: str, admit: Callable[[int], None]) -> Dataset:
    """Open a dataset, and refuse samples under the server's own prefix.

    Otherwise any writer of an index could read other tenants' programs through it.
    """
    from upriver.pipeline import Dataset

    dataset = Dataset.open(store, digest, prefix=prefix, admit=admit)
    if inside(dataset.objects.dictionary, (prefix,)).any():
        raise Forbidden(
            f"dataset {digest} has samples in {prefix!r}, where the server keeps programs and datasets of all"
        )
    return dataset


def _no_store(name: str, seen: Sequence[str]) -> str:
    """Return the error text for an unknown store name; usually the store has another name here."""
    if not seen:
        return f"no store {name!r} here; there are none"
    return (
        f"no store {name!r} here; there are {', '.join(seen)}: open the dataset's store by its name here, "
        f"upriver.Store.open(URI, name={seen[0]!r}), or give that as store_name in train.toml"
    )
