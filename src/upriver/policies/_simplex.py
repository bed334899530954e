"""Solve small linear programs: a few rows, any number of columns, in well under a millisecond.

`Simplex` is the revised simplex method (Dantzig 1953). A vertex is a basis of as many columns as there are
rows. Each step swaps one of them for the column that promises most. With so few rows a step is two solutions
of a tiny system and one product with all columns. A general solver's set-up would take longer than the whole
search. Columns can be appended between two searches, so a program with very many needs only those that its
prices ask for (column generation, Gilmore and Gomory 1961).

`MixProgram` is the program of a mix:

    busy x + s = T 1,   sum x = 1,   x, s >= 0

``x`` are the shares of the cuts, and ``s`` each resource's remainder of the time ``T``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from upriver.cost import Array

NOTHING = 1e-9
"""Gain below which a step is not worthwhile, and magnitude that counts as 0; entries are of the order of
1."""

BLAND_AFTER = 50
"""Steps after which the first gain replaces the largest, which prevents cycles."""

MOST_STEPS = 1000
"""Steps after which the reached vertex is good enough: a dozen is usual."""


class Simplex:
    """Move a vertex of ``columns x = sums, x >= 0`` to the least cost.

    Args:
        columns: One row for each equation.
        basis: Columns of a first vertex, as many as there are rows.
    """

    def __init__(self, columns: Array, sums: Array, basis: Sequence[int]) -> None:
        self._columns, self._sums, self._basis = columns, sums, list(basis)
        self._costs = np.zeros(columns.shape[1])

    @property
    def found(self) -> Array:
        """Value of each column at the vertex."""
        found = np.zeros(self._columns.shape[1])
        found[self._basis] = self._values().clip(0.0)
        return found

    @property
    def prices(self) -> Array:
        """Cost of one more unit of each row's sum, at the vertex."""
        return np.asarray(np.linalg.solve(self._columns[:, self._basis].T, self._costs[self._basis]), float)

    def minimise(self, costs: Array) -> float:
        """Move to a vertex of least cost and return its cost.

        Args:
            costs: Cost of a unit of each column, scaled to the order of 1.
        """
        self._costs = costs
        for step in range(MOST_STEPS):
            basis = self._columns[:, self._basis]
            gains = costs - np.linalg.solve(basis.T, costs[self._basis]) @ self._columns
            gains[self._basis] = 0.0
            first = step >= BLAND_AFTER
            coming = int((gains < -NOTHING).argmax() if first else gains.argmin())
            if gains[coming] >= -NOTHING or not self._swap(coming, basis, first=first):
                break
        return float(costs[self._basis] @ self._values())

    def append(self, columns: Array) -> None:
        """Append columns, which are 0 at the vertex; rows that they lack are 0."""
        lacking = np.zeros((len(self._sums) - len(columns), columns.shape[1]))
        self._columns = np.hstack((self._columns, np.vstack((columns, lacking))))

    def limit(self, row: Array, most: float) -> None:
        """Append the row ``row x + s = most``, which the vertex satisfies, and the column of ``s``."""
        rows, columns = self._columns.shape
        wider = np.zeros((rows + 1, columns + 1))
        wider[:rows, :columns], wider[rows, :columns], wider[rows, columns] = self._columns, row, 1.0
        self._columns, self._sums = wider, np.append(self._sums, most)
        self._basis.append(columns)

    def _values(self) -> Array:
        return np.asarray(np.linalg.solve(self._columns[:, self._basis], self._sums), float)

    def _swap(self, coming: int, basis: Array, *, first: bool) -> bool:
        """Swap a column in for the first one in its way; return false where there is none."""
        both = np.array((self._sums, self._columns[:, coming])).T
        values, falls = np.linalg.solve(basis, both).T
        in_the_way = falls > NOTHING
        far = np.where(in_the_way, values.clip(0.0), np.inf) / np.where(in_the_way, falls, 1.0)
        going = int(far.argmin())
        if far[going] == np.inf:
            return False
        if first:
            going = min(np.flatnonzero(far <= far[going]).tolist(), key=self._basis.__getitem__)
        self._basis[going] = coming
        return True


class MixProgram:
    """Move the shares of the cuts from vertex to vertex.

    Args:
        busy: Seconds for which each cut (column) keeps each resource (row) busy, scaled to the order of 1; at
            least one row and one column, none negative.
    """

    def __init__(self, busy: Array) -> None:
        resources, self._cuts = busy.shape
        ones, none = np.ones((1, self._cuts)), np.zeros((1, resources + 1))
        slacks, time = np.eye(resources), np.full((resources, 1), -1.0)
        self._time = self._cuts + resources
        # At first all samples use the cut whose busiest resource is busy for the least time.
        first = int(busy.max(axis=0).argmin())
        busiest = int(busy[:, first].argmax())
        idle = [self._cuts + row for row in range(resources) if row != busiest]
        self._simplex = Simplex(
            np.block([[busy, slacks, time], [ones, none]]),
            np.append(np.zeros(resources), 1.0),
            [first, self._time, *idle],
        )

    def shortest(self) -> float:
        """Minimise ``T`` and return it."""
        return self._simplex.minimise(self._only_time())

    def cheapest(self, costs: Array, most: float) -> None:
        """From there on, minimise the cost of the shares with ``T`` at most ``most``.

        Args:
            costs: Cost of a share of each cut, scaled to the order of 1.
            most: At least the result of `shortest`.
        """
        self._simplex.limit(self._only_time(), most)
        self._simplex.minimise(np.append(costs, np.zeros(self._time + 2 - self._cuts)))

    @property
    def shares(self) -> Array:
        """Share of each cut; the shares sum to 1."""
        shares = self._simplex.found[: self._cuts]
        return np.asarray(shares / shares.sum())

    def _only_time(self) -> Array:
        time = np.zeros(self._time + 1)
        time[self._time] = 1.0
        return time
