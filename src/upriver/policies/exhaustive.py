"""exhaustive: try every single cut under our cost model, as the oracle for other policies.

No paper: the cost model predicts an epoch at each cut of the chain, including cuts among the input stages.
The shortest epoch that fits the memory of both tiers wins; the earliest cut wins ties.

Symbols: the epoch is ``Epochs.epoch_s``, by the pipeline that ``cluster.stream`` names.
Departures: none.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import best_that_fits
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the cut with the shortest predicted epoch."""
    model = CostModel(profile, cluster, workload)
    epoch_s = model.epochs.epoch_s
    return best_that_fits(
        "exhaustive",
        model.cuts,
        model,
        epoch_s,
        rule="the shortest epoch of any single cut",
    )
