"""What every policy that answers one cut for all samples shares: the plan around it, and the words for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from upriver.cost import NOT_SPLIT, CostModel, route_at
from upriver.text import bytes_text, seconds_text
from upriver.types import Cluster, Cost, CutRow, Plan, Profile, Workload

Policy = Callable[[Profile, Cluster, Workload], Plan]
"""A pure function from what is known to what is decided; one with state is a class with ``__call__``."""


def plan_at(policy: str, cut: int, model: CostModel, *, rule: str) -> Plan:
    """The plan that sends every sample over ``cut``, with the full table and why.

    Args:
        policy: Name of the policy that decided.
        cut: What it decided.
        model: The cost of every cut.
        rule: How the policy came to it, as a clause: "the freeze point".
    """
    rows = {row.cut: row for row in model.table()}
    row = rows[cut]
    if row.feasible:
        why = f"cut {cut}, {rule}. {_explained(row, rows)}"
    else:
        why = f"cut {cut}, {rule}, does not fit: {row.why_not}."
    return Plan(
        policy=policy,
        feasible=row.feasible,
        routes=(route_at(model.profile, cut),),
        predicted=row.cost if row.feasible else None,
        table=tuple(rows.values()),
        why=why,
    )


def nearest_to_fit(cuts: Iterable[int], model: CostModel) -> int:
    """The cut that lacks the fewest bytes, the earliest of equals."""
    return min(cuts, key=lambda cut: sum(model.shortfalls(cut).values()))


def _explained(row: CutRow, rows: Mapping[int, CutRow]) -> str:
    cost = row.cost
    name, busy = _bottleneck(cost)
    moved, busy_s = bytes_text(cost.bytes), seconds_text(busy)
    text = f"An epoch is predicted at {seconds_text(cost.epoch_s)} s with {moved} over the link; "
    text += f"{name} is the bottleneck, busy for {busy_s} s of it."
    others = [_beside(rows[cut], cost) for cut in _to_compare(row.cut, rows)]
    return f"{text} Beside it: {'; '.join(others)}." if others else text


def _bottleneck(cost: Cost) -> tuple[str, float]:
    tiers = {"the storage tier": cost.storage_s, "the compute tier": cost.compute_s}
    return max({**tiers, "the link": cost.network_s}.items(), key=lambda item: item[1])


def _to_compare(cut: int, rows: Mapping[int, CutRow]) -> list[int]:
    """Not splitting, the candidates on both sides, and the fastest that fits; in the order of the chain."""
    order = list(rows)
    at = order.index(cut)
    fastest = min((c for c in order if rows[c].feasible), key=lambda c: rows[c].cost.epoch_s)
    near = {order[0], fastest, *order[max(0, at - 1) : at + 2]} - {cut}
    return [other for other in order if other in near]


def _beside(row: CutRow, chosen: Cost) -> str:
    label = f"cut {row.cut} {row.name}" if row.name == NOT_SPLIT else f"cut {row.cut}"
    if not row.feasible:
        return f"{label} does not fit"
    times = f" ({row.cost.epoch_s / chosen.epoch_s:.2f} x)" if chosen.epoch_s > 0 else ""
    return f"{label} {seconds_text(row.cost.epoch_s)} s{times}"
