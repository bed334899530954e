"""hapi: the split that minimises the epoch when consecutive iterations overlap.

HAPI's splitting algorithm: Petrescu, Guirguis, Quoc, Picorel, Guerraoui, Dinu, "Accelerating Transfer
Learning with Near-Data Computation on Cloud Object Stores", ACM SoCC 2024, revised 2025 as
arXiv:2210.08650v3, section 4.3, Algorithm 1, with the phases of Table 1.

Symbols
    split index                  ``cut``; the paper's split 0 (no split) is ``profile.unsplit``
    freeze index                 ``profile.freeze``
    earliest split without OOM   the first cut that fits the memory
    server, client, network      ``CostModel.two_resource``: seconds of one iteration on each
    epoch runtime                iterations x max(client, server + network)

The client cannot begin before its data arrives. So server and network are one side of the overlap and the
client is the other.

Departures
    - Lines 1-8 spend an epoch on measurements at the freeze index and at the earliest split that fits. Here
      the profile has every stage measured on both tiers, so lines 9-19 decide at once.
    - The paper leaves the server's memory to its batch adaptation. Here a job's micro-batch is fixed, so a
      cut that does not fit the storage tier is left out like one that does not fit the client.
    - Where no cut fits, the paper notifies the client after the freeze index failed. Here the plan is
      infeasible and names the cut that lacks the least memory.
    - The text names no rule for ties; the earliest of equals wins, which pushes the least work down.
    - Split 0 has "a simpler procedure" in the paper. Here the same formula applies, with only the read on the
      server.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import NOTHING_FROZEN, among, best_that_fits, splits_or_none
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the cut with the shortest epoch by the paper's own two-sided estimate."""
    model = CostModel(profile, cluster, workload)
    epoch_s = model.two_resource.epoch_s
    rule = f"the least max(compute, storage + network) an iteration {among(profile)} and not splitting"
    if profile.freeze == 0:
        rule = f"as {NOTHING_FROZEN}"
    return best_that_fits("hapi", splits_or_none(profile), model, epoch_s, rule=rule)
