"""Indexes that were opened, and what a tenant may see of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from upriver.errors import ObjectNotFound, ProtocolError
from upriver.pipeline import Dataset
from upriver.protocol import DatasetRef, RunRequest
from upriver.server.tenants import Tenant
from upriver.store import Store


class Datasets:
    """Opened indexes, least recently used out first.

    Args:
        stores: By the names that clients use.
        prefix: The operator's, in every store.
        most: Kept between requests.
    """

    def __init__(self, stores: Mapping[str, Store], *, prefix: str, most: int) -> None:
        self._stores = stores
        self._prefix = prefix
        self._most = most
        self._open: OrderedDict[DatasetRef, Dataset] = OrderedDict()

    async def get(self, ref: DatasetRef, tenant: Tenant) -> Dataset:
        """The dataset.

        Raises:
            ObjectNotFound: If there is no store of that name that the tenant may see, or no such dataset.
            DatasetError: If it is damaged.
        """
        store = self._stores.get(ref.store)
        if store is None or not tenant.may_read(ref.store):
            seen = ", ".join(name for name in self._stores if tenant.may_read(name)) or "none"
            raise ObjectNotFound(f"no store {ref.store!r} here; there are {seen}")
        if ref not in self._open:
            self._open[ref] = await asyncio.to_thread(Dataset.open, store, ref.digest, prefix=self._prefix)
            if len(self._open) > self._most:
                self._open.popitem(last=False)
        self._open.move_to_end(ref)
        return self._open[ref]

    async def ask(self, request: RunRequest, tenant: Tenant) -> Dataset | None:
        """The dataset that a request names, if it names one, which the request fits and the tenant may read.

        Raises:
            ObjectNotFound: If it is not there.
            Forbidden: If its samples lie where the tenant may not read.
            ProtocolError: If it has no such samples, or starts elsewhere.
        """
        if request.dataset is None:
            return None
        dataset = await self.get(request.dataset, tenant)
        if request.start != dataset.chain.start:
            raise ProtocolError(f"this dataset's chain starts at {dataset.chain.start}, got {request.start}")
        ids = [sample for batch in request.micro_batches for sample in batch]
        if max(ids) >= len(dataset):
            raise ProtocolError(f"sample ids lie in 0..{len(dataset) - 1}, got {max(ids)}")
        tenant.check_objects(request.dataset.store, dataset, ids)
        return dataset
