"""upriver's own policy for input pipelines: the candidate and the ratio with the most throughput.

It uses the figures of FastFlow (Um et al., PVLDB 16(5), 2023, Table 1), and a model of both sides at once.

Symbols, for a candidate c
    G, L, P      ``Metrics.gthp``, ``lthp``, ``pcycle``
    S            ``Metrics.pseconds``, P where unknown
    R, O         ``Candidate.rthp``, ``ocycle``
    k            O / max(P, S): the training node's cost of a megabyte made elsewhere, over one made there
    T(r)         MB/s of training with a share r of the samples offloaded

With O / P alone, k would show no gain for a pipeline that waits, for its storage for example.

Model
    A megabyte costs the training node 1/L seconds, or k/L if made elsewhere. Workers deliver at most R; the
    model consumes at most G. The slowest of the three sets the pace:

        T(r) = min(G,  L / (1 - r (1 - k)),  R / r)

Choice
    Where k < 1, the second term rises with r, and the third falls. T is greatest where they cross, or at 1:

        r* = R / (L + R (1 - k))

    With k >= 1 no ratio gains anything. All candidates and ratios within 1% of the greatest T count as equal.
    The smallest ratio among them wins, so that workers do no more than pays; the first candidate wins ties.
    Nothing is offloaded where T is no more than SpeedUpThreshold times L.
"""

from __future__ import annotations

from upriver.policies._offload import OffloadDecision, here, unless_it_stalls
from upriver.profile.throughput import Candidate, Metrics

POLICY = "upriver"

CLOSE = 0.01
"""Relative difference below which throughputs count as equal: no measurement is more exact."""


def decide(metrics: Metrics) -> OffloadDecision:
    """Decide on the candidate and the ratio."""
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
    """Return the MB/s that a decision should give."""
    for candidate in metrics.candidates:
        if candidate.name == decision.candidate:
            return throughput(metrics, candidate, decision.ratio)
    return min(metrics.gthp, metrics.lthp)


def throughput(metrics: Metrics, candidate: Candidate, ratio: float) -> float:
    """Return T: MB/s with a share of the samples offloaded."""
    if ratio == 0:
        return min(metrics.gthp, metrics.lthp)
    here_s = 1 - ratio + ratio * _cost(metrics, candidate)  # in units of 1/L
    local = metrics.lthp / here_s if here_s > 0 else metrics.gthp
    return min(metrics.gthp, local, candidate.rthp / ratio)


def highest(metrics: Metrics, candidate: Candidate) -> float:
    """Return the MB/s at the candidate's best ratio."""
    return throughput(metrics, candidate, crossing(metrics, candidate))


def crossing(metrics: Metrics, candidate: Candidate) -> float:
    """Return r*, where both sides finish at once; 0 where offloading costs more than it saves."""
    saved = 1 - _cost(metrics, candidate)
    if saved <= 0 or candidate.rthp == 0:
        return 0.0
    return min(1.0, candidate.rthp / (metrics.lthp + candidate.rthp * saved))


def smallest_ratio(metrics: Metrics, candidate: Candidate, least: float) -> float:
    """Return the smallest ratio that gives ``least`` MB/s, where the candidate's best ratio does."""
    saved = 1 - _cost(metrics, candidate)
    if saved <= 0 or least <= metrics.lthp:
        return 0.0
    return min((1 - metrics.lthp / least) / saved, crossing(metrics, candidate))


def _cost(metrics: Metrics, candidate: Candidate) -> float:
    """Return k: the training node's cost of a megabyte made elsewhere, relative to one made there."""
    return candidate.ocycle / max(metrics.pcycle, metrics.pseconds or 0.0)
