"""Share code among policies: the searched cuts, the plan around a choice, and its explanation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from upriver.cost import NOT_SPLIT, Array, CostModel, route_at
from upriver.text import bytes_text, seconds_text
from upriver.types import Cluster, Cost, CutRow, Plan, Profile, Route, Workload

NOTHING_FROZEN = "no stage of the model is frozen"

SLACK = 0.01
"""Relative difference below which epochs count as equal, so that the storage tier can be spared."""

MARGIN = 0.05
"""Fraction added to a mix's predicted epoch in a comparison with a single cut."""

Policy = Callable[[Profile, Cluster, Workload], Plan]
"""Pure function from known facts to a decision; a policy with state is a class with ``__call__``."""


def splits(profile: Profile) -> range:
    """Return the layers after which the papers split: 1 to the freeze point."""
    return range(1, profile.freeze + 1)


def splits_or_none(profile: Profile) -> tuple[int, ...]:
    """Return the same and the papers' split 0, where stored samples cross and the client runs everything."""
    return (profile.unsplit, *splits(profile))


def among(profile: Profile) -> str:
    """Describe :func:`splits`, for the rule of a plan."""
    return f"among cuts 1 to {profile.freeze}"


def best_that_fits(policy: str, cuts: Sequence[int], model: CostModel, score: Array, *, rule: str) -> Plan:
    """Return the plan of the fitting cut with the least score; the earliest cut wins ties.

    If none of ``cuts`` fits but not splitting does, the plan does not split. If nothing fits, the plan is
    infeasible and names the cut that lacks the least memory.

    Args:
        score: Value to minimise, for every candidate.
    """
    searched = np.zeros(len(model.cuts), dtype=bool)
    searched[[model.index(cut) for cut in cuts]] = True
    searched &= model.feasible
    if searched.any():
        best = int(np.where(searched, score, np.inf).argmin())
        return plan_at(policy, model.cuts[best], model, rule=rule)
    return rescue(policy, model)


def rescue(policy: str, model: CostModel) -> Plan:
    """Return the plan for the case that no cut of a policy's search fits."""
    if model.feasible.any():
        cut = model.cuts[int(model.feasible.argmax())]
        nothing = "no cut that the policy searches fits" if model.profile.freeze > 0 else NOTHING_FROZEN
        return plan_at(policy, cut, model, rule=f"as {nothing}")
    cut = nearest_to_fit(model.cuts, model)
    return plan_at(policy, cut, model, rule="the nearest to fitting as no cut fits")


def plan_at(policy: str, cut: int, model: CostModel, *, rule: str) -> Plan:
    """Return the plan that sends every sample over ``cut``, with the full table and the reason.

    Args:
        rule: Rule behind the choice, as a clause: "the freeze point".
    """
    row = model.row(cut)
    if not row.feasible:
        return Plan(
            policy=policy,
            feasible=False,
            routes=(route_at(model.profile, cut),),
            predicted=None,
            table=model.table(),
            why=f"cut {cut}, {rule}, does not fit: {row.why_not}.",
        )
    return plan_with(policy, (route_at(model.profile, cut),), model, rule=f"cut {cut}, {rule}")


def plan_with(policy: str, routes: tuple[Route, ...], model: CostModel, *, rule: str) -> Plan:
    """Return the plan of routes that fit, with the full table and the reason."""
    cost = model.evaluate(routes)
    return Plan(
        policy=policy,
        feasible=True,
        routes=routes,
        predicted=cost,
        table=model.table(),
        why=f"{rule}. {_explained(routes, cost, model)}",
    )


def nearest_to_fit(cuts: Iterable[int], model: CostModel) -> int:
    """Return the cut that lacks the fewest bytes; the earliest cut wins ties."""
    return min(cuts, key=lambda cut: sum(model.shortfalls(cut).values()))


def _explained(routes: Sequence[Route], cost: Cost, model: CostModel) -> str:
    name, busy = _bottleneck(cost)
    moved, busy_s = bytes_text(cost.bytes), seconds_text(busy)
    text = f"An epoch is predicted at {seconds_text(cost.epoch_s)} s with {moved} over the link; "
    text += f"{name} is the bottleneck, busy for {busy_s} s of it."
    others = [_beside(model.row(cut), cost) for cut in _to_compare(routes, model)]
    return f"{text} Beside it: {'; '.join(others)}." if others else text


def _bottleneck(cost: Cost) -> tuple[str, float]:
    tiers = {"the storage tier": cost.storage_s, "the compute tier": cost.compute_s}
    return max({**tiers, "the link": cost.network_s}.items(), key=lambda item: item[1])


def _to_compare(routes: Sequence[Route], model: CostModel) -> list[int]:
    """Return the cuts to compare, in chain order: not splitting, both neighbours and the fastest."""
    used, epoch_s = {route.cut for route in routes}, model.epochs.epoch_s
    fastest = model.cuts[int(np.where(model.feasible, epoch_s, np.inf).argmin())]
    near = {cut + step for cut in used for step in (-1, 1)} if len(used) == 1 else set()
    return sorted(({model.cuts[0], fastest} | near) & set(model.cuts) - (used if len(used) == 1 else set()))


def _beside(row: CutRow, chosen: Cost) -> str:
    label = f"cut {row.cut} {row.name}" if row.name == NOT_SPLIT else f"cut {row.cut}"
    if not row.feasible:
        return f"{label} does not fit"
    return f"{label} {seconds_text(row.cost.epoch_s)} s{_times(row.cost.epoch_s, chosen.epoch_s)}"


def _times(epoch_s: float, chosen_s: float) -> str:
    if chosen_s <= 0:
        return ""
    times = epoch_s / chosen_s
    return f" ({times:.2f} x)" if times < 1000 else " (over 1000 x)"
