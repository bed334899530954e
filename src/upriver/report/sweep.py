"""Sweep the link's bandwidth over the choices of each policy: as data, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from upriver.policies import Policy
from upriver.report.choices import choice_text, shares
from upriver.text import aligned, rate_text, seconds_text
from upriver.types import Cluster, Plan, Profile, Workload

NUM_POINTS = 13
"""Points of a range. Over a thousandfold growth each is less than twice the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPoint:
    """Plans of each policy at one bandwidth."""

    bandwidth_bytes_per_s: float
    plans: Mapping[str, Plan]


def logarithmic(first: float, last: float, num_points: int = NUM_POINTS) -> tuple[float, ...]:
    """Return numbers from ``first`` to ``last``, both included, with a constant factor between them."""
    if first == last:
        return (first,)
    step = math.log(last / first) / (num_points - 1)
    between = (first * math.exp(number * step) for number in range(1, num_points - 1))
    return (first, *between, last)


def sweep_bandwidth(
    policies: Mapping[str, Policy],
    bandwidths_bytes_per_s: Sequence[float],
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
) -> tuple[SweepPoint, ...]:
    """Run every policy at each bandwidth, with the rest of ``cluster`` unchanged."""
    points = []
    for rate in bandwidths_bytes_per_s:
        there = replace(cluster, link=replace(cluster.link, bandwidth_bytes_per_s=rate))
        plans = {name: policy(profile, there, workload) for name, policy in policies.items()}
        points.append(SweepPoint(bandwidth_bytes_per_s=rate, plans=plans))
    return tuple(points)


def sweep_to_dict(points: Sequence[SweepPoint]) -> dict[str, Any]:
    """Return the sweep in JSON types. An infeasible plan has neither shares nor a prediction."""
    return {
        "parameter": "bandwidth_bytes_per_s",
        "points": [
            {
                "bandwidth_bytes_per_s": point.bandwidth_bytes_per_s,
                "plans": {name: _choice(plan) for name, plan in point.plans.items()},
            }
            for point in points
        ],
    }


def _choice(plan: Plan) -> dict[str, Any]:
    chosen = shares(plan)
    return {
        "feasible": plan.feasible,
        "cut": next(iter(chosen), None),
        "shares": {str(cut): share for cut, share in chosen.items()},
        "predicted": None if plan.predicted is None else asdict(plan.predicted),
    }


def choices_table(points: Sequence[SweepPoint]) -> str:
    """Format one line for each bandwidth and one column for each policy: its cut, or a mix with shares."""
    return _table(points, lambda plan: choice_text(plan) if plan.feasible else "-")


def epochs_table(points: Sequence[SweepPoint]) -> str:
    """Format the same table with the predicted seconds of an epoch."""
    return _table(points, epoch_text)


def epoch_text(plan: Plan) -> str:
    """Format the predicted seconds of an epoch, or a dash if nothing fits."""
    return "-" if plan.predicted is None else seconds_text(plan.predicted.epoch_s)


def _table(points: Sequence[SweepPoint], cell: Callable[[Plan], str]) -> str:
    names = list(points[0].plans)
    rows = [
        [rate_text(point.bandwidth_bytes_per_s), *(cell(point.plans[name]) for name in names)]
        for point in points
    ]
    return aligned(["bandwidth", *names], rows, left=frozenset())
