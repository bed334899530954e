"""Decide when a running job leaves its plan: for a clearly shorter epoch, in several iterations in a row.

Measurements jitter, and a switch that does not last costs more than it gains. A server must pass the canary
at a cut before a job asks it there for the first time. The caller runs canaries, and a switch waits for them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from upriver.cost import CostModel
from upriver.errors import NotExact, UpriverError
from upriver.link import CHANGED
from upriver.policies import POLICIES
from upriver.profile.live_profile import LiveProfile
from upriver.types import Cluster, Cost, Plan, Profile, Workload

DEAD_BAND = 0.2
"""Relative change of bandwidth, from the one the plan was made for, that still counts as unchanged."""

STEADY = 6
"""Recent bandwidths that must each show the gain, since occasional jitter passes any average. If the link
clearly differs from the one the plan was made for, the patience alone decides."""

PROOF_REST_S = 15.0
"""Seconds before servers that could not run the canary at some cut are asked again."""


class NextPlan(NamedTuple):
    """Result of one iteration.

    Attributes:
        switch: The plan to switch to and both costs (old, new); None to keep the plan.
        prove: Cuts at which the caller should run canaries now; it reports their end to `proof_ended`.
    """

    switch: tuple[Plan, Cost, Cost] | None
    prove: frozenset[int]


class PlanSwitcher:
    """Ask a policy again during a job.

    Args:
        live: The current profile and cluster, kept up to date by the caller.
        gain: A plan is left if its predicted epoch takes more than ``1 + gain`` times as long as the new
            plan's.
        patience: Consecutive iterations that must show the gain.

    Attributes:
        plan: The running plan.
        refused: Cuts at which servers do not pass the canary.
    """

    def __init__(
        self, policy: str, plan: Plan, live: LiveProfile, workload: Workload, *, gain: float, patience: int
    ) -> None:
        self.plan, self.workload, self.refused = plan, workload, frozenset[int]()
        self._policy, self._live, self._gain, self._patience = policy, live, gain, patience
        self._better = 0
        self._planned_for = live.now()[1].link.bandwidth_bytes_per_s
        self._passed = _cuts(plan)
        self._proving = frozenset[int]()
        self._prove_again_at = -math.inf

    def consider(self, bandwidth: float | None, *, capacity: float = 1.0, now: float) -> NextPlan:
        """Decide for one iteration.

        Args:
            bandwidth: The link's recent bandwidth; None if nothing crossed it.
            capacity: The servers' present capacity over that at the start of the job.
            now: Seconds of a monotonic clock.
        """
        before = self._proving
        switch = self._switch(bandwidth, capacity, now)
        return NextPlan(switch, self._proving - before)

    def proof_ended(self, error: UpriverError | None, now: float) -> None:
        """Record the end of the canaries: servers pass, are not exact, or could not run them now."""
        if error is None:
            self._passed |= self._proving
        elif isinstance(error, NotExact):
            self.refused |= self._proving
        else:
            self._prove_again_at = now + PROOF_REST_S
        self._proving = frozenset()

    def _switch(self, bandwidth: float | None, capacity: float, now: float) -> tuple[Plan, Cost, Cost] | None:
        if bandwidth is not None:
            self._live.carried(bandwidth)
        profile, cluster = self._live.now()
        cluster = _with_capacity(cluster, capacity)
        if bandwidth is not None and _another(bandwidth, self._planned_for):
            self._prepare(profile, cluster, bandwidth, now)
        cluster = self._unchanged(cluster)
        fresh, cost = self._compared(profile, cluster)
        changed, steady = self._lasting(profile, cluster) if self._is_better(fresh, cost) else (False, False)
        if not changed and not steady:
            self._better = 0
            return None
        self._better += 1
        proved = self._proved(_cuts(fresh), now)
        enough = changed or self._better >= self._patience
        if not enough or not proved or fresh.predicted is None:
            return None
        self.plan, self._better = fresh, 0
        self._planned_for = cluster.link.bandwidth_bytes_per_s
        return fresh, cost, fresh.predicted

    def _prepare(self, profile: Profile, cluster: Cluster, bandwidth: float, now: float) -> None:
        """Ask for the canaries that a plan for this link would need.

        They start early: over a link that has become slow, the canary waits behind everything in flight.
        """
        link = replace(cluster.link, bandwidth_bytes_per_s=bandwidth)
        fresh, cost = self._compared(profile, replace(cluster, link=link))
        if self._is_better(fresh, cost):
            self._proved(_cuts(fresh), now)

    def _is_better(self, fresh: Plan, now: Cost) -> bool:
        if fresh.predicted is None or _cuts(fresh) & self.refused:
            return False
        return now.epoch_s > (1 + self._gain) * fresh.predicted.epoch_s

    def _lasting(self, profile: Profile, cluster: Cluster) -> tuple[bool, bool]:
        """Return (changed, steady): whether the gain held at enough of the last bandwidths.

        ``changed`` is for a link that clearly differs from the one the plan was made for: as many agreeing
        bandwidths must show the gain as the patience has iterations. ``steady`` is for a link that may only
        jitter, and needs more of them. While the link is still changing neither holds: a plan for it would be
        out of date.
        """
        recent = self._live.recent_bandwidths(STEADY)
        if not recent or _another(recent[-1], cluster.link.bandwidth_bytes_per_s):
            return False, False
        changed = steady = 0
        for bandwidth in reversed(recent):
            link = replace(cluster.link, bandwidth_bytes_per_s=bandwidth)
            seen = self._unchanged(replace(cluster, link=link))
            if not self._is_better(*self._compared(profile, seen)):
                break
            another = _another(bandwidth, self._planned_for)
            settled = abs(bandwidth - recent[-1]) <= DEAD_BAND * recent[-1]
            changed += another and settled and changed == steady
            steady += 1
        return changed >= self._patience, steady >= STEADY

    def _unchanged(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the bandwidth of the present plan, if its own is close to that."""
        bandwidth = cluster.link.bandwidth_bytes_per_s
        if abs(bandwidth - self._planned_for) > DEAD_BAND * self._planned_for:
            return cluster
        return replace(cluster, link=replace(cluster.link, bandwidth_bytes_per_s=self._planned_for))

    def _compared(self, profile: Profile, cluster: Cluster) -> tuple[Plan, Cost]:
        """Return the policy's plan now, and the cost of keeping the present routes."""
        fresh = POLICIES[self._policy](profile, cluster, self.workload)
        return fresh, CostModel(profile, cluster, self.workload).evaluate(self.plan.routes)

    def _proved(self, cuts: frozenset[int], now: float) -> bool:
        """Return whether servers have passed the canary at all of these cuts; if not, ask for it."""
        missing = cuts - self._passed
        if not self._proving and now >= self._prove_again_at and not missing & self.refused:
            self._proving = missing
        return not missing


def _with_capacity(cluster: Cluster, capacity: float) -> Cluster:
    """Scale the cluster's storage tier to the present servers; leave it unchanged if there are none."""
    if capacity <= 0:
        return cluster
    storage = cluster.storage
    at_once = max(1, round(storage.concurrency * capacity))
    return replace(cluster, storage=replace(storage, load=storage.load / capacity, concurrency=at_once))


def _another(bandwidth: float, before: float) -> bool:
    """Return whether the bandwidth clearly differs from the earlier one."""
    return max(bandwidth / before, before / bandwidth) > CHANGED


def _cuts(plan: Plan) -> frozenset[int]:
    return frozenset(route.cut for route in plan.routes)
