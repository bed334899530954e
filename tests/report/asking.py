"""Compute every policy's plan for one question, and over some bandwidths."""

from __future__ import annotations

from collections.abc import Sequence

from upriver.policies import POLICIES
from upriver.report.sweep import SweepPoint, sweep_bandwidth
from upriver.types import Cluster, Plan, Profile, Workload

EPOCH = Workload(batch_size=1000, num_samples=10_000)


def plans(profile: Profile, cluster: Cluster, workload: Workload = EPOCH) -> dict[str, Plan]:
    return {name: policy(profile, cluster, workload) for name, policy in POLICIES.items()}


def points(
    profile: Profile, cluster: Cluster, rates: Sequence[float] = (1e6, 1e7, 1e9), workload: Workload = EPOCH
) -> tuple[SweepPoint, ...]:
    return sweep_bandwidth(POLICIES, rates, profile, cluster, workload)
