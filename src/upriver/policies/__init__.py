"""Hold one algorithm per file, with equal signatures; siblings never import each other.

A policy is a pure function of (profile, cluster, workload) and always returns a plan. If its choice does not
fit, the plan says so; `choose` turns that into an error. `loadpart` and `inference` plan one request of a
device. `fastflow` and `pipeline` decide from measurements of an input pipeline, and return an
`OffloadDecision`.
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
"""Policies for an epoch of training, by the names of their modules."""

REQUEST_POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"loadpart": loadpart.plan, "inference": inference.plan}
)
"""Policies for one request: the device is the compute tier, and any cut may be used."""

OFFLOAD_POLICIES: Mapping[str, OffloadPolicy] = MappingProxyType(
    {
        fastflow.POLICY: OffloadPolicy(decide=fastflow.decide),
        pipeline.POLICY: OffloadPolicy(decide=pipeline.decide, promise=pipeline.promise),
    }
)
"""Policies for input pipelines, by name."""


def choose(policy: str, profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Return the plan of the named policy.

    Raises:
        ConfigError: If there is no such policy, or the profile lacks data for planning.
        NoFeasibleCut: If the policy's choice does not fit; the message names the short memory and the missing
            bytes.
    """
    every = {**POLICIES, **REQUEST_POLICIES}
    if policy not in every:
        raise ConfigError(f"policy must be one of {', '.join(every)}, got {policy!r}")
    plan = every[policy](profile, cluster, workload)
    if not plan.feasible:
        raise NoFeasibleCut(f"policy {policy}: {plan.why}")
    return plan
