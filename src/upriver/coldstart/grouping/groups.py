"""Decide which layers of a model are downloaded together: PISeL's greedy groups, single layers, or our own.

Groups are ranges over the layers in execution order, one request each. With few large groups, loader and
processor wait for the first useful bytes. With many small ones the link waits for requests. One
:class:`~upriver.coldstart.grouping.timeline.Timeline` predicts the cost of all of them, with the execution
times of :mod:`upriver.coldstart.roofline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from upriver.coldstart.grouping.optimizer import shortest
from upriver.coldstart.grouping.timeline import Array, Timeline, check_link, checked_sizes
from upriver.errors import ConfigError
from upriver.text import bytes_text, printable

Grouping: TypeAlias = Callable[[Timeline], list[range]]
"""Pure function from the layers' costs to the groups of layers that are downloaded together."""


def greedy(
    sizes_bytes: Sequence[float] | Array, *, latency_s: float, bandwidth_bytes_per_s: float
) -> list[range]:
    """Return PISeL's groups (CIKM 2024, Algorithm 1): each but the last has at least RL x BW bytes.

    These are the most consecutive groups of which each but the last has that size. (The paper's Theorem 1
    says the fewest, which would be one group of everything.)

    Args:
        sizes_bytes: Bytes of each layer's weights, in execution order.
        latency_s: RL, from a request to its first byte.
        bandwidth_bytes_per_s: BW, of the link.

    Raises:
        ConfigError: If a value is no number, negative or infinite.
    """
    check_link(latency_s, bandwidth_bytes_per_s)
    return of_at_least(checked_sizes(sizes_bytes).tolist(), latency_s * bandwidth_bytes_per_s)


def of_at_least(sizes_bytes: Sequence[float], least_bytes: float) -> list[range]:
    """Return the most consecutive groups of which each but the last has that many bytes."""
    groups, start, filled = [], 0, 0.0
    for stop, size in enumerate(sizes_bytes, start=1):
        filled += size
        if filled >= least_bytes:
            groups.append(range(start, stop))
            start, filled = stop, 0.0
    return groups if start == len(sizes_bytes) else [*groups, range(start, len(sizes_bytes))]


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
    """Return the groups with the least predicted makespan under a cap on the bytes in flight.

    Up to 64 layers no grouping has a shorter prediction. With more layers none is shorter by over 0.1 %.
    Exceptions are memory caps of a few latencies' worth of very many bytes
    (:mod:`upriver.coldstart.grouping.optimizer`). If PISeL's groups take no longer, they are returned.

    Args:
        sizes_bytes: Bytes of each layer's weights, in execution order.
        load_s: Seconds to load each layer: checksum, conversion, copy to a device.
        execute_s: Seconds to run each layer on the first input.
        latency_s: Seconds from a request to its first byte.
        bandwidth_bytes_per_s: Bandwidth of the link.
        memory_cap_bytes: Most bytes that may be requested or downloaded, and not yet loaded.
        one_core: True if loading and executing share a core.

    Raises:
        ConfigError: If a value is no number, negative or infinite, a layer lacks one of the three, or a layer
            alone exceeds the memory cap.
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


def _layer_by_layer(timeline: Timeline) -> list[range]:
    """Return a group for each layer, the baseline of PISeL's section 5.3."""
    return [range(layer, layer + 1) for layer in range(timeline.num_layers)]


def _pisel(timeline: Timeline) -> list[range]:
    return of_at_least(timeline.sizes_bytes.tolist(), timeline.latency_s * timeline.bandwidth_bytes_per_s)


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


GROUPINGS: Mapping[str, Grouping] = {"layer_by_layer": _layer_by_layer, "pisel": _pisel, "upriver": _best}
"""Grouping policies by name."""

SMALL_BYTES = 8 << 20
"""Largest model that policy `upriver` requests at once without measuring the link. A stream writes each
weight as its bytes arrive, so no weight waits for the end of the request. At 100 MB/s the request ends before
a stream can tell whether a second one would bring more
(:data:`~upriver.coldstart.fetch.concurrency.TRIAL_BUSY_S`)."""

_JOINING = frozenset({"upriver"})
"""Policies that rely on the stream to write each weight as its bytes arrive. They request small models at
once, join consecutive groups, and request the first bytes before they know their content. They make no group
larger than the bytes in flight. The other policies follow their papers."""


def is_whole(policy: str, nbytes: int, request_bytes: int) -> bool:
    """Return True if a policy makes one group of these bytes, for any link and machine."""
    return policy in _JOINING and nbytes <= min(SMALL_BYTES, request_bytes)


JOIN_S = 0.1
"""Bytes that arrive within this time are one request of policy `upriver`, even across groups. Stores need
some milliseconds for any request. During these nothing arrives if a store has no second processor for the
next request. With more, a weight that a caller waits for out of turn would come late."""


def is_joining(policy: str) -> bool:
    """Return True if a policy relies on the stream to write each weight as its bytes arrive."""
    return policy in _JOINING


def check_policy(policy: str) -> None:
    """Check the name of a policy.

    Raises:
        ConfigError: If no policy has that name.
    """
    if not isinstance(policy, str) or policy not in GROUPINGS:
        raise ConfigError(
            f"grouping must be one of {', '.join(GROUPINGS)}, got {printable(repr(policy), 60)}"
        )
