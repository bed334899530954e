"""inference: the stage after which a device stops and a server continues; ours.

Like LoADPart (ICDCS 2022, problem (1)), with all other times of a request: the round trip, the wait in the
server's queue that the server reports, packing and unpacking on both sides, and the answer's way back. The
paper leaves the answer out since its networks return a thousand numbers. The last cut wins ties: work stays
on the device.
"""

from __future__ import annotations

from upriver.latency import LatencyModel
from upriver.policies._request import least
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the cut with the least seconds of one request; the workload plays no part."""
    model = LatencyModel(profile, cluster)
    return least("inference", model, model.request_s, rule="the least time of one request")
