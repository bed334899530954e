"""Search the lives of one question: solve the linear program in several scopes, and cost each answer.

The program leaves out fill and drain, and that shares are whole samples. So it is solved for all cuts first,
and then for single cuts among those that it used, once more with as many samples as possible read in later
epochs, and at last for single places. Few routes fill and drain faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from upriver.cost import Array, CostModel
from upriver.policies._common import MARGIN
from upriver.policies._kept.costs import OPEN, Life, source_costs
from upriver.policies._kept.decision import KeepingTiers
from upriver.policies._kept.program import KeptProgram, KeptScope
from upriver.policies._kept.rounding import whole_lives
from upriver.types import Route, Tier

LEAST_SHARE = 1e-3
"""Share of the samples below which a tier is not used: keeping so few cannot gain `SLACK`."""

WORST = 1e6
"""Times the busiest resource of the best cut, above which a source is not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptEpoch:
    """Costs of a first or of a later epoch.

    Attributes:
        judged_s: Seconds of the epoch in a comparison of answers.
        storage_s: Seconds for which the storage tier is busy.
        work_s: Seconds for which all resources are busy, in sum.
    """

    epoch_s: float
    judged_s: float
    storage_s: float
    work_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAnswer:
    """Whole samples by life, and their costs.

    Attributes:
        periods: Numbers of first and of later epochs.
    """

    views: int
    periods: tuple[int, int]
    lives: Mapping[Life, int]
    first: KeptEpoch
    later: KeptEpoch

    @property
    def total_s(self) -> float:
        """Seconds of the horizon."""
        return self._over(self.first.epoch_s, self.later.epoch_s)

    @property
    def judged_s(self) -> float:
        """Seconds of the horizon in a comparison of answers."""
        return self._over(self.first.judged_s, self.later.judged_s)

    def order(self, horizon_s: float) -> tuple[float, float, int, float]:
        """Return the order among answers that are as short: storage, all work, routes, seconds.

        Args:
            horizon_s: Seconds a millionth of which is no difference.
        """
        storage_s = self._over(self.first.storage_s, self.later.storage_s)
        work_s = self._over(self.first.work_s, self.later.work_s)
        return round(storage_s / horizon_s, 6), round(work_s / horizon_s, 6), len(self.lives), self.total_s

    def _over(self, first_s: float, later_s: float) -> float:
        return self.periods[0] * first_s + self.periods[1] * later_s


