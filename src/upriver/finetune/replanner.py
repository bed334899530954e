"""Ask the policy again while a job runs, and switch plans when the gain lasts.

The job leaves a plan only for one with a clearly shorter predicted epoch, for several consecutive iterations.
Measurements jitter, and a switch that does not last costs more than it gains. A server must pass the canary
at a cut before a job asks it there for the first time. The canary runs in a background thread during
training, and the switch waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from upriver._threads.background import BackgroundThread
from upriver.cost import CostModel
from upriver.errors import NotExact, UpriverError
from upriver.link import CHANGED
from upriver.policies import POLICIES
from upriver.profile.live_profile import LiveProfile
from upriver.types import (
    Cluster,
    Cost,
    Plan,
    Profile,
    Route,
    Tier,
    Timings,
    Workload,
    require_finite,
    require_type,
)

log = logging.getLogger("upriver")

DEAD_BAND = 0.2
"""Relative change of bandwidth, from the one the plan was made for, that still counts as unchanged."""

PLANNING_SHARE = 0.02
"""Largest share of a job's time spent on planning; steps of a few milliseconds are not all followed by it."""

STEADY = 6
"""Recent bandwidths that must each show the gain, since occasional jitter passes any average. If the link
clearly differs from the one the plan was made for, the patience alone decides."""


PROOF_REST_S = 15.0
"""Seconds before servers that could not run the canary at some cut are asked again."""

