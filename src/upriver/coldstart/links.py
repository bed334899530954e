"""What is known of the way to a store: how long a request takes to begin, and how fast bytes come then.

RL and BW of PISeL (CIKM 2024, section 3.1). RL is measured each time, by a read of one byte; BW is what came
of the last load, and with it how many requests at once it took, one small file a bucket or disk under
``$UPRIVER_CACHE`` or the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from upriver.coldstart.flow import Link
from upriver.files import cache_folder, write_cached
from upriver.store import Store
from upriver.types import BANDWIDTH

SCHEMA = "upriver.store-link/2"

UNKNOWN = Link(latency_s=0.0, bandwidth_bytes_per_s=100e6)
"""Before anything has come from a store: about what an object store gives one connection."""

SETTLED_BYTES = 4 << 20
"""A load of less says little of a link."""


def link_to(store: Store, path: str, *, clock: Callable[[], float] = time.perf_counter) -> Link:
    """The way to a store as it is now, as far as it is known.

    Args:
        store: Which.
        path: An object with a byte in it.
        clock: Seconds.

    Raises:
        StoreError: If it cannot be read.
    """
    began = clock()
    store.get_range(path, 0, 1)
    return replace(last_known(store), latency_s=clock() - began)


def last_known(store: Store) -> Link:
    """The way to a store as the last load has found it, without a latency; nothing is read of it."""
    return _kept(store) or UNKNOWN


def keep(store: Store, link: Link, *, nbytes: int) -> None:
    """What a load of so many bytes found, for the next one. A cache that cannot be written is no error."""
    if nbytes < SETTLED_BYTES or not _is_bandwidth(link.bandwidth_bytes_per_s):
        return
    found = {
        "schema": SCHEMA,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "requests": link.requests,
    }
    text = json.dumps(found) + "\n"
    with contextlib.suppress(OSError):
        write_cached(_path(store), text)


def _kept(store: Store) -> Link | None:
    try:
        found = json.loads(_path(store).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return None
    bandwidth, requests = found.get("bandwidth_bytes_per_s"), found.get("requests")
    if not _is_bandwidth(bandwidth) or type(requests) is not int or requests < 1:
        return None
    return replace(UNKNOWN, bandwidth_bytes_per_s=bandwidth, requests=requests)


def _is_bandwidth(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and math.isfinite(value) and 0 < value <= BANDWIDTH.most


def _path(store: Store) -> Path:
    return cache_folder() / "links" / f"{hashlib.sha256(store.site().encode()).hexdigest()}.json"
