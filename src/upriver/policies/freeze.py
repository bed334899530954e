"""freeze: push down everything that does not train.

The baseline "@Freeze" of HAPI (Petrescu, Guirguis, Quoc, Picorel, Guerraoui, Dinu: "Accelerating Transfer
Learning with Near-Data Computation on Cloud Object Stores", ACM SoCC 2024, revised 2025 as
arXiv:2210.08650v3, sections 3 and 5.1). It always splits at the freezing layer, which leaves the least work
to the client.

Symbols: the freeze index is ``profile.freeze``.
Departures: where nothing is frozen the paper has no such split; this policy does not split.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import NOTHING_FROZEN, plan_at
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Cut at the freeze point."""
    model = CostModel(profile, cluster, workload)
    if profile.freeze == 0:
        return plan_at("freeze", profile.unsplit, model, rule=f"as {NOTHING_FROZEN}")
    return plan_at("freeze", profile.freeze, model, rule="the freeze point")
