"""Store groupings next to the weights for the next process, as PISeL's partition cache does.

A grouping is stored by policy, latency, bandwidth and the machine's rates. These numbers fall into buckets. A
grouping is found for the middle of a bucket, and all loads in that bucket share it. PISeL has an agent that
finds groupings ahead of time (CIKM 2024, section 3.1). Here the loading process finds and stores them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from upriver.coldstart.format.checkpoint import Hint, WeightSource, order_path, read_hint
from upriver.coldstart.link_cache import StoreLink
from upriver.coldstart.roofline import DevicePace
from upriver.errors import ProgramError

SCHEMA = "upriver.groupings/1"

PER_DOUBLING = 2
"""Buckets between a latency, bandwidth or rate and its double."""

LEAST_LATENCY_S = 1e-5
"""Lowest latency that is told apart. Less belongs to a disk or memory, where groups hardly matter."""

MOST_KEPT = 200
"""Most groupings in one file. A grouping beyond that is not stored."""


class _Kept(Hint, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``NAME.groupings.json``.

    Attributes:
        stops: End of each group, by the tensors' positions in the file, for each :func:`bucket`.
    """

    num_tensors: int
    stops: dict[str, list[int]]


def path_of(source: WeightSource) -> str:
    """Return the path at which the groupings of a source are stored."""
    return f"{order_path(source.path).removesuffix('.order.json')}.groupings.json"


def bucket(
    policy: str, link: StoreLink, in_flight_bytes: int, pace: DevicePace
) -> tuple[str, StoreLink, DevicePace]:
    """Return the key of a grouping, and the link and the machine for which it is found."""
    latency = _bucket_of(max(LEAST_LATENCY_S, link.latency_s))
    bandwidth = _bucket_of(link.bandwidth_bytes_per_s)
    flops, moved = _bucket_of(pace.flops_per_s), _bucket_of(pace.moved_bytes_per_s)
    return (
        f"{policy} {latency} {bandwidth} {in_flight_bytes} {flops} {moved}",
        StoreLink(bandwidth_bytes_per_s=_middle(bandwidth), latency_s=_middle(latency)),
        DevicePace(flops_per_s=_middle(flops), moved_bytes_per_s=_middle(moved)),
    )


def _bucket_of(value: float) -> int:
    return round(PER_DOUBLING * math.log2(value))


def _middle(number: int) -> float:
    return math.exp2(number / PER_DOUBLING)


def kept(source: WeightSource) -> dict[str, list[range]]:
    """Return the stored groupings by bucket; none if they are invalid or for other weights."""
    known = read_hint(source, path_of(source), _Kept, SCHEMA, lambda found: _known(source, found))
    return known or {}


def _known(source: WeightSource, found: _Kept) -> dict[str, list[range]]:
    if found.num_tensors != len(source.tensors):
        raise ProgramError("it is for other weights")
    return {name: _groups(stops, found.num_tensors) for name, stops in found.stops.items()}


def keep(source: WeightSource, known: Mapping[str, Sequence[range]]) -> None:
    """Store groupings for later loads of these weights. Of two concurrent writes one is lost.

    Raises:
        StoreError: If the store refuses. The caller may ignore this: nothing depends on the groupings.
    """
    if len(known) > MOST_KEPT:
        return
    document = _Kept(
        schema=SCHEMA,
        etags=dict(sorted(source.etags.items())),
        num_tensors=len(source.tensors),
        stops={name: [group.stop for group in groups] for name, groups in sorted(known.items())},
    )
    source.store.put(path_of(source), msgspec.json.encode(document))


def _groups(stops: Sequence[int], num_tensors: int) -> list[range]:
    groups, start = [], 0
    for stop in stops:
        if not start < stop <= num_tensors:
            raise ProgramError(f"a group ends at {stop} of {num_tensors} behind {start}")
        groups.append(range(start, stop))
        start = stop
    if start != num_tensors:
        raise ProgramError(f"groups end at {start} of {num_tensors}")
    return groups
