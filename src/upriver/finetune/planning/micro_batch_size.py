"""Which micro-batch would make an epoch shortest, as far as the measured lines tell.

The size decides the low bits of features, so nothing here changes it: a job asks with ``micro_batch="auto"``,
and any other job is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from upriver.cost import CostModel, candidates
from upriver.policies import POLICIES
from upriver.protocol import Caps
from upriver.types import DEFAULT_MICRO_BATCH, Cluster, Profile, Route, Workload

CANDIDATES = (4, 8, 16, 32, 64, 128, 256)
"""Below, calls cost more than they do; above, the pipeline fills for longer than a call costs."""

GAIN = 0.03
"""By how much shorter an epoch must be predicted for another size than the default to be chosen."""

ALIKE = 0.01
"""Sizes whose epochs are so near to the shortest are as good, and the smallest takes the least memory."""

WORTH_SAYING = 0.10
"""By how much shorter an epoch must be with another size for a job whose size is fixed to be told."""

Judge = Callable[[Profile, Cluster], float | None]
"""Seconds that an epoch is predicted to take; None where nothing that may be chosen fits the memory."""


def predicted(
    profile: Profile, cluster: Cluster, workload: Workload, judge: Judge, *, caps: Caps, per_request: int
) -> dict[int, float]:
    """Size to the predicted seconds of an epoch, of each candidate that fits and of the present one.

    Args:
        profile: With lines; its memory a sample is taken to hold at any size.
        cluster: At the present size.
        caps: What a request and a frame may hold.
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
    """The same machines with another micro-batch on both tiers."""
    return replace(
        cluster,
        storage=replace(cluster.storage, micro_batch=size),
        compute=replace(cluster.compute, micro_batch=size),
    )


def best_size(epochs: Mapping[int, float]) -> int:
    """The default, unless another is predicted to be clearly shorter: then the smallest of the shortest.

    Args:
        epochs: Size to the predicted seconds of an epoch, of those that fit.
    """
    if not epochs:
        return DEFAULT_MICRO_BATCH
    least = min(epochs.values())
    if DEFAULT_MICRO_BATCH in epochs and least > (1 - GAIN) * epochs[DEFAULT_MICRO_BATCH]:
        return DEFAULT_MICRO_BATCH
    return min(size for size, epoch_s in epochs.items() if epoch_s <= (1 + ALIKE) * least)


def advice(epochs: Mapping[int, float], size: int) -> list[str]:
    """What a job with this size is told; nothing where another would not help much."""
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
    """Predicts epochs by what the policy would do."""

    def judge(profile: Profile, cluster: Cluster) -> float | None:
        plan = POLICIES[policy](profile, cluster, workload)
        return plan.predicted.epoch_s if plan.feasible and plan.predicted is not None else None

    return judge


def by_routes(routes: Sequence[Route], workload: Workload) -> Judge:
    """Predicts epochs by routes that are given."""

    def judge(profile: Profile, cluster: Cluster) -> float | None:
        model = CostModel(profile, cluster, workload)
        return model.evaluate(routes).epoch_s if all(model.fits(route.cut) for route in routes) else None

    return judge


def _widest(profile: Profile) -> int:
    """Bytes of a sample at the cut where it has the most."""
    return max(1, *(int(profile.cut_bytes(cut)) for cut in candidates(profile)))
