"""Read stored samples: neighbours in one ranged GET, under If-Match on the indexed ETag."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upriver.pipeline import Dataset, SampleRef
    from upriver.store import Store

GAP_BYTES = 8 * 2**10
"""Unneeded bytes worth fetching to save a GET. Between two samples of a shard lie padding, headers and the
class member: 2 KiB, 5 KiB with PAX extensions. One more small member still fits."""

MAX_GET_BYTES = 8 * 2**20
"""Longest GET that joins samples: a micro-batch of 16 photographs is one, and a lost one costs little to
repeat."""

CONCURRENCY = 8
"""GETs in flight for one call. Swift on one machine reached its best rate at 16 over all clients."""


IN_A_ROW, SMALL_BYTES = 4, 1 << 20
"""Largest number and total bytes of files that one thread reads in sequence for an event loop. The loop would
need longer to hand each file to a thread than to read it."""


@dataclass(frozen=True, slots=True)
class RangedRead:
    """One ranged GET, and the requested samples within it.

    Attributes:
        etag: Required ETag of the object.
        start: First byte.
        stop: One past the last byte.
        members: Index of each sample in the request, and its bytes [start, stop) of the object.
    """

    object: str
    etag: str
    start: int
    stop: int
    members: tuple[tuple[int, int, int], ...]


def plan_gets(refs: Sequence[SampleRef]) -> list[RangedRead]:
    """Join neighbouring samples of an object into few GETs; each sample is in exactly one."""
    order = sorted(
        range(len(refs)), key=lambda at: (refs[at].object, refs[at].etag, refs[at].start, refs[at].stop)
    )
    gets: list[RangedRead] = []
    group: list[int] = []
    stop = 0
    for at in order:
        ref = refs[at]
        if group and not _joins(refs[group[0]], stop, ref):
            gets.append(_get(refs, group, stop))
            group = []
        stop = max(stop, ref.stop) if group else ref.stop
        group.append(at)
    if group:
        gets.append(_get(refs, group, stop))
    return gets


def read_samples(dataset: Dataset, ids: Sequence[int], *, at_once: int = CONCURRENCY) -> list[memoryview]:
    """Return the stored bytes of samples in the requested order; an id may appear more than once.

    Args:
        dataset: Locates the samples, and names their store.
        ids: Rows of the dataset's index.
        at_once: GETs in flight.

    Returns:
        Read-only views; neighbours share the buffer they were fetched into.

    Raises:
        ObjectChanged: If an object is not the one that was indexed.
        ObjectNotFound: If an object is gone.
        StoreError: If the store cannot be read, or an object ended early.
        ConfigError: If an id is not a row of the index.
    """
    gets = plan_gets(dataset.locate(ids))
    if len(gets) <= 1:
        bodies = [_fetch(dataset.store, get) for get in gets]
    else:
        with ThreadPoolExecutor(min(at_once, len(gets))) as pool:
            bodies = list(pool.map(lambda get: _fetch(dataset.store, get), gets))
    return _spread(gets, bodies, len(ids))


async def read_samples_async(store: Store, refs: Sequence[SampleRef]) -> list[memoryview]:
    """Run :func:`read_samples` for an event loop, on samples that are already located."""
    gets = plan_gets(refs)
    if store.is_local and len(gets) <= IN_A_ROW and sum(get.stop - get.start for get in gets) <= SMALL_BYTES:
        bodies = await asyncio.to_thread(lambda: [_fetch(store, get) for get in gets])
        return _spread(gets, bodies, len(refs))
    slots = asyncio.Semaphore(CONCURRENCY)

    async def fetch(get: RangedRead) -> bytes:
        async with slots:
            return await store.get_range_async(get.object, get.start, get.stop, etag=get.etag)

    tasks = [asyncio.ensure_future(fetch(get)) for get in gets]
    try:
        bodies = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # after an error or a disconnect nobody needs the rest
    return _spread(gets, bodies, len(refs))


def _joins(first: SampleRef, stop: int, ref: SampleRef) -> bool:
    same = (ref.object, ref.etag) == (first.object, first.etag)
    return same and ref.start - stop <= GAP_BYTES and max(stop, ref.stop) - first.start <= MAX_GET_BYTES


def _get(refs: Sequence[SampleRef], group: Sequence[int], stop: int) -> RangedRead:
    first = refs[group[0]]
    members = tuple((at, refs[at].start, refs[at].stop) for at in group)
    return RangedRead(first.object, first.etag, first.start, stop, members)


def _fetch(store: Store, get: RangedRead) -> bytes:
    return store.get_range(get.object, get.start, get.stop, etag=get.etag)


def _spread(gets: Sequence[RangedRead], bodies: Sequence[bytes], count: int) -> list[memoryview]:
    views = [memoryview(b"")] * count
    for get, body in zip(gets, bodies, strict=True):
        whole = memoryview(body)
        for at, start, stop in get.members:
            views[at] = whole[start - get.start : stop - get.start]
    return views
