"""Convert a plan to JSON for programs. For people, ``str(plan)`` formats it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from upriver.types import CutRow, Plan, Route, Tier


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the JSON of ``upriver plan --json``: JSON types, times of a whole epoch or request.

    ``cut`` and ``shares`` are present if every route goes from the storage tier to the compute tier. For a
    device's request every route goes the other way.
    """
    answer: dict[str, Any] = {"policy": plan.policy, "feasible": plan.feasible}
    if all(_with_one_cut(route) for route in plan.routes):
        answer["cut"] = plan.cut
        answer["shares"] = {str(route.cut): route.share for route in plan.routes}
    answer["routes"] = [_route(route, empty=plan.unit == "epoch") for route in plan.routes]
    answer["predicted"] = None if plan.predicted is None else asdict(plan.predicted)
    answer["table"] = [_row(row) for row in plan.table]
    return answer


def _with_one_cut(route: Route) -> bool:
    tiers = [segment.tier for segment in route.segments]
    return tiers in ([Tier.COMPUTE], [Tier.STORAGE, Tier.COMPUTE], [Tier.COMPUTE, Tier.STORAGE])


def _route(route: Route, *, empty: bool) -> dict[str, Any]:
    run = [segment for segment in route.segments if empty or segment.start < segment.stop]
    segments = [{"tier": str(s.tier), "start": s.start, "stop": s.stop} for s in run]
    return {"share": route.share, "segments": segments}


def _row(row: CutRow) -> dict[str, Any]:
    return {
        "cut": row.cut,
        "feasible": row.feasible,
        "why_not": row.why_not,
        "bytes": row.cost.bytes,
        "storage_s": row.cost.storage_s,
        "network_s": row.cost.network_s,
        "compute_s": row.cost.compute_s,
        "epoch_s": row.cost.epoch_s,
    }
