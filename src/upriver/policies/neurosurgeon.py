"""neurosurgeon: the split with the least latency of one request.

Kang, Hauswald, Gao, Rovinski, Mudge, Mars, Tang: "Neurosurgeon: Collaborative Intelligence Between the Cloud
and Mobile Edge", ASPLOS 2017, as HAPI equips and measures it ("NSG": Petrescu et al., ACM SoCC 2024, revised
2025 as arXiv:2210.08650v3, section 5.1): the split index that minimises the sum of server, network and client
time, from the same estimates that HAPI has.

Symbols
    split index                  ``cut``, in 1..``profile.freeze``
    server, network, client      ``storage_s``, ``network_s``, ``compute_s`` of the two-resource estimate

Departures
    - Fine-tuning: split 0 is not searched, as in HAPI's comparison. It is chosen only where nothing is frozen
      or no split fits the memory.
    - A sum ignores overlap. The comparison is about this, so it stays.
    - The text names no rule for ties; the earliest of equals wins.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import among, best_that_fits, splits
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the cut with the least sum of server, network and client time."""
    model = CostModel(profile, cluster, workload)
    epochs = model.two_resource
    summed = epochs.storage_s + epochs.network_s + epochs.compute_s
    return best_that_fits(
        "neurosurgeon",
        splits(profile),
        model,
        summed,
        rule=f"the least sum of storage, network and compute {among(profile)}",
    )
