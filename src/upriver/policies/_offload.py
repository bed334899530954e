"""Share code among policies for input pipelines: their result, and the check that offloading can gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from upriver.profile.throughput import Metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadDecision:
    """Decision about offloading.

    Attributes:
        candidate: Name of the candidate, which defines the stages; None where nothing is offloaded.
        ratio: Share of the samples to offload, 0 to 1.
        why: Reason in a sentence, with the deciding numbers.
    """

    offload: bool
    candidate: str | None
    ratio: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPolicy:
    """Policy that decides from measurements of an input pipeline.

    Attributes:
        promise: Returns the MB/s that a decision should give, to check a job while it runs; None where the
            policy decides once.
    """

    decide: Callable[[Metrics], OffloadDecision]
    promise: Callable[[Metrics, OffloadDecision], float] | None = None


def stalls(gthp: float, lthp: float, threshold: float) -> bool:
    """Return whether the input pipeline stalls the model and offloading can gain more than ``threshold``.

    This is FastFlow's Algorithm 1, line 3.
    """
    return gthp > lthp and gthp / lthp > threshold


def unless_it_stalls(metrics: Metrics) -> OffloadDecision | None:
    """Return a decision against offloading where nothing stalls or could be offloaded; else None."""
    if not stalls(metrics.gthp, metrics.lthp, metrics.speedup_threshold):
        return here(
            f"the model alone is {metrics.gthp / metrics.lthp:.2f} times as fast as with its input pipeline, "
            f"and {metrics.speedup_threshold:g} times is the least that is worth it"
        )
    return None if metrics.candidates else here("there is nothing that could be offloaded")


def here(why: str) -> OffloadDecision:
    """Return the decision to offload nothing."""
    return OffloadDecision(offload=False, candidate=None, ratio=0.0, why=why)
