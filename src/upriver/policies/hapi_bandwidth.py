"""hapi_bandwidth: the earliest split whose output crosses the network within a second.

The first version of HAPI: Petrescu, Guirguis, Quoc, Picorel, Guerraoui, Dinu, "Accelerating Transfer Learning
with Near-Data Computation on Cloud Object Stores", arXiv:2210.08650v1 (2022), section 4.4, Algorithm 1. It
considers sizes and bandwidth alone, never computation.

Symbols
    intermediate_sizes[l]        ``profile.cut_bytes(l)``, bytes per sample
    candidate layers             layers up to the freeze index with an output smaller than the application's
                                 input (lines 9-10): here the stored sample, which not splitting ships
    C                            ``WINNER_SECONDS`` x bandwidth: largest size of one training batch
    winner                       the earliest candidate whose output x training batch is below C (lines
                                 11-18), the freeze index where there is none (line 13)

Departures
    - The paper leaves memory to the server's batch adaptation. Here the rule applies to the cuts that fit;
      the latest fitting cut replaces a freeze index that does not fit.
    - Where nothing is frozen the paper has no split; this policy does not split.
"""

from __future__ import annotations

from upriver.cost import CostModel
from upriver.policies._common import among, plan_at, rescue, splits
from upriver.types import Cluster, Plan, Profile, Workload

WINNER_SECONDS = 1.0
"""C over the bandwidth: "we found that a good value for C is network bandwidth times 1s" (section 4.4)."""


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the earliest candidate that crosses the link in a second, or the freeze point."""
    model = CostModel(profile, cluster, workload)
    fitting = [layer for layer in splits(profile) if model.fits(layer)]
    if not fitting:
        return rescue("hapi_bandwidth", model)
    small = "is smaller than what is stored and crosses within a second a batch"
    most = cluster.link.bandwidth_bytes_per_s * WINNER_SECONDS / workload.batch_size
    candidates = [layer for layer in fitting if profile.cut_bytes(layer) < profile.input.stored_bytes]
    for layer in candidates:
        if profile.cut_bytes(layer) < most:
            return plan_at("hapi_bandwidth", layer, model, rule=f"the earliest {among(profile)} that {small}")
    last = "the freeze point" if fitting[-1] == profile.freeze else "the last that fits the memory"
    return plan_at("hapi_bandwidth", fitting[-1], model, rule=f"{last}, as no earlier one {small}")
