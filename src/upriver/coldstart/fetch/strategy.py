"""Look up what a load needs to know before it requests weights: the link and the cached groupings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

from upriver.coldstart import link_cache
from upriver.coldstart.fetch.weight_stream import StreamLimits
from upriver.coldstart.format.checkpoint import WeightSource, object_at
from upriver.coldstart.format.readahead import MOST_BYTES, Readahead
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.grouping.groups import is_whole, knows_stream
from upriver.coldstart.link_cache import StoreLink
from upriver.store import Store


def way_to(
    source: WeightSource,
    near: str,
    policy: str,
    limits: StreamLimits,
    beside: Executor,
    ahead: Readahead | None = None,
) -> tuple[StoreLink, Mapping[str, list[range]]]:
    """Return the link to a source, and the cached groupings of its weights.

    Neither is looked up if it would change nothing.

    Args:
        source: All weights of the model.
        near: Non-empty object in the same store.
        policy: Grouping policy of the load.
        limits: Limits of the stream.
        beside: Executor for one lookup while the other waits for its response.
        ahead: Readahead of that store, if one was started.

    Raises:
        StoreError: If the store cannot be read.
    """
    latency_s = None if ahead is None else ahead.latency_s
    if not source.tensors or is_one_request(source, policy, limits):
        return replace(link_cache.last_known(source.store), latency_s=latency_s or 0.0), {}
    known = beside.submit(grouping_cache.kept, source)
    if latency_s is None:
        return link_cache.link_to(source.store, near), known.result()
    return replace(link_cache.last_known(source.store), latency_s=latency_s), known.result()


def is_one_request(source: WeightSource, policy: str, limits: StreamLimits) -> bool:
    """Return True if one request fetches the weights over any link."""
    return len(source.etags) == 1 and is_whole(policy, source.nbytes, limits.request_bytes)


@contextmanager
def asked_ahead(store: Store, path: str, policy: str, limits: StreamLimits) -> Iterator[Readahead | None]:
    """Start to read the first bytes of the likely weights object, before anything about it is known.

    Yield None if no object is likely, or the store is local. Yield None as well if the policy is a paper's,
    which requests only what the paper says, or a bandwidth cap reserves the link for other uses. The
    readahead ends with the context, unless a stream has taken it over.

    Args:
        store: Store of the weights.
        path: Path of the weights, see :func:`~upriver.coldstart.format.checkpoint.find`.
        policy: Grouping policy of the load.
        limits: Limits of the stream.
    """
    name = object_at(path)
    if (
        name is None
        or not knows_stream(policy)
        or not store.is_far
        or limits.bandwidth_bytes_per_s < math.inf
    ):
        yield None
        return
    num_bytes = min(MOST_BYTES, limits.request_bytes)
    ahead = Readahead(store, name, num_bytes, timeout_s=limits.timeout_s)
    ahead.start()
    try:
        yield ahead
    finally:
        if not ahead.taken:
            ahead.close()
