"""upriver: the mix of routes with which storage, link and compute finish together.

One cut rarely keeps every resource busy. So each micro-batch gets a route of its own, and the shares are the
solution of a linear program. With ``b[k, c]`` the seconds for which resource ``k`` is busy if all samples
take cut ``c`` (``Epochs.busy``), and ``x[c]`` the share of the samples that do:

    minimise  T
    such that sum over c of b[k, c] x[c] <= T   for each resource k
              sum over c of x[c] = 1,  x >= 0,  x[c] = 0 where c does not fit the memory

A vertex of that polytope has at most as many shares above zero as there are resources, so few routes are
needed. A second program takes, among the mixes within ``SLACK`` of the best, the one that costs the storage
tier least: it is the tier that tenants share. Shares are then rounded to whole micro-batches.

What is answered is the best of what was found, of every two cuts of it and of every single cut, by the one
cost model (fill and drain included, which the programs leave out): never above not splitting, at most
``SLACK`` above the best single cut, and among equals the cheapest for the storage tier. A mix counts as
longer than it is predicted by ``MARGIN`` there: it keeps more resources busy at once than the measurements
behind its prediction did, so a gain below that is none to rely on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from upriver.cost import Array, CostModel, route_at
from upriver.policies._common import plan_with, rescue
from upriver.policies._simplex import NOTHING, MixProgram
from upriver.types import Cluster, Plan, Profile, Route, Workload

SLACK = 0.01
"""How much longer than the shortest an epoch may be if that spares the storage tier."""

MARGIN = 0.05
"""How much longer than predicted an epoch of a mix is taken to be, when it is held against a single cut."""


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
    """Some cuts, by their place among the candidates, with their shares and what an epoch then costs."""

    indices: tuple[int, ...]
    shares: tuple[float, ...]
    epoch_s: float
    storage_s: float

    @property
    def judged_s(self) -> float:
        """What an epoch counts as when plans are held against each other."""
        return self.epoch_s * (1 + MARGIN) if len(self.indices) > 1 else self.epoch_s

    def routes(self, model: CostModel) -> tuple[Route, ...]:
        """As the plan has them, the earliest cut first."""
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
    """The single cuts that may be the answer: not splitting, and all within the slack of the best."""
    epoch_s = model.epochs.epoch_s[fitting]
    near = fitting[epoch_s <= (1 + SLACK) * epoch_s.min()]
    return sorted({*near.tolist(), *([0] if model.feasible[0] else [])})


def _mixes(model: CostModel, fitting: npt.NDArray[np.intp]) -> Iterator[tuple[list[int], list[float]]]:
    """The shares with the least busiest resource, those near it that spare the storage tier, pairs of both.

    Two cuts of a mix of more can be better than it: that the pipeline fills late for a third one, of which a
    single micro-batch takes the link for long, is nothing that the programs see.
    """
    epochs = model.epochs
    busy = epochs.busy[:, fitting]
    busy = busy[busy.any(axis=1)]
    scale = float(busy.max(axis=0).min()) if busy.size else 0.0
    if scale <= 0:
        return  # some cut keeps nothing busy: a mix has nothing to gain
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
    """``seconds`` as multiples of ``scale``; never more than any share could use."""
    return np.minimum(seconds, scale / NOTHING) / scale


def _used(cuts: npt.NDArray[np.intp], shares: Array) -> tuple[list[int], list[float]]:
    """Those above nothing, the earliest cut first."""
    at = np.flatnonzero(shares > NOTHING)
    at = at[np.argsort(cuts[at])]
    return cuts[at].tolist(), (shares[at] / shares[at].sum()).tolist()


def _rounded(model: CostModel, indices: Sequence[int], shares: Sequence[float], units: int) -> Iterator[_Mix]:
    """The shares in whole micro-batches, whichever way those left over by rounding down may go."""
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
