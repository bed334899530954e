"""Share code among policies for single requests: the plan around a chosen cut, and its explanation."""

from __future__ import annotations

import numpy as np

from upriver.cost import Array
from upriver.latency import LatencyModel, last_of_least
from upriver.text import seconds_text
from upriver.types import Plan

LOCAL = "the device alone"
SENT = "all on the server"


def least(policy: str, model: LatencyModel, seconds: Array, *, rule: str) -> Plan:
    """Return the plan of the fitting cut with the least seconds; the last cut wins ties.

    Args:
        seconds: Seconds of a request at each cut, as the policy counts them.
        rule: The minimised value, as a clause.
    """
    fits = model.feasible
    if fits.any():
        index = last_of_least(np.where(fits, seconds, np.inf))
    else:
        index = min(range(len(fits)), key=lambda each: model.shortfall(model.cuts[each]))
    cut, feasible = model.cuts[index], bool(fits[index])
    table = model.table(seconds)
    return Plan(
        policy=policy,
        feasible=feasible,
        routes=(model.route(cut),),
        predicted=table[index].cost if feasible else None,
        table=table,
        why=_why(model, index, seconds, rule)
        if feasible
        else f"cut {cut}, the nearest to fitting as no cut fits, does not fit: {model.why_not(cut)}.",
        unit="request",
    )


def _why(model: LatencyModel, index: int, seconds: Array, rule: str) -> str:
    cuts, cost = model.cuts, model.costs(seconds)[index]
    text = f"cut {cuts[index]}, {rule} among cuts {cuts[0]} to {cuts[-1]}. A request is predicted at "
    text += f"{seconds_text(cost.epoch_s)} s: {seconds_text(cost.compute_s)} s on the device, "
    text += f"{seconds_text(cost.network_s)} s on the link, {seconds_text(cost.storage_s)} s on the server"
    load = model.cluster.storage.load
    text += f" at load {load:g}." if load != 1 else "."
    ends = {0: SENT, len(cuts) - 1: LOCAL}
    others = [
        f"{name} {seconds_text(float(seconds[end]))} s"
        + ("" if model.feasible[end] else ", which does not fit")
        for end, name in ends.items()
        if end != index
    ]
    return f"{text} Beside it: {'; '.join(others)}."
