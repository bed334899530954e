"""upriver's own policy for input pipelines: the candidate and the ratio with the most throughput.

From the figures of FastFlow (Um et al., PVLDB 16(5), 2023, Table 1), by a model of both sides at once.

Symbols, for a candidate c
    G, L, P      ``Metrics.gthp``, ``lthp``, ``pcycle``
    S            ``Metrics.pseconds``, P where it is not known
    R, O         ``Candidate.rthp``, ``ocycle``
    k            O / max(P, S): what a megabyte that is made elsewhere still costs the training node, by one
                 made there; by O / P alone nothing would be won from a pipeline that waits, for its storage
    T(r)         MB/s of training with a share r of the samples offloaded

Model
    A megabyte takes the training node 1/L seconds, or k/L where it is made elsewhere; workers deliver at most
    R; the model takes at most G. The slowest of the three sets the pace:

        T(r) = min(G,  L / (1 - r (1 - k)),  R / r)

Choice
    The second term rises with r where k < 1, and the third falls: T is greatest where they cross, at
    r* = R / (L + R (1 - k)), or at 1. With k >= 1 nothing is won at any ratio. Of all candidates and ratios
    within 1 % of the greatest T the smallest ratio is taken, so that workers do what pays and no more; of
    equal ratios that of the first candidate. Nothing is offloaded where T is no more than SpeedUpThreshold
    times L.
"""

from __future__ import annotations

from upriver.policies._offload import OffloadDecision, here, unless_it_stalls
from upriver.profile.throughput import Candidate, Metrics

POLICY = "upriver"

CLOSE = 0.01
"""Throughputs that differ by less are as good as equal: no measurement is more exact."""


def decide(metrics: Metrics) -> OffloadDecision:
    """The decision."""
    nothing = unless_it_stalls(metrics)
    if nothing is not None:
        return nothing
    lthp = metrics.lthp
    best = max(metrics.candidates, key=lambda candidate: highest(metrics, candidate))
    most = highest(metrics, best)
    least = most * (1 - CLOSE)
    if most <= lthp * metrics.speedup_threshold or lthp >= least:
        return here(
            f"{best.name} is the best of what could be offloaded and promises {most:.4g} MB/s, "
            f"{most / lthp:.2f} times the {lthp:.4g} of the training node alone, and "
            f"{metrics.speedup_threshold:g} times is the least that is worth it"
        )
    enough = [candidate for candidate in metrics.candidates if highest(metrics, candidate) >= least]
    chosen = min(enough, key=lambda candidate: smallest_ratio(metrics, candidate, least))
    ratio = smallest_ratio(metrics, chosen, least)
    return OffloadDecision(
        offload=True,
        candidate=chosen.name,
        ratio=ratio,
        why=f"{chosen.name} for {ratio:.0%} of the samples is the least that promises "
        f"{throughput(metrics, chosen, ratio):.4g} MB/s, within {CLOSE:.0%} of the most that can be had; the "
        f"training node alone has {lthp:.4g}, workers deliver up to {chosen.rthp:.4g}, and the model takes "
        f"{metrics.gthp:.4g}",
    )


def promise(metrics: Metrics, decision: OffloadDecision) -> float:
    """MB/s that a decision should give."""
    for candidate in metrics.candidates:
        if candidate.name == decision.candidate:
            return throughput(metrics, candidate, decision.ratio)
    return min(metrics.gthp, metrics.lthp)


def throughput(metrics: Metrics, candidate: Candidate, ratio: float) -> float:
    """T: MB/s with a share of the samples offloaded."""
    if ratio == 0:
        return min(metrics.gthp, metrics.lthp)
    here_s = 1 - ratio + ratio * _cost(metrics, candidate)  # by 1/L
    local = metrics.lthp / here_s if here_s > 0 else metrics.gthp
    return min(metrics.gthp, local, candidate.rthp / ratio)


def highest(metrics: Metrics, candidate: Candidate) -> float:
    """MB/s at the candidate's best ratio."""
    return throughput(metrics, candidate, crossing(metrics, candidate))


def crossing(metrics: Metrics, candidate: Candidate) -> float:
    """r*: both sides are done at once; 0 where offloading costs more than it spares."""
    saved = 1 - _cost(metrics, candidate)
    if saved <= 0 or candidate.rthp == 0:
        return 0.0
    return min(1.0, candidate.rthp / (metrics.lthp + candidate.rthp * saved))


def smallest_ratio(metrics: Metrics, candidate: Candidate, least: float) -> float:
    """The smallest ratio that gives ``least`` MB/s, where the candidate's best one does."""
    saved = 1 - _cost(metrics, candidate)
    if saved <= 0 or least <= metrics.lthp:
        return 0.0
    return min((1 - metrics.lthp / least) / saved, crossing(metrics, candidate))


def _cost(metrics: Metrics, candidate: Candidate) -> float:
    """What a megabyte made elsewhere costs the training node, by one made there: k."""
    return candidate.ocycle / max(metrics.pcycle, metrics.pseconds or 0.0)
