"""Which layers of a model are downloaded together: PISeL's greedy groups, layer by layer, and our own.

Groups are ranges over the layers in execution order, one request each. Few large ones leave the loader and
the processor waiting for the first bytes to be of use, many small ones leave the link waiting for requests.
What that costs is predicted by the same :class:`~upriver.coldstart.grouping.timeline.Timeline` for all of
them, with what executing takes as :mod:`upriver.coldstart.roofline` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from upriver.coldstart.grouping.optimizer import shortest
from upriver.coldstart.grouping.timeline import Array, Timeline, check_link, checked_sizes
from upriver.errors import ConfigError
from upriver.text import bytes_text, printable

Grouping: TypeAlias = Callable[[Timeline], list[range]]
"""A pure function from what the layers take to those that are downloaded together."""


def greedy(
    sizes_bytes: Sequence[float] | Array, *, latency_s: float, bandwidth_bytes_per_s: float
) -> list[range]:
    """PISeL's groups (CIKM 2024, Algorithm 1): each but the last of at least RL x BW.

    Those are the most consecutive groups of which each but the last has that size. (The paper's Theorem 1
    says the fewest, which one group of everything would be.)

    Args:
        sizes_bytes: Of each layer's weights, in execution order.
        latency_s: RL, from a request to its first byte.
        bandwidth_bytes_per_s: BW, of the link.

    Raises:
        ConfigError: If a number is none, negative or infinite.
    """
    check_link(latency_s, bandwidth_bytes_per_s)
    least = latency_s * bandwidth_bytes_per_s
    sizes = checked_sizes(sizes_bytes).tolist()
    groups, start, filled = [], 0, 0.0
    for stop, size in enumerate(sizes, start=1):
        filled += size
        if filled >= least:
            groups.append(range(start, stop))
            start, filled = stop, 0.0
    return groups if start == len(sizes) else [*groups, range(start, len(sizes))]


def layer_by_layer(sizes_bytes: Sequence[float] | Array) -> list[range]:
    """A group for each layer: what PISeL is compared with in its section 5.3.

    Raises:
        ConfigError: If a size is none, negative or infinite.
    """
    return [range(layer, layer + 1) for layer in range(len(checked_sizes(sizes_bytes)))]


def best(
    sizes_bytes: Sequence[float],
    load_s: Sequence[float],
    execute_s: Sequence[float],
    *,
    latency_s: float,
    bandwidth_bytes_per_s: float,
    memory_cap_bytes: float = math.inf,
    one_core: bool = False,
) -> list[range]:
    """Ours: the groups with the least predicted makespan under a cap on the bytes in flight.

    Up to 64 layers no grouping is predicted to take less, with more none by over 0.1 %, but for memory caps
    of a few latencies' worth of very many bytes (:mod:`upriver.coldstart.grouping.optimizer`). Where PISeL's
    groups take no longer, it is those.

    Args:
        sizes_bytes: Of each layer's weights, in execution order.
        load_s: To load each: checksum, conversion, copy to a device.
        execute_s: To run each on the first input.
        latency_s: From a request to its first byte.
        bandwidth_bytes_per_s: Of the link.
        memory_cap_bytes: The most that may be downloaded, or asked for, and not yet loaded.
        one_core: Whether loading and executing share a core.

    Raises:
        ConfigError: If a number is none, negative or infinite, not all three are given for each layer, or a
            layer alone is larger than the memory cap.
    """
    return _best(
        Timeline(
            sizes_bytes,
            load_s,
            execute_s,
            latency_s=latency_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            memory_cap_bytes=memory_cap_bytes,
            one_core=one_core,
        )
    )


def makespan(
    groups: Sequence[range],
    sizes_bytes: Sequence[float],
    load_s: Sequence[float],
    execute_s: Sequence[float],
    *,
    latency_s: float,
    bandwidth_bytes_per_s: float,
    memory_cap_bytes: float = math.inf,
    one_core: bool = False,
) -> float:
    """What a grouping takes, in seconds from the first request to the answer.

    Args:
        groups: Any policy's.
        sizes_bytes: This and the others as for :func:`best`.

    Returns:
        The prediction of :meth:`Timeline.makespan`; infinite if a group is larger than the memory cap.

    Raises:
        ConfigError: If a number is none, negative or infinite, or the groups do not have every layer once, in
            order.
    """
    timeline = Timeline(
        sizes_bytes,
        load_s,
        execute_s,
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        memory_cap_bytes=memory_cap_bytes,
        one_core=one_core,
    )
    return timeline.makespan(groups)


def _layer_by_layer(timeline: Timeline) -> list[range]:
    return layer_by_layer(timeline.sizes_bytes)


def _pisel(timeline: Timeline) -> list[range]:
    return greedy(
        timeline.sizes_bytes,
        latency_s=timeline.latency_s,
        bandwidth_bytes_per_s=timeline.bandwidth_bytes_per_s,
    )


def _best(timeline: Timeline) -> list[range]:
    cap = timeline.memory_cap_bytes
    over = np.flatnonzero(timeline.sizes_bytes > cap)
    if len(over):
        size = bytes_text(timeline.sizes_bytes[over[0]])
        raise ConfigError(
            f"layer {over[0]} has {size}, more than memory_cap_bytes allows in flight ({bytes_text(cap)}); "
            "raise the cap, or give the layer in parts"
        )
    return shortest(timeline, (_pisel(timeline), _layer_by_layer(timeline)))


GROUPINGS: Mapping[str, Grouping] = MappingProxyType(
    {"layer_by_layer": _layer_by_layer, "pisel": _pisel, "upriver": _best}
)
"""The policies by their names."""

SMALL_BYTES = 8 << 20
"""Of a model that ours asks for in one request, without a look at the link. A stream puts each weight in its
place as it comes, so one request makes nobody wait for its end; and it is over, at 100 MB/s, before a stream
can tell whether a second one would bring more (``flow.TRIAL_BUSY_S``)."""

_JOINING = frozenset({"upriver"})
"""Policies that count on a stream's putting each weight in its place as it comes: they ask for small models
in one request, for groups that follow each other together, and for the first bytes before they know what
these are, and make no group of more than may be in flight. The others are what a paper says."""


def is_whole(policy: str, nbytes: int, request_bytes: int) -> bool:
    """Whether a policy has one group for so many bytes of one object, whatever the link and the machine.

    Args:
        policy: Its name.
        nbytes: Of all weights.
        request_bytes: Of one request, at most.
    """
    return policy in _JOINING and nbytes <= min(SMALL_BYTES, request_bytes)


JOIN_S = 0.1
"""What comes in so many seconds ours asks for at once, though these are several groups. Stores take some
milliseconds for any request, in which nothing comes where they have no second processor for the next one.
With more, a weight that somebody waits for out of turn would come late."""


def joins_s(policy: str) -> float:
    """For how many seconds of a link groups are asked for together, where one lies behind the other.

    Args:
        policy: Its name.
    """
    return JOIN_S if policy in _JOINING else 0.0


def knows_stream(policy: str) -> bool:
    """Whether it may ask for first bytes before it groups, and groups no more than may be in flight."""
    return policy in _JOINING


def check_policy(policy: str) -> None:
    """The name of a policy.

    Raises:
        ConfigError: If there is none of that name.
    """
    if not isinstance(policy, str) or policy not in GROUPINGS:
        raise ConfigError(
            f"grouping must be one of {', '.join(GROUPINGS)}, got {printable(repr(policy), 60)}"
        )


def choose(policy: str, timeline: Timeline) -> list[range]:
    """The groups of the named policy.

    Raises:
        ConfigError: If there is no such policy, or one of its groups is larger than the memory cap.
    """
    check_policy(policy)
    groups = GROUPINGS[policy](timeline)
    largest = max((timeline.size_bytes(group) for group in groups), default=0.0)
    if largest > timeline.memory_cap_bytes:
        raise ConfigError(
            f"grouping {policy} has a group of {bytes_text(largest)}, more than memory_cap_bytes allows in "
            f"flight ({bytes_text(timeline.memory_cap_bytes)})"
        )
    return groups
