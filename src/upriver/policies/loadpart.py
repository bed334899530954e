"""loadpart: the layer after which a device stops and a server continues, from bandwidth and server load.

Liu, Zheng, Li, Guo: "LoADPart: Load-Aware Dynamic Partition of Deep Neural Networks for Edge Offloading",
ICDCS 2022, section III-D, problem (1) and Algorithm 1, as tailored in section IV.

Symbols
    L_0 .. L_n, p                the cuts: ``p`` stages run on the device; 0 sends the input, n sends nothing
    f(L_i), prefix               ``LatencySums.device_s``
    M_edge(L_i), suffix          ``LatencySums.server_s``, with k = 1
    k                            ``load``
    s_i                          ``LatencySums.sent_bytes``; s_n is the answer
    B_u, B_d                     ``upload``, ``download``; None is the paper's own system: the answer is free
    line 17 (<=)                 the last of equals wins

Departures
    - Several tensors may cross a cut, which then costs the bytes of all of them. The paper also searches
      along the topological order, and finds that such cuts inside a block hardly win.
    - k is used as given. Its source ensures that it is at least 1 (1c).
    - A cut that does not fit the memory of the device or the server is not chosen.
"""

from __future__ import annotations

from upriver.latency import LatencyModel, LatencySums, last_of_least
from upriver.policies._request import least
from upriver.types import Cluster, Plan, Profile, Workload


def decide(sums: LatencySums, *, upload: float, download: float | None = None, load: float = 1.0) -> int:
    """Return the number of stages that the device runs, by Algorithm 1 in O(n).

    Args:
        upload: Upload in bytes per second, above 0.
        download: Download in bytes per second, or None.
        load: The influential factor k of the server's load.
    """
    return last_of_least(sums.paper_s(upload=upload, download=download, load=load))


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the cut with the least seconds of one request; the workload plays no part."""
    model = LatencyModel(profile, cluster)
    return least("loadpart", model, model.paper_s, rule="the least sum of device, upload and server time")
