"""Choose the number of replicas by the bytes that wait for admission: up at once, down slowly.

Ray Serve counts the requests that pass through it, and ours do not: clients stream straight from the servers.
So each replica reports its own server's load, and this policy decides from the reports.

With ``q`` bytes waiting at all replicas together and ``t`` bytes that may wait at one, ``ceil(q / t)``
replicas are wanted. More than the current number start at once, since requests already wait. Fewer are wanted
only after a calm period, one replica at a time, and only if the others can take over its work. An empty queue
with busy workers means that there are just enough replicas.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

TARGET_BYTES = 1 << 30
"""Bytes that may wait at one replica: an eighth of the queue that a server holds before it refuses."""

SETTLE_S = 120.0
"""Calm period after which a replica stops. A new one needs some 20 s until it serves, and a stop loses
everything it has loaded. So it stays for several start times."""

FULL = 0.7
"""Most utilisation of the workers after a replica has stopped. At 0.7 a queue of requests with random
arrivals is still short (0.7 / 0.3, some two jobs)."""

CALM = 0.5
"""Largest share of the target that may wait after a stop; at 1 the next request would restart it."""

WAITING, UTILISATION, TARGET = "upriver_waiting_bytes", "upriver_utilisation", "upriver_target_bytes"
"""Names of the values that replicas report."""

CALM_SINCE = "upriver_calm_since_s"
"""Key in the state that Ray Serve keeps for the policy between two decisions."""


class ScalingDecision(NamedTuple):
    """Number of replicas, and the time since when fewer would suffice; None if they would not."""

    replicas: int
    calm_since_s: float | None = None


def desired_replicas(
    queued_bytes: Sequence[float],
    current: int,
    least: int,
    most: int,
    target_bytes: float,
    *,
    utilisation: Sequence[float] = (),
) -> int:
    """Return the number of replicas for the waiting bytes: any number above ``current``, or one fewer.

    The number lies in ``least..most``, and never falls with a longer queue.

    Args:
        queued_bytes: Bytes waiting at each replica that has reported; one that starts reports nothing.
        current: Current replicas, including those that start.
        target_bytes: Bytes that may wait at one replica.
        utilisation: Share of its workers' time that each was at work.
    """
    queued = sum(queued_bytes)
    wanted = math.ceil(queued / target_bytes)
    if wanted <= current and _fewer_do(queued, queued_bytes, current, target_bytes, sum(utilisation)):
        wanted = current - 1
    else:
        wanted = max(current, wanted)
    return min(most, max(least, wanted))


def _fewer_do(
    queued: float, reports: Sequence[float], current: int, target_bytes: float, busy: float
) -> bool:
    """Return whether one replica fewer would suffice with a margin, and all have reported."""
    left = current - 1
    return len(reports) >= current and queued <= CALM * target_bytes * left and busy <= FULL * left


def decide(
    wanted: int, current: int, *, now_s: float, calm_since_s: float | None, settle_s: float = SETTLE_S
) -> ScalingDecision:
    """Decide on the result of `desired_replicas`: more at once, fewer only after ``settle_s`` of calm."""
    if wanted >= current:
        return ScalingDecision(replicas=wanted)
    since_s = now_s if calm_since_s is None else calm_since_s
    if now_s - since_s < settle_s:
        return ScalingDecision(replicas=current, calm_since_s=since_s)
    return ScalingDecision(replicas=wanted)


def report(*, waiting_bytes: int, utilisation: float, target_bytes: int) -> dict[str, float]:
    """Return a replica's report to Ray Serve, with the target, since a policy has no settings of its own."""
    return {
        WAITING: float(waiting_bytes),
        UTILISATION: float(utilisation),
        TARGET: float(target_bytes),
    }


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Decide as Ray Serve calls it, several times a second.

    Args:
        context: A ``ray.serve.config.AutoscalingContext``.

    Returns:
        The number of replicas, and the state to keep until the next call.
    """
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    current = min(most, max(least, context.target_num_replicas))
    state: Mapping[str, Any] = context.policy_state or {}
    reports = {name: latest(context, name) for name in (WAITING, UTILISATION, TARGET)}
    wanted = desired_replicas(
        reports[WAITING],
        current,
        least,
        most,
        min(reports[TARGET], default=float(TARGET_BYTES)),
        utilisation=reports[UTILISATION],
    )
    replicas, since_s = decide(wanted, current, now_s=time.monotonic(), calm_since_s=state.get(CALM_SINCE))
    return replicas, {CALM_SINCE: since_s}


def latest(context: Any, name: str) -> list[float]:
    """Return the last value that each running replica has reported under a name.

    Ray Serve also offers a mean over time, but a queue that is gone must not count for half a minute.
    """
    series: Mapping[Any, Iterable[Any]] = (context.raw_metrics or {}).get(name, {})
    return [float(points[-1].value) for points in map(list, series.values()) if points]
