"""nosplit: push nothing down; the compute tier reads stored samples and runs the whole chain.

The baseline "NoSplit" of HAPI (Petrescu, Guirguis, Quoc, Picorel, Guerraoui, Dinu: "Accelerating Transfer
Learning with Near-Data Computation on Cloud Object Stores", ACM SoCC 2024, revised 2025 as
arXiv:2210.08650v3, section 5.1). It is the plain way that every other plan is compared with.

Symbols: cut 0 of the paper is ``profile.unsplit`` here, since the chain continues below 0 through the input
stages.
Departures: none.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import plan_at
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Run everything on the compute tier."""
    return plan_at(
        "nosplit", profile.unsplit, CostModel(profile, cluster, workload), rule="which pushes nothing down"
    )
