"""Keep the latency and bandwidth of the link to a store between loads.

These are RL and BW of PISeL (CIKM 2024, section 3.1). Each load measures RL by a read of one byte. BW is the
last load's, along with the number of concurrent requests that it used. There is one small file for each
bucket or disk, under ``$UPRIVER_CACHE`` or the user's cache folder.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

from upriver.cache import Cache
from upriver.store import Store
from upriver.types import BANDWIDTH

SCHEMA: Literal["upriver.store-link/2"] = "upriver.store-link/2"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLink:
    """Link from a store.

    Attributes:
        latency_s: Seconds from a request to its first byte.
        bandwidth_bytes_per_s: Bandwidth of all requests together.
        requests: Concurrent requests that this bandwidth needs.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    requests: int = 1

    @property
    def hidden_bytes(self) -> float:
        """Bytes that arrive while a request waits for its first byte."""
        return self.latency_s * self.bandwidth_bytes_per_s


UNKNOWN = StoreLink(latency_s=0.0, bandwidth_bytes_per_s=100e6)
"""Link of a store before the first load: about what an object store gives one connection."""

SETTLED_BYTES = 4 << 20
"""Fewest bytes of a load whose result is stored. Less says little about a link."""

_LINKS = Cache("links")


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a cache file."""

    schema: Literal["upriver.store-link/2"]
    bandwidth_bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=BANDWIDTH.most)]
    requests: Annotated[int, msgspec.Meta(ge=1)]


def link_to(store: Store, path: str, *, clock: Callable[[], float] = time.perf_counter) -> StoreLink:
    """Measure the latency of a store, and return its link.

    Args:
        path: Object with at least one byte.

    Raises:
        StoreError: If the store cannot be read.
    """
    began = clock()
    store.get_range(path, 0, 1)
    return replace(last_known(store), latency_s=clock() - began)


def last_known(store: Store) -> StoreLink:
    """Return the link of the last load, without a latency and without reading the store."""
    return _kept(store) or UNKNOWN


def keep(store: Store, link: StoreLink, *, nbytes: int) -> None:
    """Store the link that a load of `nbytes` has found. An unwritable cache is no error."""
    if nbytes < SETTLED_BYTES or not 0 < link.bandwidth_bytes_per_s <= BANDWIDTH.most:
        return
    name = _name_of(store)
    if name is None:
        return
    found = _File(schema=SCHEMA, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, requests=link.requests)
    _LINKS.save(name, msgspec.json.encode(found).decode() + "\n")


def _kept(store: Store) -> StoreLink | None:
    name = _name_of(store)
    found = None if name is None else _LINKS.load(name, msgspec.json.Decoder(_File).decode)
    if found is None:
        return None
    return replace(UNKNOWN, bandwidth_bytes_per_s=found.bandwidth_bytes_per_s, requests=found.requests)


def _name_of(store: Store) -> str | None:
    try:
        return hashlib.sha256(store.site().encode()).hexdigest()
    except OSError:  # the store's folder does not exist any more
        return None
