"""One algorithm per file, equal signatures; siblings never import each other.

A policy is a pure function of (profile, cluster, workload) and always answers a plan; when what it would
choose does not fit, the plan says so. `choose` is the border where that becomes an error. `loadpart` and
`inference` plan for one request of a device; `fastflow` and `pipeline` go by what was measured of an input
pipeline, and answer an `OffloadDecision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from upriver.errors import ConfigError, NoFeasibleCut
from upriver.policies import (
    exhaustive,
    fastflow,
    freeze,
    hapi,
    hapi_bandwidth,
    inference,
    loadpart,
    neurosurgeon,
    nosplit,
    pipeline,
    upriver,
)
from upriver.policies import min as min_
from upriver.policies._common import Policy
from upriver.policies._offload import OffloadDecision, OffloadPolicy, stalls
from upriver.types import Cluster, Plan, Profile, Workload

__all__ = [
    "OFFLOAD_POLICIES",
    "POLICIES",
    "REQUEST_POLICIES",
    "OffloadDecision",
    "OffloadPolicy",
    "Policy",
    "choose",
    "stalls",
]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "nosplit": nosplit.plan,
        "freeze": freeze.plan,
        "min": min_.plan,
        "neurosurgeon": neurosurgeon.plan,
        "hapi_bandwidth": hapi_bandwidth.plan,
        "hapi": hapi.plan,
        "exhaustive": exhaustive.plan,
        "upriver": upriver.plan,
    }
)
"""Those for an epoch of training by their names, the names of their modules."""

REQUEST_POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"loadpart": loadpart.plan, "inference": inference.plan}
)
"""Those for one request: the device is the compute tier, and any cut may be used."""

OFFLOAD_POLICIES: Mapping[str, OffloadPolicy] = MappingProxyType(
    {
        fastflow.POLICY: OffloadPolicy(decide=fastflow.decide),
        pipeline.POLICY: OffloadPolicy(decide=pipeline.decide, promise=pipeline.promise),
    }
)
"""Those for input pipelines by their names."""


def choose(policy: str, profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """The plan of the named policy.

    Raises:
        ConfigError: If there is no such policy, or the profile lacks what planning needs.
        NoFeasibleCut: If what the policy would choose does not fit; names the memory that is short and by how
            much.
    """
    every = {**POLICIES, **REQUEST_POLICIES}
    if policy not in every:
        raise ConfigError(f"policy must be one of {', '.join(every)}, got {policy!r}")
    plan = every[policy](profile, cluster, workload)
    if not plan.feasible:
        raise NoFeasibleCut(f"policy {policy}: {plan.why}")
    return plan
