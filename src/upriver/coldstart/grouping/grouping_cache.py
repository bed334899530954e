"""Groupings that were found once, kept beside the weights for the next process, as PISeL's partition cache.

By policy, latency, bandwidth and what the machine computes, these in buckets: a grouping is found for the
middle of a bucket, and all who fall into it take the same one. PISeL has an agent that finds groupings ahead
(CIKM 2024, section 3.1); here whoever loads does it, and writes it down.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import msgspec

from upriver.coldstart.format.checkpoint import WeightSource, order_path
from upriver.coldstart.link_estimator import StoreLink
from upriver.coldstart.roofline import Pace
from upriver.errors import ObjectNotFound, ProgramError, StoreError
from upriver.program.graph.caps import DEFAULT_CAPS, GraphCaps
from upriver.program.graph.fetch import get_at_most

log = logging.getLogger(__name__)

SCHEMA = "upriver.groupings/1"

PER_DOUBLING = 2
"""Buckets from one latency, bandwidth or rate to twice that."""

LEAST_LATENCY_S = 1e-5
"""Less is a disk's or a memory's, where groups hardly matter."""

MOST_KEPT = 200
"""Groupings in one file; a load that would be one more is not kept."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``NAME.groupings.json`` holds.

    Attributes:
        schema: Name and version of the format.
        etags: Of the objects that they are for.
        num_tensors: That these have.
        stops: Where each group ends, by the tensors' places in the file, for each :func:`bucket`.
    """

    schema: str
    etags: dict[str, str]
    num_tensors: int
    stops: dict[str, list[int]]


def path_of(source: WeightSource) -> str:
    """Where the groupings of some weights are kept."""
    return f"{order_path(source.path).removesuffix('.order.json')}.groupings.json"


def bucket(policy: str, link: StoreLink, in_flight_bytes: int, pace: Pace) -> tuple[str, StoreLink, Pace]:
    """What a grouping is kept under, and the link and the machine that it is found for.

    Args:
        policy: Its name.
        link: As it was found to be.
        in_flight_bytes: That a load may have asked for at once.
        pace: Of the machine.
    """
    latency = _bucket_of(max(LEAST_LATENCY_S, link.latency_s))
    bandwidth = _bucket_of(link.bandwidth_bytes_per_s)
    flops, moved = _bucket_of(pace.flops_per_s), _bucket_of(pace.moved_bytes_per_s)
    return (
        f"{policy} {latency} {bandwidth} {in_flight_bytes} {flops} {moved}",
        StoreLink(bandwidth_bytes_per_s=_middle(bandwidth), latency_s=_middle(latency)),
        Pace(flops_per_s=_middle(flops), moved_bytes_per_s=_middle(moved)),
    )


def _bucket_of(value: float) -> int:
    return round(PER_DOUBLING * math.log2(value))


def _middle(number: int) -> float:
    return math.exp2(number / PER_DOUBLING)


def kept(source: WeightSource, *, caps: GraphCaps = DEFAULT_CAPS) -> dict[str, list[range]]:
    """What is kept, by bucket; nothing where it is for other weights, or not what it should be.

    A grouping decides when something comes and never what, so one that is wrong costs time alone.
    """
    beside = path_of(source)
    try:
        found = msgspec.json.decode(get_at_most(source.store, beside, caps.header_bytes), type=_Kept)
        if found.schema != SCHEMA:
            raise ProgramError(f"schema {found.schema[:80]!r}; this version reads {SCHEMA!r}")
        if found.etags != dict(source.etags) or found.num_tensors != len(source.tensors):
            raise ProgramError("it is for other weights")
        return {name: _groups(stops, found.num_tensors) for name, stops in found.stops.items()}
    except ObjectNotFound:
        return {}
    # msgspec raises its own errors and, on some text, Python's.
    except (StoreError, ProgramError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        log.info("the groupings kept in %s are not used: %s", beside, error)
        return {}


def keep(source: WeightSource, known: Mapping[str, Sequence[range]]) -> None:
    """Keep groupings for the next one who loads these weights; of two who do so at once one is lost.

    Raises:
        StoreError: If the store refuses, as it may: nothing depends on it.
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
