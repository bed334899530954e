"""Planning goes on while a job runs: the policy is asked again after each iteration, and sometimes heeded.

A plan is left only for one that is predicted to be shorter by more than a threshold, several iterations
running: measurements jitter, and a switch that does not last costs more than it brings. Before a server is
asked for a cut that it has not been asked for yet, it must pass the canary there; that happens beside the
training, and the switch waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from upriver.cost import CostModel
from upriver.errors import NotExact, UpriverError
from upriver.policies import POLICIES
from upriver.profile.live_profile import LiveProfile
from upriver.rpc.link_meter import CHANGED
from upriver.types import Cluster, Cost, Plan, Profile, Route, Tier, Timings, Workload, require_finite

log = logging.getLogger("upriver")

GAIN = 0.10
"""By how much shorter an epoch must be predicted for a plan to be left."""

PATIENCE = 3
"""Iterations running that must say so."""

DEAD_BAND = 0.2
"""A link that carries within so much of what the plan was made for counts as unchanged."""

PLANNING_SHARE = 0.02
"""Of a job's time goes into planning at most: steps of a few milliseconds are not all followed by it."""

STEADY = 6
"""The gain must be one at each of so many last bandwidths: jitter now and then passes any average. Where the
link is clearly another one than the plan was made for, the patience alone decides."""


PROOF_REST_S = 15.0
"""Servers that could not be asked for the canary at some cut are not asked again for so long."""

