"""upriver: the mix of routes with which storage, link and compute finish together.

One cut rarely keeps every resource busy. So each micro-batch gets a route of its own, and the shares solve a
linear program. ``b[k, c]`` is the time for which resource ``k`` is busy if all samples use cut ``c``
(``Epochs.busy``). ``x[c]`` is the share of the samples that use cut ``c``:

    minimise  T
    such that sum over c of b[k, c] x[c] <= T   for each resource k
              sum over c of x[c] = 1,  x >= 0,  x[c] = 0 where c does not fit the memory

A vertex of that polytope has at most as many positive shares as there are resources, so few routes are
needed. A second program picks, among the mixes within ``SLACK`` of the best, the one that costs the storage
tier least: tenants share that tier. Shares are then rounded to whole micro-batches.

The answer is the best of the found mixes, of every two cuts of them and of every single cut. The one cost
model compares them, including fill and drain, which the programs leave out. The answer is never above not
splitting, and at most ``SLACK`` above the best single cut. Among equals it is the cheapest for the storage
tier. In this comparison a mix counts as longer than predicted by ``MARGIN``. It keeps more resources busy at
once than the measurements behind its prediction did, so a smaller gain is not reliable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from upriver.cost import Array, CostModel, route_at
from upriver.policies._common import MARGIN, SLACK, plan_with, rescue
from upriver.policies._simplex import NOTHING, MixProgram
from upriver.types import Cluster, Plan, Profile, Route, Workload


def plan(profile: Profile, cluster: Cluster, workload: Workload) -> Plan:
    """Choose the shares of the cuts."""
    model = CostModel(profile, cluster, workload)
    fitting = np.flatnonzero(model.feasible)
    if not len(fitting):
        return rescue("upriver", model)
    units = math.ceil(workload.num_samples / cluster.storage.micro_batch)
    found = [_of(model, (index,), (1.0,)) for index in _singles(model, fitting)]
    for indices, shares in _mixes(model, fitting):
        found += _rounded(model, indices, shares, units)
    most = (1 + SLACK) * min(mix.judged_s for mix in found)
    if model.feasible[0]:
        most = min(most, float(model.epochs.epoch_s[0]))
    allowed = (mix for mix in found if mix.judged_s <= most)
    chosen = min(allowed, key=lambda mix: (mix.storage_s, len(mix.indices), mix.epoch_s, mix.indices))
    shortest_s = min(mix.epoch_s for mix in found)
    return plan_with("upriver", chosen.routes(model), model, rule=_rule(chosen, shortest_s, model))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mix:
    """Some cuts by their index among the candidates, with their shares and the costs of an epoch."""

    indices: tuple[int, ...]
    shares: tuple[float, ...]
    epoch_s: float
    storage_s: float

    @property
    def judged_s(self) -> float:
        """Seconds of an epoch in a comparison of plans."""
        return self.epoch_s * (1 + MARGIN) if len(self.indices) > 1 else self.epoch_s

    def routes(self, model: CostModel) -> tuple[Route, ...]:
        """Return the routes of the plan, the earliest cut first."""
        pairs = zip(self.indices, self.shares, strict=True)
        return tuple(route_at(model.profile, model.cuts[index], share=share) for index, share in pairs)


def _of(model: CostModel, indices: Sequence[int], shares: Sequence[float]) -> _Mix:
    epochs, at, weights = model.epochs, list(indices), np.array(shares)
    around = float(epochs.around_s[at].max())
    busiest = float((epochs.busy[:, at] @ weights).max())
    return _Mix(
        indices=tuple(int(index) for index in indices),
        shares=tuple(float(share) for share in shares),
        epoch_s=busiest + around if len(at) > 1 else float(epochs.epoch_s[at[0]]),
        storage_s=float(epochs.storage_s[at] @ weights),
    )


def _singles(model: CostModel, fitting: npt.NDArray[np.intp]) -> list[int]:
    """Return the single cuts that may win: not splitting, and all within the slack of the best."""
    epoch_s = model.epochs.epoch_s[fitting]
    near = fitting[epoch_s <= (1 + SLACK) * epoch_s.min()]
    return sorted({*near.tolist(), *([0] if model.feasible[0] else [])})


def _mixes(model: CostModel, fitting: npt.NDArray[np.intp]) -> Iterator[tuple[list[int], list[float]]]:
    """Yield the mix with the least busiest resource, one near it that spares storage, and their pairs.

    Two cuts of a larger mix can be better than the mix. The programs do not see that the pipeline fills late
    for a third cut, of which a single micro-batch occupies the link for long.
    """
    epochs = model.epochs
    busy = epochs.busy[:, fitting]
    busy = busy[busy.any(axis=1)]
    scale = float(busy.max(axis=0).min()) if busy.size else 0.0
    if scale <= 0:
        return  # some cut keeps nothing busy: a mix gains nothing
    program = MixProgram(_times(scale, busy))
    shortest = program.shortest()
    first = _used(fitting, program.shares)
    yield first
    program.cheapest(_times(scale, epochs.storage_s[fitting]), (1 + SLACK) * shortest)
    if (second := _used(fitting, program.shares)) != first:
        yield second
    for pair in {pair for cuts, _ in (first, second) if len(cuts) > 2 for pair in combinations(cuts, 2)}:
        two = MixProgram(_times(scale, epochs.busy[:, pair]))
        two.shortest()
        yield _used(np.array(pair), two.shares)


def _times(scale: float, seconds: Array) -> Array:
    """Return ``seconds`` as multiples of ``scale``, capped above any share's use."""
    return np.minimum(seconds, scale / NOTHING) / scale


def _used(cuts: npt.NDArray[np.intp], shares: Array) -> tuple[list[int], list[float]]:
    """Return the cuts with positive shares, the earliest first."""
    at = np.flatnonzero(shares > NOTHING)
    at = at[np.argsort(cuts[at])]
    return cuts[at].tolist(), (shares[at] / shares[at].sum()).tolist()


def _rounded(model: CostModel, indices: Sequence[int], shares: Sequence[float], units: int) -> Iterator[_Mix]:
    """Yield the shares in whole micro-batches, for every distribution of those that rounding leaves."""
    whole = [math.floor(share * units + NOTHING) for share in shares]
    left = units - sum(whole)
    for given in combinations(range(len(whole)), left):
        counts = [count + (place in given) for place, count in enumerate(whole)]
        used = [(index, count / units) for index, count in zip(indices, counts, strict=True) if count]
        yield _of(model, [index for index, _ in used], [share for _, share in used])


def _rule(chosen: _Mix, shortest_s: float, model: CostModel) -> str:
    if len(chosen.indices) == 1:
        gain = 1 - shortest_s / chosen.epoch_s if chosen.epoch_s > 0 else 0.0
        than = (
            f"by more than {gain:.1%}, too little to rely on" if gain > SLACK else f"by more than {SLACK:.0%}"
        )
        return f"cut {model.cuts[chosen.indices[0]]} for all samples, as no mix is shorter {than}"
    pairs = zip(chosen.indices, chosen.shares, strict=True)
    parts = (f"{share:.1%} over cut {model.cuts[index]}" for index, share in pairs)
    return f"a mix, {', '.join(parts)}, with which the resources finish together"
