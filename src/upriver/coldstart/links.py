"""What is known of the way to a store: how long a request takes to begin, and how fast bytes come then.

RL and BW of PISeL (CIKM 2024, section 3.1). RL is measured each time, by a read of one byte; BW is what came
of the last load, one small file a bucket or disk under ``$UPRIVER_CACHE`` or the user's cache folder.
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

from upriver.program.cache import cache_folder, write_whole
from upriver.store import Store
from upriver.types import BANDWIDTH, Link

SCHEMA = "upriver.store-link/1"

UNKNOWN_BYTES_PER_S = 100e6
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
    return replace(last_known(store), rtt_s=clock() - began)


def last_known(store: Store) -> Link:
    """The way to a store as the last load has found it, without a latency; nothing is read of it."""
    return Link(bandwidth_bytes_per_s=_kept(store) or UNKNOWN_BYTES_PER_S)


def keep(store: Store, *, nbytes: int, bandwidth_bytes_per_s: float) -> None:
    """What came of a load, for the next one. A cache that cannot be written is no error."""
    if nbytes < SETTLED_BYTES or not _is_bandwidth(bandwidth_bytes_per_s):
        return
    text = json.dumps({"schema": SCHEMA, "bandwidth_bytes_per_s": bandwidth_bytes_per_s}) + "\n"
    with contextlib.suppress(OSError):
        write_whole(_path(store), text)


def _kept(store: Store) -> float | None:
    try:
        found = json.loads(_path(store).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return None
    bandwidth = found.get("bandwidth_bytes_per_s")
    return bandwidth if _is_bandwidth(bandwidth) else None


def _is_bandwidth(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and 0 < value <= BANDWIDTH.most


def _path(store: Store) -> Path:
    return cache_folder() / "links" / f"{hashlib.sha256(store.site().encode()).hexdigest()}.json"
