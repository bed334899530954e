"""Find out which stored samples are still those that were indexed, without reading them."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from upriver.engine.read import CONCURRENCY
from upriver.errors import ObjectNotFound

if TYPE_CHECKING:
    from upriver.pipeline import Dataset
    from upriver.store import Store

PAGE = 1000
"""Objects in one answer to a listing, as in S3."""


def unchanged(dataset: Dataset, ids: Sequence[int]) -> frozenset[int]:
    """Return the samples whose objects still have the ETag that they had when they were indexed.

    Many objects are listed by page. A few are asked for one by one, and so are the files of a local store.

    Raises:
        StoreError: If the store cannot be read.
    """
    refs = dataset.locate(ids)
    found = _etags(dataset.store, {ref.object for ref in refs})
    return frozenset(
        sample for sample, ref in zip(ids, refs, strict=True) if found.get(ref.object) == ref.etag
    )


def _etags(store: Store, wanted: Collection[str]) -> dict[str, str]:
    """Return the present ETag of each object that exists."""
    found: dict[str, str] = {}
    if not store.is_local and len(wanted) > CONCURRENCY:
        most = PAGE + 2 * len(wanted)  # other objects may lie among them
        for listed, info in enumerate(store.list(_common_folder(wanted))):
            if info.path in wanted:
                found[info.path] = info.etag
            if listed >= most or len(found) == len(wanted):
                break
    missing = [name for name in wanted if name not in found]
    for name, etag in zip(missing, _asked(store, missing), strict=True):
        if etag is not None:
            found[name] = etag
    return found


def _asked(store: Store, names: Sequence[str]) -> list[str | None]:
    """Return the present ETag of each object; None where there is none. Files need no threads."""
    if store.is_local or len(names) <= 1:
        return [_etag(store, name) for name in names]
    with ThreadPoolExecutor(min(CONCURRENCY, len(names))) as pool:
        return list(pool.map(lambda name: _etag(store, name), names))


def _common_folder(names: Collection[str]) -> str:
    return posixpath.commonpath([posixpath.dirname(name) for name in names])


def _etag(store: Store, name: str) -> str | None:
    try:
        return store.head(name).etag
    except ObjectNotFound:
        return None
