"""min: the cut that the fewest bytes cross.

The baseline "@Min" of HAPI (Petrescu, Guirguis, Quoc, Picorel, Guerraoui, Dinu: "Accelerating Transfer
Learning with Near-Data Computation on Cloud Object Stores", ACM SoCC 2024, revised 2025 as
arXiv:2210.08650v3, section 5.1): the layer with the smallest output up to and including the freezing layer,
the earliest of equals. It considers bytes alone.

Symbols: the output size of layer l is ``profile.cut_bytes(l)``; layers are 1..``profile.freeze``, never the
input.
Departures: where nothing is frozen the paper has no such split; this policy does not split.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import NOTHING_FROZEN, among, plan_at, splits
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Cut after the earliest frozen stage with the smallest output."""
    model = CostModel(profile, cluster, workload)
    if profile.freeze == 0:
        return plan_at("min", profile.unsplit, model, rule=f"as {NOTHING_FROZEN}")
    cut = min(splits(profile), key=profile.cut_bytes)
    return plan_at("min", cut, model, rule=f"the earliest of the smallest outputs {among(profile)}")
