"""fastflow: decide whether to offload the input pipeline, which stages, and for what share of samples.

The smart offloading policy: Um, Oh, Seo, Kweun, Kim, Lee, "FastFlow: Accelerating Deep Learning Model
Training with Smart Offloading of Input Data Pipeline", PVLDB 16(5), 2023, section 4, Algorithm 1, with the
metrics of Table 1.

Symbols
    Gthp, Lthp, Pcycle           ``Metrics.gthp``, ``lthp``, ``pcycle``
    Rthp(p'), Ocycle(p')         ``Candidate.rthp``, ``ocycle``
    SpeedUpThreshold             ``Metrics.speedup_threshold``
    OffRatio                     ``OffloadDecision.ratio``
    Line 3                       ``upriver.policies.stalls``
    P' (line 7)                  the candidate with the greatest ``estimate``
    Upper, Lower (lines 8, 9)    ``candidate.rthp`` and ``lower``

Departures
    - A ratio is at most 1. Rthp is a throughput of training and so no more than Gthp. But both are measured,
      and Upper / Gthp can exceed 1.
    - The text names no rule for ties; the first of equal candidates wins.
    - Where there is no candidate, or the best one delivers nothing, nothing is offloaded.
"""

from __future__ import annotations

import math

from upriver.errors import ConfigError
from upriver.policies._offload import OffloadDecision, here, unless_it_stalls
from upriver.profile.throughput import Candidate, Metrics

POLICY = "fastflow"


def decide(metrics: Metrics) -> OffloadDecision:
    """Decide by Algorithm 1."""
    nothing = unless_it_stalls(metrics)
    if nothing is not None:
        return nothing
    gthp, lthp = metrics.gthp, metrics.lthp
    best = max(metrics.candidates, key=lambda candidate: estimate(metrics, candidate))
    upper, least = best.rthp, lower(metrics, best)
    if least < upper:
        ratio, rule = upper / gthp, "Upper / Gthp, as the offloaded part can make up for what is lacking"
    else:
        ratio, rule = upper / (lthp + upper), "Rthp / (Lthp + Rthp), as both sides together are too slow"
    ratio = min(1.0, ratio)
    if ratio == 0:  # a throughput of zero, or one so small that the quotient is zero
        return here(f"{best.name} is the best of what could be offloaded and delivers nothing")
    return OffloadDecision(
        offload=True,
        candidate=best.name,
        ratio=ratio,
        why=f"{best.name} promises the most, {estimate(metrics, best):.4g} of {gthp:.4g} MB/s where the "
        f"training node alone has {lthp:.4g}; {ratio:.0%} of the samples: {rule} "
        f"(Lower {least:.4g}, Upper {upper:.4g} MB/s)",
    )


def estimate(metrics: Metrics, candidate: Candidate) -> float:
    """Return the training throughput that a candidate promises, MB/s (line 7)."""
    return metrics.lthp * (1 - candidate.ocycle / metrics.pcycle) + candidate.rthp


def lower(metrics: Metrics, candidate: Candidate) -> float:
    """Return the throughput to offload so that the training node keeps up, MB/s (line 9)."""
    return (metrics.gthp - metrics.lthp) * (1 + candidate.ocycle / metrics.pcycle)


def workers_needed(metrics: Metrics, candidate: Candidate, *, most: int) -> int:
    """Return the number of equal workers that make up the lack: Lower over one's throughput (section 9).

    Args:
        candidate: Candidate as measured with one worker.
        most: Number of available workers.

    Raises:
        ConfigError: If ``most`` is less than 1.
    """
    if most < 1:
        raise ConfigError(f"most must be at least 1, got {most}")
    lacking = lower(metrics, candidate)
    if lacking <= 0:
        return 0
    return most if candidate.rthp == 0 else min(most, math.ceil(lacking / candidate.rthp))
