"""inference: after which stage a device stops and a server goes on; ours.

As LoADPart (ICDCS 2022, problem (1)), with all that a request takes: the round trip, the wait for other
requests that the server reports, packing and unpacking on both sides, and the answer's way back, which the
paper leaves out since its networks give a thousand numbers. Of equals the last: work stays on the device.
"""

from __future__ import annotations

from upriver.latency import LatencyModel
from upriver.policies._request import least
from upriver.types import Cluster, Plan, Profile, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """The cut with the least seconds of one request; the workload plays no part."""
    model = LatencyModel(profile, cluster)
    return least("inference", model, model.request_s, rule="the least time of one request")
