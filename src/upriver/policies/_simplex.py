"""Solve the linear programs of a mix: a few rows, any number of cuts, in well under a millisecond.

    busy x + s = T 1,   sum x = 1,   x, s >= 0

``x`` are the shares of the cuts, and ``s`` each resource's remainder of the time ``T``. This is the revised
simplex method (Dantzig 1953). A vertex is a basis of as many columns as there are rows. Each step swaps one
of them for the column that promises most. With so few rows a step is three solutions of a tiny system and one
product with all columns. A general solver's set-up would take longer than the whole search.
"""

from __future__ import annotations

import numpy as np

from upriver.cost import Array

NOTHING = 1e-9
"""Gain below which a step is not worthwhile, and magnitude that counts as 0; entries are of the order of
1."""

BLAND_AFTER = 50
"""Steps after which the first gain replaces the largest, which prevents cycles."""

MOST_STEPS = 1000
"""Steps after which the reached vertex is good enough: a dozen is usual."""


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
        self._columns = np.block([[busy, slacks, time], [ones, none]])
        self._sums = np.append(np.zeros(resources), 1.0)
        self._time = self._cuts + resources
        self._limit: float | None = None
        # At first all samples use the cut whose busiest resource is busy for the least time.
        first = int(busy.max(axis=0).argmin())
        busiest = int(busy[:, first].argmax())
        idle = [self._cuts + row for row in range(resources) if row != busiest]
        self._basis = [first, self._time, *idle]

    def shortest(self) -> float:
        """Minimise ``T`` and return it."""
        costs = np.zeros(self._time + 1)
        costs[self._time] = 1.0
        self._minimise(costs)
        return float(self._values()[self._basis.index(self._time)])

    def cheapest(self, costs: Array, most: float) -> None:
        """From there on, minimise the cost of the shares with ``T`` at most ``most``.

        Args:
            costs: Cost of a share of each cut, scaled to the order of 1.
            most: At least the result of `shortest`.
        """
        self._limit = most
        self._minimise(np.append(costs, np.zeros(self._time + 1 - self._cuts)))

    @property
    def shares(self) -> Array:
        """Share of each cut; the shares sum to 1."""
        found = np.zeros(self._time + 1)
        found[self._basis] = self._values().clip(0.0)
        shares = found[: self._cuts]
        return np.asarray(shares / shares.sum())

    def _values(self) -> Array:
        return np.linalg.solve(self._columns[:, self._basis], self._sums)

    def _minimise(self, costs: Array) -> None:
        for step in range(MOST_STEPS):
            basis = self._columns[:, self._basis]
            prices = np.linalg.solve(basis.T, costs[self._basis])
            gains = costs - prices @ self._columns
            gains[self._basis] = 0.0
            if self._time not in self._basis:
                gains[self._time] = 0.0  # at its largest; a smaller T allows less
            coming = int(gains.argmin() if step < BLAND_AFTER else (gains < -NOTHING).argmax())
            if gains[coming] >= -NOTHING or not self._swap(coming, basis):
                return

    def _swap(self, coming: int, basis: Array) -> bool:
        """Swap a column in for the first one in its way; return false where there is none."""
        change = np.linalg.solve(basis, self._columns[:, coming])
        nearest, going = np.inf, -1
        for place, (value, falls) in enumerate(zip(self._values(), change, strict=True)):
            if self._basis[place] == self._time:
                room = self._limit - value if self._limit is not None and falls < -NOTHING else np.inf
            else:
                room = value if falls > NOTHING else np.inf
            far = max(0.0, room) / abs(falls) if room < np.inf else np.inf
            if far < nearest:
                nearest, going = far, place
        if going < 0:
            return False
        if self._basis[going] == self._time and self._limit is not None:
            self._sums = self._sums - self._limit * self._columns[:, self._time]
        self._basis[going] = coming
        return True
