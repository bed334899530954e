"""How many replicas: by the bytes that wait for admission, up at once, down slowly.

Ray Serve counts the requests that pass through it, and ours do not: clients stream straight from the servers.
So each replica reports what its own server says of itself, and this policy decides from that.

With ``q`` bytes waiting at all replicas together and ``t`` bytes that may wait at one, ``ceil(q / t)``
replicas are wanted. More than there are is an order at once: whoever waits, waits now. Fewer is one only when
it has been so for a while, one replica at a time, and only where the others can take over what the one does:
an empty queue before busy workers means that there are just enough of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upriver.errors import ConfigError

TARGET_BYTES = 1 << 30
"""Bytes that may wait at one replica: an eighth of what a server's queue holds before it refuses."""

SETTLE_S = 120.0
"""A replica goes after so long a calm. A new one takes some 20 s until it serves, and what it has loaded is
lost when it goes, so it stays for a few of these."""

FULL = 0.7
"""Most of the workers' time that may be taken after a replica has gone: at 0.7 a queue of requests that come
at random is still short (0.7 / 0.3, some two jobs)."""

CALM = 0.5
"""Most of the target that may wait after a replica has gone: at 1 the next request would bring it back."""

WAITING, UTILISATION, TARGET = "upriver_waiting_bytes", "upriver_utilisation", "upriver_target_bytes"
"""What replicas report, by name."""

CALM_SINCE = "upriver_calm_since_s"
"""In the state that Ray Serve keeps for the policy between two decisions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingDecision:
    """How many replicas there are to be.

    Attributes:
        replicas: So many.
        calm_since_s: Since when fewer would do; None where they would not.
    """

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
    """How many replicas what waits now asks for: any number more than ``current``, or one fewer.

    Args:
        queued_bytes: Waiting at each replica that has reported; one that starts reports nothing.
        current: Replicas that there are, those that start included.
        least: Never fewer.
        most: Never more.
        target_bytes: May wait at one replica.
        utilisation: Share of its workers' time that each was at work.

    Returns:
        A number in ``least..most``. It never falls with a longer queue.

    Raises:
        ConfigError: If the bounds or the target make no sense.
    """
    if not 1 <= least <= most:
        raise ConfigError(f"replicas must be 1 <= least <= most, got {least} and {most}")
    if not target_bytes > 0:
        raise ConfigError(f"target_bytes must be > 0, got {target_bytes}")
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
    """Whether one replica fewer would do, with something to spare, and all have said how they are."""
    left = current - 1
    return len(reports) >= current and queued <= CALM * target_bytes * left and busy <= FULL * left


def decide(
    wanted: int, current: int, *, now_s: float, calm_since_s: float | None, settle_s: float = SETTLE_S
) -> ScalingDecision:
    """What to do about it: more at once, fewer only after ``settle_s`` in which it was so all the time.

    Args:
        wanted: Of `desired_replicas`.
        current: Replicas that there are.
        now_s: Any clock.
        calm_since_s: Of the last decision.
        settle_s: How long fewer must have been enough.
    """
    if wanted >= current:
        return ScalingDecision(replicas=wanted)
    since_s = now_s if calm_since_s is None else calm_since_s
    if now_s - since_s < settle_s:
        return ScalingDecision(replicas=current, calm_since_s=since_s)
    return ScalingDecision(replicas=wanted)


def report(*, waiting_bytes: int, utilisation: float, target_bytes: int) -> dict[str, float]:
    """What a replica tells Ray Serve; the target travels along, for a policy has no settings of its own."""
    return {
        WAITING: float(waiting_bytes),
        UTILISATION: float(utilisation),
        TARGET: float(target_bytes),
    }


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy as Ray Serve calls it, several times a second.

    Args:
        context: A ``ray.serve.config.AutoscalingContext``.

    Returns:
        How many replicas there are to be, and what to keep until the next call.
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
    decision = decide(wanted, current, now_s=time.monotonic(), calm_since_s=state.get(CALM_SINCE))
    return decision.replicas, {CALM_SINCE: decision.calm_since_s}


def latest(context: Any, name: str) -> list[float]:
    """The last value that each running replica has reported under a name.

    Not the mean over time that Ray Serve also offers: a queue that is gone must not count for half a minute.
    """
    series: Mapping[Any, Iterable[Any]] = (context.raw_metrics or {}).get(name, {})
    return [float(points[-1].value) for points in map(list, series.values()) if points]
