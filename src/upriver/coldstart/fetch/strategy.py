"""Look up what a load needs to know before it requests weights, and plan its requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from upriver.coldstart import link_cache
from upriver.coldstart.fetch.stream_limits import StreamLimits
from upriver.coldstart.fetch.weight_stream import Sink, WeightStream
from upriver.coldstart.format.checkpoint import WeightSource, object_at
from upriver.coldstart.format.readahead import MOST_BYTES, Readahead
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.grouping.groups import GROUPINGS, JOIN_S, is_joining, is_whole, of_at_least
from upriver.coldstart.grouping.timeline import Timeline
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.roofline import layer_seconds, pace_of
from upriver.store import Store

Groupings: TypeAlias = Mapping[str, list[range]]
"""Groupings by their keys in the cache."""

LOAD_BYTES_PER_S = 2e9
"""Speed at which one core loads bytes from the link: a checksum and a copy."""

LAYER_BYTES = 1 << 18
"""Fewest bytes of a layer, for grouping. Smaller weights form one layer with those after them: a bias is
requested with the tensor to which it is added."""


def way_to(
    source: WeightSource,
    near: str,
    policy: str,
    limits: StreamLimits,
    beside: Executor,
    ahead: Readahead | None = None,
) -> tuple[StoreLink, Groupings]:
    """Return the link to a source, and the cached groupings of its weights.

    Neither is looked up if it would change nothing.

    Args:
        near: Non-empty object in the same store.
        beside: Executor for one of the two lookups.
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

    The path is as for :func:`~upriver.coldstart.format.checkpoint.find`.
    """
    name = object_at(path)
    if name is None or not is_joining(policy) or not store.is_far or limits.bandwidth_bytes_per_s < math.inf:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPlan:
    """Requests of a load, group by group.

    Attributes:
        source: Wanted weights.
        groups: Ranges over them, in the order of the requests.
        groupings: All groupings to store at the end of the load; empty if none is new.
        joins_s: Bytes that arrive within this time may be one request, even across groups.
    """

    source: WeightSource
    groups: Sequence[range]
    groupings: Groupings
    link: StoreLink
    limits: StreamLimits
    joins_s: float

    def stream(self, sink: Sink, ahead: Readahead | None = None) -> WeightStream:
        """Return the stream of these requests, without sending any."""
        return WeightStream(
            self.source,
            self.groups,
            sink,
            limits=self.limits,
            link=self.link,
            joins_s=self.joins_s,
            ahead=ahead,
        )


def plan_requests(
    source: WeightSource,
    link: StoreLink,
    policy: str,
    limits: StreamLimits,
    device: torch.device,
    known: Groupings,
) -> RequestPlan:
    """Decide which weights are requested together, from stored groupings or by the policy."""
    plan = partial(
        RequestPlan, source=source, link=link, limits=limits, joins_s=JOIN_S if is_joining(policy) else 0.0
    )
    if is_one_request(source, policy, limits):
        return plan(groups=[range(len(source.tensors))] if source.tensors else [], groupings={})
    bandwidth = min(link.bandwidth_bytes_per_s, limits.bandwidth_bytes_per_s)
    name, typical, pace = grouping_cache.bucket(
        policy, replace(link, bandwidth_bytes_per_s=bandwidth), limits.in_flight_bytes, pace_of(device)
    )
    name += "" if source.ordered else " as they lie"
    groups = known.get(name)
    if groups and groups[-1].stop == len(source.tensors):
        return plan(groups=groups, groupings={})
    nbytes = [float(placed.nbytes) for placed in source.tensors]
    layers = of_at_least(nbytes, LAYER_BYTES)
    sizes = [sum(nbytes[layer.start : layer.stop]) for layer in layers]
    timeline = Timeline(
        sizes,
        [size / LOAD_BYTES_PER_S for size in sizes],
        layer_seconds([placed.execution for placed in source.tensors], layers, pace),
        latency_s=typical.latency_s,
        bandwidth_bytes_per_s=typical.bandwidth_bytes_per_s,
        # Two things may be larger, and then come in parts: a layer, or a group of a policy without a cap.
        memory_cap_bytes=max(
            [float(limits.in_flight_bytes), *(sizes if is_joining(policy) else [sum(sizes)])]
        ),
        one_core=True,
    )
    groups = [
        range(layers[group.start].start, layers[group.stop - 1].stop) for group in GROUPINGS[policy](timeline)
    ]
    return plan(groups=groups, groupings={**known, name: groups})
