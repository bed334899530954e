"""Solve the linear program of kept rows.

A sample's *life* is its source in the first epochs and its source in the later ones (`SourceCosts`). Where
the later source is another place than the first, the first epochs write the row there. ``b[k, s]`` is the
time for which resource ``k`` is busy if all samples have source ``s``, and ``w[k, q]`` that for writing all
rows in place ``q``. ``n1`` and ``n2`` are the numbers of first and later epochs. The variables are shares of
the samples:

    x[s, q]   life from source s, written in q, later read there
    y[q]      read in q all the time
    f[s]      source s in the first epochs, and afterwards any source of g
    g[s]      the reverse

    minimise  n1 T1 + n2 T2
    such that what f, y, x need of each resource in a first epoch, writes included  <= T1
              what g, y, x need of each resource in a later epoch                   <= T2
              sum f + sum y + sum x = 1,  sum g + sum y + sum x = 1
              lives that read q as it was at the start                              <= what is there
              bytes of all rows in a tier that a life reads                         <= its budget
              f over cuts >= g over places

The last row keeps lives apart that begin with one place's rows from lives that end with another's. A row in
memory or on disk can be written if the sample arrives on the compute tier no later than at its position, a
row in the store if servers compute at least up to there. So there are up to cuts x places columns ``x``, each
the sum of a part of its source and a part of its place. At the prices of a vertex, the best source of each
place is a running minimum over the cuts. Only columns that promise a gain are appended (`Simplex`).

A second search picks, among the shares of the least time, those that keep all resources busy for the least
sum. So rows go to memory before the disk, and to the disk before the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from upriver.cost import Array
from upriver.policies._kept.costs import OPEN, Life, SourceCosts
from upriver.policies._kept.decision import KeepTier
from upriver.policies._simplex import NOTHING, Simplex

MOST_ROUNDS = 100
"""Rounds of appended columns after which the reached shares are good enough: five are usual."""

PENALTY = 100.0
"""Cost of computing a sample in later epochs where as many as possible are read; a time is about 1."""

AT_ONCE = 16
"""Columns that are appended at once."""

Indices: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptScope:
    """Part of the program to solve.

    Attributes:
        first: Indices of the cuts that first epochs may use; at least one.
        later: The same for later epochs.
        places: Indices of the places that may be read.
        writable: Those of them that may be written, too.
        most: True if later epochs compute as few samples as possible, whatever it costs.
    """

    first: tuple[int, ...]
    later: tuple[int, ...]
    places: tuple[int, ...]
    writable: tuple[int, ...]
    most: bool


class KeptProgram:
    """Search the shares of lives.

    Args:
        epochs: Numbers of first and of later epochs.
    """

    def __init__(self, costs: SourceCosts, epochs: tuple[int, int], scope: KeptScope) -> None:
        self._costs, self._scope, self._num_cuts = costs, scope, len(costs.cuts)
        self._weights = np.array(epochs) / sum(epochs)
        self._known = [place for place in scope.places if costs.there[place] > 0]
        self._tiers = sorted({costs.places[place][1] for place in scope.places})
        busiest = costs.busy.max(axis=0)
        scale = min(busiest[[*scope.first]].min(), busiest[[*scope.later]].min())
        used = costs.busy.any(axis=1) | costs.write_busy.any(axis=1)
        self._busy, self._write = costs.busy[used] / scale, costs.write_busy[used] / scale
        self._parts()
        self._lives: list[Life] = []
        self._simplex = self._start()
        self._orders = list(self._reaches())

    def solve(self) -> dict[Life, float]:
        """Return the shares of the lives that have any."""
        times = np.zeros(len(self._lives))
        times[self._times] = self._weights
        if self._scope.most:
            at = len(self._scope.first)
            times[at : at + len(self._scope.later)] = PENALTY
        nothing = np.zeros(self._busy.shape[1]), np.zeros(self._write.shape[1])
        shortest = self._minimise(times, *nothing)
        times = np.append(times, np.zeros(len(self._lives) - len(times)))
        self._simplex.limit(times, shortest + NOTHING)
        self._lives.append((OPEN, OPEN))
        self._minimise(np.zeros(len(self._lives)), self._busy.sum(axis=0), self._write.sum(axis=0))
        shares = dict[Life, float]()
        for life, share in zip(self._lives, self._simplex.found, strict=True):
            if share > NOTHING and life != (OPEN, OPEN):
                shares[life] = shares.get(life, 0.0) + float(share)
        return shares

    # ---------------------------------------------------------------------------------- columns

    def _parts(self) -> None:
        """Make the parts of columns: a source at first, a source later, and a written place read later."""
        resources, sources = self._busy.shape
        self._all_first, self._all_later, self._open = 2 * resources, 2 * resources + 1, 2 * resources + 2
        there = self._open + 1
        tiers = there + len(self._known)
        rows = tiers + len(self._tiers)
        costs = self._costs
        filled = costs.sample_bytes * costs.num_samples / np.maximum(costs.budgets, 1.0)
        hold = np.zeros((rows, sources))
        hold[np.arange(there, tiers), self._sources(self._known)] = 1.0
        for place in self._scope.places:
            row = tiers + self._tiers.index(costs.places[place][1])
            hold[row, self._num_cuts + place] = filled[place]
        self._hold, self._first, self._later = hold, hold.copy(), np.zeros_like(hold)
        self._first[:resources], self._first[self._all_first] = self._busy, 1.0
        self._later[resources : 2 * resources], self._later[self._all_later] = self._busy, 1.0
        self._keep = self._later[:, self._num_cuts :].copy()
        self._keep[:resources] += self._write
        self._keep[tiers:] += hold[tiers:, self._num_cuts :]
        self._sums = np.zeros(rows)
        self._sums[[self._all_first, self._all_later]] = 1.0
        self._sums[there:tiers] = costs.there[self._known]
        self._sums[tiers:] = 1.0

    def _start(self) -> Simplex:
        """Return the program without columns ``x``, at the vertex where nothing is read or written."""
        known = self._sources(self._known)
        first, later = np.array(self._scope.first), np.array(self._scope.later)
        unit = np.zeros((len(self._sums), 1))
        unit[self._open] = 1.0
        slack_rows = [row for row in range(len(self._sums)) if row not in (self._all_first, self._all_later)]
        slacks = np.eye(len(self._sums))[:, slack_rows]
        slacks[self._open] *= -1.0
        resources = len(self._busy)
        times = np.zeros((len(self._sums), 2))
        times[:resources, 0], times[resources : 2 * resources, 1] = -1.0, -1.0
        blocks: list[tuple[Array, list[Life]]] = [
            (self._first[:, first] + unit, [(source, OPEN) for source in self._scope.first]),
            (self._later[:, later], [(OPEN, source) for source in self._scope.later]),
            (self._first[:, known] + self._later[:, known], [(source, source) for source in known]),
            (self._first[:, known], [(source, OPEN) for source in known]),
            (self._later[:, known] + self._hold[:, known] - unit, [(OPEN, source) for source in known]),
            (times, [(OPEN, OPEN)] * 2),
            (slacks, [(OPEN, OPEN)] * len(slack_rows)),
        ]
        for _, lives in blocks:
            self._lives += lives
        at_slacks = len(self._lives) - len(slack_rows)
        self._times = [at_slacks - 2, at_slacks - 1]
        basis = list(self._times)
        without_slack = set[int]()
        for cuts, above, column in ((first, 0, 0), (later, resources, len(first))):
            best = int(self._busy[:, cuts].max(axis=0).argmin())
            without_slack.add(above + int(self._busy[:, cuts[best]].argmax()))
            basis.append(column + best)
        basis += [at_slacks + at for at, row in enumerate(slack_rows) if row not in without_slack]
        return Simplex(np.hstack([block for block, _ in blocks]), self._sums, basis)

    def _sources(self, places: Sequence[int]) -> Indices:
        return np.array(places, dtype=np.intp) + self._num_cuts

    # ----------------------------------------------------------------------------------- search

    def _minimise(self, fixed: Array, of_source: Array, of_place: Array) -> float:
        """Minimise the cost of the lives; append columns as long as one promises a gain.

        Args:
            fixed: Cost of each column apart from its life.
            of_source: Cost of a first or a later epoch with a source, for each epoch.
            of_place: Cost of writing in a place, for each first epoch.
        """
        first = np.append(self._weights[0] * of_source, 0.0)  # index OPEN is the last one
        later = np.append(self._weights[1] * of_source, 0.0)
        write = self._weights[0] * of_place
        for _ in range(MOST_ROUNDS):
            lives = np.array(self._lives)
            costs = first[lives[:, 0]] + later[lives[:, 1]]
            costs[: len(fixed)] += fixed
            written = (lives[:, 0] != OPEN) & (lives[:, 1] >= self._num_cuts) & (lives[:, 0] != lives[:, 1])
            costs[written] += write[lives[written, 1] - self._num_cuts]
            least = self._simplex.minimise(costs)
            offers = self._offers(first[:-1], later[self._num_cuts : -1] + write)
            if not offers:
                break
            sources, places = np.array(offers).T
            self._simplex.append(self._first[:, sources] + self._keep[:, places])
            self._lives += [(source, self._num_cuts + place) for source, place in offers]
        return least

    def _offers(self, of_source: Array, of_place: Array) -> list[tuple[int, int]]:
        """Return pairs of source and place whose columns promise most, each place with its best source."""
        prices = self._simplex.prices[: len(self._sums)]
        sources, places = of_source - prices @ self._first, of_place - prices @ self._keep
        found = list[tuple[float, int, int]]()
        for order, targets, reach in self._orders:
            best = order[_running_argmin(sources[order])[reach - 1]]
            gains = sources[best] + places[targets]
            found += zip(gains.tolist(), best.tolist(), targets.tolist(), strict=True)
        found = sorted(offer for offer in found if offer[0] < -10 * NOTHING)
        return [(source, place) for _, source, place in found[:AT_ONCE]]

    def _reaches(self) -> Iterator[tuple[Indices, Indices, Indices]]:
        """Yield sources in an order, the places that can be written, and how many of the sources reach each.

        Rows in memory and on disk are reached by sources up to their position, rows in the store by cuts from
        there on.
        """
        positions, scope = self._costs.positions, self._scope
        in_store = {place for place in scope.writable if self._costs.places[place][1] is KeepTier.STORE}
        cuts, local = np.array(scope.first), np.append(np.array(scope.first), self._sources(self._known))
        for order, sign, places in ((local, 1, set(scope.writable) - in_store), (cuts, -1, in_store)):
            order = order[np.argsort(sign * positions[order], kind="stable")].astype(np.intp)
            targets = np.array(sorted(places), dtype=np.intp)
            at = sign * positions[self._num_cuts + targets]
            reach = np.searchsorted(sign * positions[order], at, side="right")
            if (reach > 0).any():
                yield order, targets[reach > 0], reach[reach > 0]


def _running_argmin(values: Array) -> Indices:
    """Return the index of the first least value among those up to each index."""
    low = np.minimum.accumulate(values)
    new = np.append(True, values[1:] < low[:-1])
    return np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))
