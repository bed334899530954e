"""loadpart: after which layer a device stops and a server goes on, from bandwidth and the server's load.

Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading",
ICDCS 2022, section III-D, problem (1) and Algorithm 1, as tailored in section IV.

Symbols
    L_0 .. L_n, p                the cuts: ``p`` stages run on the device; 0 sends the input, n sends nothing
    f(L_i), prefix               ``Sums.device_s``
    M_edge(L_i), suffix          ``Sums.server_s``, with k = 1
    k                            ``load``
    s_i                          ``Sums.sent_bytes``; s_n is the answer
    B_u, B_d                     ``upload``, ``download``; None is the paper's own system: the answer is free
    line 17 (<=)                 of equals the last is taken

Departures
    - A cut may be crossed by several tensors and then costs the bytes of all of them. The paper looks for the
      cut along the topological order too, and finds that cuts inside a block, where that is so, hardly win.
    - k counts as it is given. That it is at least 1 (1c) is the business of who measures it.
    - A cut that does not fit the memory of the device or the server is not taken.
"""

from __future__ import annotations

from upriver.latency import LatencyModel, Sums, last_of_least
from upriver.policies._request import least
from upriver.types import Cluster, Plan, Profile, Workload


def decide(sums: Sums, *, upload: float, download: float | None = None, load: float = 1.0) -> int:
    """Algorithm 1: how many stages the device runs, in O(n).

    Args:
        sums: Of the model and the two machines, made once.
        upload: Bytes per second, above 0.
        download: The same, or None.
        load: The influential factor k of the server's load.
    """
    return last_of_least(sums.paper_s(upload=upload, download=download, load=load))


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """The cut with the least seconds of one request; the workload plays no part."""
    model = LatencyModel(profile, cluster)
    return least("loadpart", model, model.paper_s, rule="the least sum of device, upload and server time")