class KeptSearch:
    """Search the lives of one question.

    Args:
        routes: Routes of an epoch without keeping.
        epochs: The horizon.
        cuts: Cuts that computed samples may take; None for all that fit.
    """

    def __init__(
        self,
        model: CostModel,
        keeping: KeepingTiers,
        routes: Sequence[Route],
        epochs: int,
        cuts: Collection[int] | None,
    ) -> None:
        self._model, self._keeping, self._epochs = model, keeping, epochs
        self.costs = source_costs(model, keeping)
        self.fitting = self._near(fitting_cuts(model, cuts))
        self._routes = {model.index(route.cut) for route in routes} & set(self.fitting)

    def answers(self) -> Iterator[KeptAnswer]:
        """Yield answers for each number of views that rows to be written may have."""
        for views in self.groups:
            yield from self._answers_of(views)

    @cached_property
    def groups(self) -> list[int]:
        """Numbers of views for which there is a program; the horizon if rows are only read."""
        if not self.readable:
            return []
        positions = (self.costs.places[place][0] for place in self.readable)
        written = {self._keeping.positions[position] for position in positions}
        short = sorted(views for views in written if views < self._epochs)
        return short or ([self._epochs] if self.costs.there[self.readable].any() else [])

    @cached_property
    def readable(self) -> list[int]:
        """Places that hold rows of enough samples, from which the compute tier can go on in its memory."""
        costs, at = self.costs, len(self.costs.cuts)
        if not self.fitting or not self.best_s:
            return []
        fits = costs.sample_bytes * costs.num_samples * LEAST_SHARE <= costs.budgets
        needs = self._model.needs[Tier.COMPUTE][costs.positions[at:] - costs.cuts.start]
        fits &= needs <= self._model.cluster.compute.memory_bytes
        slowest = np.maximum(costs.busy[:, at:].max(axis=0), costs.write_busy.max(axis=0))
        return [int(place) for place in np.flatnonzero(fits & (slowest <= WORST * self.best_s))]

    @cached_property
    def best_s(self) -> float:
        """Seconds for which the best cut's busiest resource is busy; 0 without a cut that fits."""
        return float(self.costs.busy[:, self.fitting].max(axis=0).min()) if self.fitting else 0.0

    def _near(self, sources: Sequence[int]) -> list[int]:
        """Return the sources that are not worse than the best by orders of magnitude."""
        busiest = self.costs.busy.max(axis=0)
        most = WORST * min((float(busiest[source]) for source in sources), default=0.0)
        return [source for source in sources if busiest[source] <= most]

    # ----------------------------------------------------------------------------------- scopes

    def _answers_of(self, views: int) -> Iterator[KeptAnswer]:
        cuts, places = tuple(self.fitting), tuple(self.readable)
        general = self.solve(views, self.scope(views, first=cuts, later=cuts, places=places))
        scopes = [
            self.scope(views, first=first, later=later, places=places, most=most)
            for first, later in product(self._cut_sets(general, 0), self._cut_sets(general, 1))
            for most in (False, True)
        ]
        found = [self._answer(views, self.solve(views, scope), scope) for scope in scopes]
        best = scopes[min(range(len(found)), key=lambda at: found[at].judged_s)]
        for place in self._places(general):
            alone = self.scope(views, first=best.first, later=best.later, places=(place,), most=best.most)
            found.append(self._answer(views, self.solve(views, alone), alone))
        yield self._answer(views, general, scopes[0])
        yield from found

    def solve(self, views: int, scope: KeptScope) -> dict[Life, float]:
        """Return the shares of lives of the least time in a scope."""
        return KeptProgram(self.costs, self._periods(views), scope).solve()

    def _periods(self, views: int) -> tuple[int, int]:
        """Return the numbers of first and of later epochs."""
        firsts = min(views, self._epochs)
        return firsts, self._epochs - firsts

    def scope(
        self,
        views: int,
        *,
        first: tuple[int, ...],
        later: tuple[int, ...],
        places: tuple[int, ...],
        most: bool = False,
    ) -> KeptScope:
        """Return a scope in which rows of so many views are written."""
        positions, laters = self._keeping.positions, self._periods(views)[1]
        writable = [place for place in places if laters and positions[self.costs.places[place][0]] == views]
        return KeptScope(first=first, later=later, places=places, writable=tuple(writable), most=most)

    def _cut_sets(self, general: Mapping[Life, float], half: int) -> list[tuple[int, ...]]:
        """Return sets of cuts to try, for an epoch in which the general program uses some."""
        used = {life[half] for life in general} & set(self.fitting)
        if not used:
            return [tuple(self.fitting)]
        epoch_s = self._model.epochs.epoch_s
        best = min(self.fitting, key=lambda index: float(epoch_s[index]))
        single = sorted({*used, *self._routes, best})
        sets = [tuple(sorted(used)), tuple(sorted(self._routes)), *((cut,) for cut in single)]
        return [cuts for cuts in dict.fromkeys(sets) if cuts]

    def _places(self, general: Mapping[Life, float]) -> list[int]:
        """Return the places that the general program uses, if they are several."""
        at = len(self.costs.cuts)
        used = sorted({source - at for life in general for source in life if source >= at})
        return used if len(used) > 1 else []

    # ------------------------------------------------------------------------------------ costs

    def _answer(self, views: int, shares: Mapping[Life, float], scope: KeptScope) -> KeptAnswer:
        costs = self.costs
        busiest = costs.busy.max(axis=0)
        first, later = (min(cuts, key=lambda cut: float(busiest[cut])) for cuts in (scope.first, scope.later))
        lives = whole_lives(shares, costs, (first, later))
        written = np.zeros(len(costs.places))
        for life, count in lives.items():
            if costs.writes(life):
                written[life[1] - len(costs.cuts)] += count / costs.num_samples
        return KeptAnswer(
            views=views,
            periods=self._periods(views),
            lives=lives,
            first=self._epoch(lives, 0, costs.write_busy @ written),
            later=self._epoch(lives, 1, np.zeros(len(costs.busy))),
        )

    def _epoch(self, lives: Mapping[Life, int], half: int, more: Array) -> KeptEpoch:
        """Return the costs of an epoch in which each resource is busy for ``more`` seconds besides."""
        costs, shares = self.costs, np.zeros(self.costs.busy.shape[1])
        for life, count in lives.items():
            if life[half] != OPEN:
                shares[life[half]] += count / costs.num_samples
        busy = costs.busy @ shares + more
        epoch_s = float(busy.max() + costs.around_s[shares > 0].max())
        fresh = len(costs.cuts)
        several = np.count_nonzero(shares[:fresh]) + shares[fresh:].any() > 1
        return KeptEpoch(
            epoch_s=epoch_s,
            judged_s=epoch_s * (1 + MARGIN) if several else epoch_s,
            storage_s=float(costs.storage_s @ shares),
            work_s=float(busy.sum()),
        )


def fitting_cuts(model: CostModel, cuts: Collection[int] | None) -> list[int]:
    """Return the indices of the cuts that fit both memories and may be taken."""
    return [
        index
        for index, cut in enumerate(model.cuts)
        if model.feasible[index] and (cuts is None or cut in cuts)
    ]
