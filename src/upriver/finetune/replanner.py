"""Ask for another plan after training steps; run the canaries that it needs in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from upriver._threads.background import BackgroundThread
from upriver.control.plan_switching import PROOF_REST_S, PlanSwitcher
from upriver.errors import NotExact, UpriverError
from upriver.profile.live_profile import LiveProfile
from upriver.program.graph.devices import moment, seconds_between
from upriver.types import Cost, Plan, Route, Tier, Timings, require_finite, require_type

log = logging.getLogger("upriver")

PLANNING_SHARE = 0.02
"""Largest share of a job's time spent on planning; steps of a few milliseconds are not all followed by it."""


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
        live: The switcher's profile and cluster, updated through the methods below.
        prove: Runs the canary on the servers at some cuts; raises if they do not pass.
        bandwidth: Returns the link's recent bandwidth; None if nothing crossed it.
        capacity: Returns the servers' present capacity over that at the start of the job.
    """

    def __init__(
        self,
        switcher: PlanSwitcher,
        live: LiveProfile,
        *,
        prove: Prove,
        bandwidth: Callable[[], float | None],
        capacity: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.switcher, self._live = switcher, live
        self._prove, self._bandwidth, self._capacity = _in_turn(prove), bandwidth, capacity
        self._again_at = 0.0
        self._proof: _Proof | None = None
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
        now = time.monotonic()
        if self._proof is not None and self._proof.done:
            self.switcher.proof_ended(self._proof.error, now)
            self._proof = None
        found = self.switcher.consider(self._bandwidth(), capacity=self._capacity(), now=now)
        if found.prove:
            self._begin_proof(found.prove)
        return found.switch

    def _begin_proof(self, cuts: frozenset[int]) -> None:
        try:
            self._proof = _Proof(sorted(cuts), self._prove)
        except UpriverError as error:  # no thread can be started
            self.switcher.proof_ended(error, time.monotonic())

    def opened(self, cut: int) -> bool:
        """Return whether servers pass the canary at a cut, which takes a while; callable from any thread.

        The result holds for `PROOF_REST_S`, since all fetching threads ask at once.
        """
        with self._opening:
            passed, until = self._opened.get(cut, (False, 0.0))
            if time.monotonic() < until:
                return passed
            passed = cut not in self.switcher.refused and self._passes(cut)
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


class StepClock:
    """Measure training steps by the clock of the device that trains, without waiting for a running step.

    An accelerator may still compute a step when the loop asks for the next one. So its steps are known one
    step late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = None
        self._running: tuple[Any, Any, int] | None = None

    def begin(self) -> None:
        """Record that a step begins."""
        self._began = moment(self._device)

    def end(self, samples: int) -> tuple[float, int] | None:
        """Record the end of a step; return the seconds and the samples of the last known one, if any."""
        known, step = self._running, (self._began, moment(self._device), samples)
        if self._device.type != "cuda":
            known = step
        self._running = step
        return None if known is None else (seconds_between(known[0], known[1]), known[2])


_BROKEN: UpriverError | None = UpriverError("the canary broke off")


class _Proof:
    """Canaries that run in a background thread."""

    def __init__(self, cuts: Sequence[int], prove: Prove) -> None:
        self.done, self.error = False, _BROKEN
        self._thread = BackgroundThread(self._run, cuts, prove, name="replan")
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self, cuts: Sequence[int], prove: Prove) -> None:
        try:
            prove(cuts)
            self.error = None
        except NotExact as error:
            self.error = error
            log.warning("cuts %s are not used, as servers do not pass there: %s", cuts, error)
        except UpriverError as error:
            self.error = error
            log.info("cuts %s are not used for now: %s", cuts, error)
        finally:
            self.done = True


def _in_turn(prove: Prove) -> Prove:
    """Run canaries one at a time: a cut that fails must not close one that passes meanwhile."""
    lock = threading.Lock()

    def proved(cuts: Sequence[int]) -> None:
        with lock:
            prove(cuts)

    return proved
