"""Summarize the choices of several plans for one question, for tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from upriver.types import CutRow, Plan

DOES_NOT_FIT = "does not fit"
"""Text instead of the choice of an infeasible plan."""


def shares(plan: Plan) -> dict[int, float]:
    """Return the share of the samples at each cut, the largest first; empty if the plan is infeasible."""
    if not plan.feasible:
        return {}
    found: dict[int, float] = {}
    for route in plan.routes:
        found[route.cut] = found.get(route.cut, 0.0) + route.share
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def share_text(share: float) -> str:
    """Format a share as a percentage of at most three digits: ``62.5%``."""
    return f"{100 * share:.3g}%"


def choice_text(plan: Plan) -> str:
    """Format the cut, or the cuts of a mix with their shares: ``13``, ``13 62.5% + 5 37.5%``."""
    chosen = shares(plan)
    if len(chosen) == 1:
        return str(next(iter(chosen)))
    return " + ".join(f"{cut} {share_text(share)}" for cut, share in chosen.items()) or DOES_NOT_FIT


def marks(plans: Mapping[str, Plan]) -> dict[int, list[str]]:
    """Return the policies that chose each cut, for a mix with the share: ``["hapi", "upriver 62.5%"]``."""
    found: dict[int, list[str]] = {}
    for name, plan in plans.items():
        chosen = shares(plan)
        for cut, share in chosen.items():
            found.setdefault(cut, []).append(name if len(chosen) == 1 else f"{name} {share_text(share)}")
    return found


def fastest(plans: Iterable[Plan]) -> Plan | None:
    """Return the plan with the shortest predicted epoch, the last of equals; None if none is feasible."""
    predicted = [(plan.predicted.epoch_s, plan) for plan in plans if plan.predicted is not None]
    return min(reversed(predicted), key=lambda item: item[0])[1] if predicted else None


def unit_of(plans: Mapping[str, Plan]) -> str:
    """Return the unit of the plans' times: ``epoch`` or ``request``."""
    return next(iter(plans.values())).unit


def table_of(plans: Mapping[str, Plan]) -> Sequence[CutRow]:
    """Return the table of cuts, which is the same for every policy with the same question."""
    return next(iter(plans.values())).table