Prove = Callable[[Sequence[int]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A change of plan in a running job.

    Attributes:
        epoch: Epoch in which it happened, from 0.
        step: Training step of the epoch before which it happened.
        before: Predicted epoch seconds of the old routes.
        after: Predicted epoch seconds of the new routes.
    """

    epoch: int
    step: int
    routes: tuple[Route, ...]
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanning:
    """Rule by which a running job asks its policy again and changes its plan. No bit depends on it.

    Attributes:
        enabled: Whether to ask again after each iteration, with what the answers and the link showed.
        gain: A plan is left if its predicted epoch takes more than ``1 + gain`` times as long as the new
            plan's (0.1: a new epoch more than 1/11 shorter).
        patience: Number of consecutive iterations that must show the gain.

    Raises:
        ConfigError: If a field is outside its allowed range; names it.
    """

    enabled: bool = True
    gain: float = 0.10
    patience: int = 3

    def __post_init__(self) -> None:
        require_type("enabled", self.enabled, bool, "True or False")
        require_finite("gain", self.gain)
        require_type("patience", self.patience, int, "a number of iterations")
        require_finite("patience", self.patience, at_least=1)


class Replanner:
    """Ask a policy again during a job. The training thread owns it; canaries run in a background thread.

    Args:
        policy: Name of the policy.
        plan: The running plan.
        live: The current profile and cluster, updated through the methods below.
        prove: Runs the canary on the servers at some cuts; raises if they do not pass.
        bandwidth: Returns the link's recent bandwidth; None if nothing crossed it.
        capacity: Returns the servers' present capacity over that at the start of the job.
    """

    def __init__(
        self,
        policy: str,
        plan: Plan,
        live: LiveProfile,
        workload: Workload,
        *,
        replanning: Replanning,
        prove: Prove,
        bandwidth: Callable[[], float | None],
        capacity: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.plan, self._capacity = plan, capacity
        self._policy, self._live, self._workload = policy, live, workload
        self._rule, self._prove, self._bandwidth = replanning, _in_turn(prove), bandwidth
        self._better, self._again_at = 0, 0.0
        self._planned_for = live.now()[1].link.bandwidth_bytes_per_s
        self._proof: _Proof | None = None
        self._proof_again_at = 0.0
        self._known, self._refused = set(_cuts(plan)), set[int]()
        self._opening, self._opened = threading.Lock(), dict[int, tuple[bool, float]]()

    def saw(self, tier: Tier, timings: Timings, *, sent_bytes: float = 0.0) -> None:
        """Record that one micro-batch, or the rest of one, has run on a tier."""
        self._live.saw(tier, timings, sent_bytes=sent_bytes)

    def waits(self, wait_s: float) -> None:
        """Record how long a micro-batch would wait at the servers, while this job has none there."""
        self._live.waits(wait_s)

    def answers(self) -> int:
        """Return the number of micro-batches that servers have made so far."""
        return self._live.answers

    def after_step(self, trained_s: float, samples: int) -> tuple[Plan, Cost, Cost] | None:
        """Record one training step, then call :meth:`consider` unless that happened a moment ago."""
        self._live.trained(trained_s, samples)
        began = time.perf_counter()
        if began < self._again_at:
            return None
        found = self.consider()
        ended = time.perf_counter()
        self._again_at = ended + (ended - began) / PLANNING_SHARE
        return found

    def consider(self) -> tuple[Plan, Cost, Cost] | None:
        """Return the plan to switch to and both costs (old, new), or None to keep the plan."""
        bandwidth = self._bandwidth()
        if bandwidth is not None:
            self._live.carried(bandwidth)
        profile, cluster = self._live.now()
        cluster = self._with_capacity(cluster)
        if bandwidth is not None and _another(bandwidth, self._planned_for):
            self._prepare(profile, cluster, bandwidth)
        cluster = self._unchanged(cluster)
        fresh, now = self._compared(profile, cluster)
        changed, steady = self._lasting(profile, cluster) if self._is_better(fresh, now) else (False, False)
        if not changed and not steady:
            self._better = 0
            return None
        self._better += 1
        proved = self._proved(_cuts(fresh))
        enough = changed or self._better >= self._rule.patience
        if not enough or not proved or fresh.predicted is None:
            return None
        self.plan, self._better = fresh, 0
        self._planned_for = cluster.link.bandwidth_bytes_per_s
        return fresh, now, fresh.predicted

    def _with_capacity(self, cluster: Cluster) -> Cluster:
        """Scale the cluster's storage tier to the present servers; leave it unchanged if there are none."""
        capacity, storage = self._capacity(), cluster.storage
        if capacity <= 0:
            return cluster
        at_once = max(1, round(storage.concurrency * capacity))
        return replace(cluster, storage=replace(storage, load=storage.load / capacity, concurrency=at_once))

    def _prepare(self, profile: Profile, cluster: Cluster, bandwidth: float) -> None:
        """Start the canaries that a plan for this link would need.

        It starts early: over a link that has become slow, the canary waits behind everything in flight.
        """
        link = replace(cluster.link, bandwidth_bytes_per_s=bandwidth)
        fresh, now = self._compared(profile, replace(cluster, link=link))
        if self._is_better(fresh, now):
            self._proved(_cuts(fresh))

    def opened(self, cut: int) -> bool:
        """Return whether servers pass the canary at a cut, which takes a while; callable from any thread.

        The result holds for `PROOF_REST_S`, since all fetching threads ask at once.
        """
        with self._opening:
            passed, until = self._opened.get(cut, (False, 0.0))
            if time.monotonic() < until:
                return passed
            passed = cut not in self._refused and self._passes(cut)
            self._opened[cut] = passed, time.monotonic() + PROOF_REST_S
            return passed

    def _passes(self, cut: int) -> bool:
        try:
            self._prove([cut])
        except UpriverError as error:
            log.info("servers cannot be asked at cut %d: %s", cut, error)
            return False
        return True

    def close(self) -> None:
        """Wait for a running canary; its servers' pool has already been closed, which interrupts it."""
        if self._proof is not None:
            self._proof.join()

    def _is_better(self, fresh: Plan, now: Cost) -> bool:
        if fresh.predicted is None or _cuts(fresh) & self._refused:
            return False
        return now.epoch_s > (1 + self._rule.gain) * fresh.predicted.epoch_s

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
        return changed >= self._rule.patience, steady >= STEADY

    def _unchanged(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the bandwidth of the present plan, if its own is close to that."""
        bandwidth = cluster.link.bandwidth_bytes_per_s
        if abs(bandwidth - self._planned_for) > DEAD_BAND * self._planned_for:
            return cluster
        return replace(cluster, link=replace(cluster.link, bandwidth_bytes_per_s=self._planned_for))

    def _compared(self, profile: Profile, cluster: Cluster) -> tuple[Plan, Cost]:
        """Return the policy's plan now, and the cost of keeping the present routes."""
        fresh = POLICIES[self._policy](profile, cluster, self._workload)
        return fresh, CostModel(profile, cluster, self._workload).evaluate(self.plan.routes)

    def _proved(self, cuts: frozenset[int]) -> bool:
        """Return whether servers have passed the canary at all of these cuts; if not, start it."""
        if self._proof is not None and self._proof.done:
            if self._proof.passed:
                self._known |= self._proof.cuts
            elif self._proof.refused:
                self._refused |= self._proof.cuts
            else:
                self._proof_again_at = time.monotonic() + PROOF_REST_S
            self._proof = None
        missing = cuts - self._known
        rested = time.monotonic() >= self._proof_again_at
        if missing and self._proof is None and rested and not missing & self._refused:
            self._proof = _Proof(missing, self._prove)
        return not missing


class _Proof:
    """Canaries that run in a background thread."""

    def __init__(self, cuts: frozenset[int], prove: Prove) -> None:
        self.cuts = cuts
        self.done = self.passed = self.refused = False
        self._thread = BackgroundThread(self._run, prove, name="replan")
        self._thread.start()

    def join(self) -> None:
        """Wait for the canaries to end."""
        self._thread.join()

    def _run(self, prove: Prove) -> None:
        try:
            prove(sorted(self.cuts))
            self.passed = True
        except NotExact as error:
            self.refused = True
            log.warning("cuts %s are not used, as servers do not pass there: %s", sorted(self.cuts), error)
        except UpriverError as error:
            log.info("cuts %s are not used for now: %s", sorted(self.cuts), error)
        finally:
            self.done = True


def _another(bandwidth: float, before: float) -> bool:
    """Return whether the bandwidth clearly differs from the earlier one."""
    return max(bandwidth / before, before / bandwidth) > CHANGED


def _cuts(plan: Plan) -> frozenset[int]:
    return frozenset(route.cut for route in plan.routes)


def _in_turn(prove: Prove) -> Prove:
    """Run canaries one at a time: a cut that fails must not close one that passes meanwhile."""
    lock = threading.Lock()

    def proved(cuts: Sequence[int]) -> None:
        with lock:
            prove(cuts)

    return proved