Prove = Callable[[Sequence[int]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A change of plan in a running job.

    Attributes:
        epoch: In which it happened, from 0.
        step: Before which training step of it.
        before: Epoch seconds predicted for the routes that were left.
        after: Those predicted for the routes that were taken.
    """

    epoch: int
    step: int
    routes: tuple[Route, ...]
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """When a plan is left: for a gain of more than ``gain``, ``iterations`` times running."""

    gain: float = GAIN
    iterations: int = PATIENCE

    def __post_init__(self) -> None:
        require_finite("replan_gain", self.gain)
        require_finite("replan_patience", self.iterations, at_least=1)


class Replanner:
    """Asks a policy again and again. Belongs to the thread that trains; proving runs beside it.

    Args:
        policy: Its name.
        plan: What runs now.
        live: What is known; fed through the methods below.
        prove: Lets the servers pass the canary at some cuts; raises where they do not.
        bandwidth: What the link has lately carried, if it has carried anything.
        capacity: What can be asked of servers now, over what could be when the job began.
    """

    def __init__(
        self,
        policy: str,
        plan: Plan,
        live: LiveProfile,
        workload: Workload,
        *,
        patience: Patience,
        prove: Prove,
        bandwidth: Callable[[], float | None],
        capacity: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.plan, self._capacity = plan, capacity
        self._policy, self._live, self._workload = policy, live, workload
        self._patience, self._prove, self._bandwidth = patience, _in_turn(prove), bandwidth
        self._better, self._again_at = 0, 0.0
        self._planned_for = live.now()[1].link.bandwidth_bytes_per_s
        self._proof: _Proof | None = None
        self._proof_again_at = 0.0
        self._known, self._refused = set(_cuts(plan)), set[int]()
        self._opening, self._opened = threading.Lock(), dict[int, tuple[bool, float]]()

    def saw(self, tier: Tier, timings: Timings, *, sent_bytes: float = 0.0) -> None:
        """One micro-batch, or what is left of one, has run on a tier."""
        self._live.saw(tier, timings, sent_bytes=sent_bytes)

    def waits(self, wait_s: float) -> None:
        """So long a micro-batch would wait at the servers, where this job has none now."""
        self._live.waits(wait_s)

    def answers(self) -> int:
        """Micro-batches that servers have made so far."""
        return self._live.answers

    def after_step(self, trained_s: float, samples: int) -> tuple[Plan, Cost, Cost] | None:
        """One training step has run: :meth:`consider`, unless that was done a moment ago."""
        self._live.trained(trained_s, samples)
        began = time.perf_counter()
        if began < self._again_at:
            return None
        found = self.consider()
        ended = time.perf_counter()
        self._again_at = ended + (ended - began) / PLANNING_SHARE
        return found

    def consider(self) -> tuple[Plan, Cost, Cost] | None:
        """After an iteration: the plan to go on with, where it is another one, and both costs."""
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
        enough = changed or self._better >= self._patience.iterations
        if not enough or not proved or fresh.predicted is None:
            return None
        self.plan, self._better = fresh, 0
        self._planned_for = cluster.link.bandwidth_bytes_per_s
        return fresh, now, fresh.predicted

    def _with_capacity(self, cluster: Cluster) -> Cluster:
        """The same cluster with the servers that are there; where none is, no plan is for what is not."""
        capacity, storage = self._capacity(), cluster.storage
        if capacity <= 0:
            return cluster
        at_once = max(1, round(storage.concurrency * capacity))
        return replace(cluster, storage=replace(storage, load=storage.load / capacity, concurrency=at_once))

    def _prepare(self, profile: Profile, cluster: Cluster, bandwidth: float) -> None:
        """Have servers asked for the canary that a plan for this link would need.

        It is early, but over a link that has become thin the canary waits behind all that is in flight.
        """
        link = replace(cluster.link, bandwidth_bytes_per_s=bandwidth)
        fresh, now = self._compared(profile, replace(cluster, link=link))
        if self._is_better(fresh, now):
            self._proved(_cuts(fresh))

    def opened(self, cut: int) -> bool:
        """Whether servers pass the canary at a cut, which takes a while; from any thread.

        What was found holds for `PROOF_REST_S`: all who fetch ask at once.
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
        """Wait for a canary that runs beside the training; those it asks have been told to break off."""
        if self._proof is not None:
            self._proof.join()

    def _is_better(self, fresh: Plan, now: Cost) -> bool:
        if fresh.predicted is None or _cuts(fresh) & self._refused:
            return False
        return now.epoch_s > (1 + self._patience.gain) * fresh.predicted.epoch_s

    def _lasting(self, profile: Profile, cluster: Cluster) -> tuple[bool, bool]:
        """Whether the plan would have been left at each of the last bandwidths.

        Of a link that is clearly another one than the plan was made for, as many count as the patience has
        iterations, once they agree; of one that may only jitter, more. While it is changing, nothing counts:
        the plan would be one for a link that is no more.
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
        return changed >= self._patience.iterations, steady >= STEADY

    def _unchanged(self, cluster: Cluster) -> Cluster:
        """The same cluster, with the link that the plan was made for if it is about as fast."""
        bandwidth = cluster.link.bandwidth_bytes_per_s
        if abs(bandwidth - self._planned_for) > DEAD_BAND * self._planned_for:
            return cluster
        return replace(cluster, link=replace(cluster.link, bandwidth_bytes_per_s=self._planned_for))

    def _compared(self, profile: Profile, cluster: Cluster) -> tuple[Plan, Cost]:
        """What the policy would do now, and what going on as before would cost."""
        fresh = POLICIES[self._policy](profile, cluster, self._workload)
        return fresh, CostModel(profile, cluster, self._workload).evaluate(self.plan.routes)

    def _proved(self, cuts: frozenset[int]) -> bool:
        """Whether servers have passed the canary at all of these cuts; if not, they are asked now."""
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
    """Canaries that run beside the training."""

    def __init__(self, cuts: frozenset[int], prove: Prove) -> None:
        self.cuts = cuts
        self.done = self.passed = self.refused = False
        self._thread = threading.Thread(target=self._run, args=(prove,), name="upriver-replan", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it is done."""
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
    """Whether a link that carries so much is clearly another one than it was."""
    return max(bandwidth / before, before / bandwidth) > CHANGED


def _cuts(plan: Plan) -> frozenset[int]:
    return frozenset(route.cut for route in plan.routes)


def _in_turn(prove: Prove) -> Prove:
    """One canary after the other: a cut that does not pass must not close one that passes meanwhile."""
    lock = threading.Lock()

    def proved(cuts: Sequence[int]) -> None:
        with lock:
            prove(cuts)

    return proved
