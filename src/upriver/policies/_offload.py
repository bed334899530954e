"""What the policies for input pipelines share: their answer, and when there is nothing to be won."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from upriver.profile.throughput import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadDecision:
    """The decision.

    Attributes:
        offload: Whether anything is.
        candidate: Which stages, by the name of the candidate; None where nothing is offloaded.
        ratio: Share of the samples for which it is, 0 to 1.
        why: In a sentence, with the numbers that decided.
    """

    offload: bool
    candidate: str | None
    ratio: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """A policy that goes by what was measured of an input pipeline.

    Attributes:
        decide: Its decision.
        promise: MB/s that a decision should give, so that a job can be held to it while it runs; None where
            the policy decides once.
    """

    decide: Callable[[Metrics], OffloadDecision]
    promise: Callable[[Metrics, OffloadDecision], float] | None = None


def stalls(gthp: float, lthp: float, threshold: float) -> bool:
    """Whether the input pipeline keeps the model waiting, and more than ``threshold`` can be won.

    FastFlow's Algorithm 1, line 3.
    """
    return gthp > lthp and gthp / lthp > threshold


def unless_it_stalls(metrics: Metrics) -> OffloadDecision | None:
    """Nothing is offloaded where nothing stalls, or nothing could be; None where that is not so."""
    if not stalls(metrics.gthp, metrics.lthp, metrics.speedup_threshold):
        return here(
            f"the model alone is {metrics.gthp / metrics.lthp:.2f} times as fast as with its input pipeline, "
            f"and {metrics.speedup_threshold:g} times is the least that is worth it"
        )
    return None if metrics.candidates else here("there is nothing that could be offloaded")


def here(why: str) -> OffloadDecision:
    """Nothing is offloaded."""
    return OffloadDecision(offload=False, candidate=None, ratio=0.0, why=why)
