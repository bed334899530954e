"""What is found out of the way to a model's weights before they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

from upriver.coldstart import link_cache
from upriver.coldstart.fetch.weight_stream import StreamLimits
from upriver.coldstart.format.checkpoint import WeightSource, object_at
from upriver.coldstart.format.readahead import MOST_BYTES, Ahead
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.grouping.groups import is_whole, knows_stream
from upriver.coldstart.link_estimator import StoreLink
from upriver.store import Store


def way_to(
    source: WeightSource,
    near: str,
    policy: str,
    limits: StreamLimits,
    beside: Executor,
    ahead: Ahead | None = None,
) -> tuple[StoreLink, Mapping[str, list[range]]]:
    """The link to some weights, and the groupings that are kept beside them.

    Neither is asked for where it would change nothing.

    Args:
        source: All weights that there are.
        near: An object in their store with a byte in it.
        policy: That will group them.
        limits: Of the stream that will bring them.
        beside: Runs one question while the other waits for its answer.
        ahead: What has been asked of that store already.

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
    """Whether weights are asked for in one go, however the link is."""
    return len(source.etags) == 1 and is_whole(policy, source.nbytes, limits.request_bytes)


@contextmanager
def asked_ahead(store: Store, path: str, policy: str, limits: StreamLimits) -> Iterator[Ahead | None]:
    """Begin to read what is most likely wanted of a store, before anything of it is known.

    None where nothing can be gained, as a file is no latency away, or where it would not be what was asked
    for: policies of papers ask as these say, and whoever bounds the bandwidth has it for something else. It
    ends with what it is for, unless a stream has taken it over by then.

    Args:
        store: Where weights are to be looked for.
        path: What they are called, see :func:`~upriver.coldstart.format.checkpoint.find`.
        policy: That will group them.
        limits: Of the stream that will bring them.
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
    ahead = Ahead(store, name, num_bytes, timeout_s=limits.timeout_s)
    ahead.start()
    try:
        yield ahead
    finally:
        if not ahead.taken:
            ahead.close()
