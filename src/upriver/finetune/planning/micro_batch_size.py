"""Find the micro-batch size with the shortest predicted epoch, from the measured lines.

The size decides the low bits of features, so this module never changes it. A job with ``micro_batch="auto"``
uses the result; any other job gets advice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from upriver.cost import CostModel, candidates
from upriver.policies import POLICIES
from upriver.protocol import Caps
from upriver.types import DEFAULT_MICRO_BATCH, Cluster, Profile, Route, Workload

CANDIDATES = (4, 8, 16, 32, 64, 128, 256)
"""Sizes to compare. Below them the cost of calls dominates; above them filling the pipeline takes longer than
a call costs."""

GAIN = 0.03
"""Relative gain in predicted epoch time needed to choose another size than the default."""

ALIKE = 0.01
"""Relative excess over the shortest epoch within which sizes count as equal; the smallest needs the least
memory."""

WORTH_SAYING = 0.10
"""Relative gain in epoch time above which a job with a fixed size gets advice."""

Judge = Callable[[Profile, Cluster], float | None]
"""Predicts the seconds of an epoch; None if no allowed plan fits the memory."""


def predicted(
    profile: Profile, cluster: Cluster, workload: Workload, judge: Judge, *, caps: Caps, per_request: int
) -> dict[int, float]:
    """Return the predicted seconds of an epoch by size, for the present size and each candidate that fits.

    Args:
        profile: Profile with lines; its memory per sample is assumed to hold at any size.
        cluster: Cluster at the present size.
        per_request: Micro-batches of a request.
    """
    most = min(caps.tensors, caps.samples // per_request, caps.payload_bytes // _widest(profile))
    sizes = [size for size in CANDIDATES if size <= min(most, workload.batch_size)]
    found = {}
    for size in sorted({*sizes, DEFAULT_MICRO_BATCH, cluster.storage.micro_batch}):
        epoch_s = judge(profile, with_size(cluster, size))
        if epoch_s is not None:
            found[size] = epoch_s
    return found


def with_size(cluster: Cluster, size: int) -> Cluster:
    """Return the same machines with another micro-batch on both tiers."""
    return replace(
        cluster,
        storage=replace(cluster.storage, micro_batch=size),
        compute=replace(cluster.compute, micro_batch=size),
    )


def best_size(epochs: Mapping[int, float]) -> int:
    """Return the default, or the smallest of the shortest sizes if the predicted gain is clear.

    Args:
        epochs: Predicted seconds of an epoch by size, for sizes that fit.
    """
    if not epochs:
        return DEFAULT_MICRO_BATCH
    least = min(epochs.values())
    if DEFAULT_MICRO_BATCH in epochs and least > (1 - GAIN) * epochs[DEFAULT_MICRO_BATCH]:
        return DEFAULT_MICRO_BATCH
    return min(size for size, epoch_s in epochs.items() if epoch_s <= (1 + ALIKE) * least)


def advice(epochs: Mapping[int, float], size: int) -> list[str]:
    """Return the advice for a job with this size; empty if another size would not help much."""
    best = best_size(epochs)
    if best == size or not epochs.get(size):
        return []
    gain = 1 - epochs[best] / epochs[size]
    if gain < WORTH_SAYING:
        return []
    return [
        f"micro_batch={best} would be predicted {100 * gain:.0f} % shorter; it changes low bits, so it is "
        "not done by itself"
    ]


def by_policy(policy: str, workload: Workload) -> Judge:
    """Return a judge that predicts epochs by the policy's plan."""

    def judge(profile: Profile, cluster: Cluster) -> float | None:
        plan = POLICIES[policy](profile, cluster, workload)
        return plan.predicted.epoch_s if plan.feasible and plan.predicted is not None else None

    return judge


def by_routes(routes: Sequence[Route], workload: Workload) -> Judge:
    """Return a judge that predicts epochs by given routes."""

    def judge(profile: Profile, cluster: Cluster) -> float | None:
        model = CostModel(profile, cluster, workload)
        return model.evaluate(routes).epoch_s if all(model.fits(route.cut) for route in routes) else None

    return judge


def _widest(profile: Profile) -> int:
    """Return the bytes of a sample at the cut where it is largest."""
    return max(1, *(int(profile.cut_bytes(cut)) for cut in candidates(profile)))
