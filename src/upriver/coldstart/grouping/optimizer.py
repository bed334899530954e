"""Find the grouping with the least predicted makespan, by dynamic programming over the layers.

    minimise    Timeline.makespan(groups)
    subject to  groups are consecutive, cover every layer, and none is larger than the memory cap

A *label* is a way to group the first layers. Four values describe it: when the link is free for the next
group; the least makespan after the groups so far; when the loader is free; and when each of the last layers
is loaded, which a later request may wait for. The makespan grows with each value. So a label that is better
than another in no value can be dropped. The remaining label at the last layer is exact.

Three rules keep the labels few:

- A group need not be whole if it can be cut so that both parts keep the link busy for a latency. Its first
  part would arrive earlier and nothing later. So a group that ends at a layer begins within two latencies'
  worth of bytes, and a layer.
- A label is dropped if it cannot beat the best known grouping even when no later request waits
  (``Timeline.rest_s``). The groupings of the other policies are known from the start.
- A delay below what no grouping can beat counts as none. So does a layer that is loaded before any request
  that could wait for it can be sent.

Up to :data:`EXACT_LAYERS` layers the result is exact, to rounding. Above, the makespan may exceed the least
one by :data:`TOLERANCE`. A label must promise a gain of half of that. It is dropped if another is worse in no
value by more than a layer's share of the other half. Such a step delays the makespan by at most that share,
since nothing in the recurrence makes a delay grow. There is at most one such step for each layer.

A memory cap of a few latencies' worth of bytes may be hundreds of MB. It then leaves hundreds of labels at a
layer. A search with :data:`SPARE_LABELS` more labels than layers starts again and keeps only the most
promising ones at each layer. Then the only guarantee is that no known grouping is better.

Where execution takes longest, many groupings have the same makespan, and most leave the link idle for
nothing. So a second search counts no delay up to the least makespan. It finds the grouping after which the
link is free first. That one loses least if execution takes less time than predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from upriver.coldstart.grouping.timeline import Array, Timeline

_T = TypeVar("_T", bound=np.generic)

Indices: TypeAlias = npt.NDArray[np.intp]

EXACT_LAYERS = 64
"""Most layers of an exact search. With more, a search may stop :data:`TOLERANCE` above the least makespan."""

TOLERANCE = 0.001
"""Relative tolerance, far below the accuracy to which seconds of a link or a layer can be predicted."""

ROUNDING = 1e-12
"""Tolerance of an exact search."""

SAME = 1e-9
"""Relative distance up to which makespans are equal, whatever the order of additions."""

SPARE_LABELS = 500
"""Labels in excess of one a layer, the usual number, after which an inexact search starts again."""

PROMISING = 2
"""Labels that are kept at each layer after such a restart."""


def shortest(timeline: Timeline, known: Iterable[list[range]]) -> list[range]:
    """Return the grouping with the least makespan: one of the known ones, or a better one.

    Args:
        timeline: Costs of the layers.
        known: At least one grouping within the memory cap. The first one is returned if none is better. Of
            other equal ones the result is the one after which the link is free first.
    """
    first, *others = known
    best = min((first, *others), key=timeline.makespan)
    known_s, exact = timeline.makespan(best), timeline.num_layers <= EXACT_LAYERS
    tolerance, spare = (ROUNDING, math.inf) if exact else (TOLERANCE, SPARE_LABELS)
    try:
        best = _Search(timeline, known_s=known_s, tolerance=tolerance, spare=spare).run() or best
    except _TooMany:
        return _Search(timeline, known_s=known_s, tolerance=TOLERANCE, at_layer=PROMISING).run() or best
    return best if best is first else _sooner_done(timeline, timeline.makespan(best)) or best


def _sooner_done(timeline: Timeline, makespan_s: float) -> list[range]:
    """Return the grouping with this makespan after which the link is free first."""
    search = _Search(
        timeline,
        known_s=makespan_s * (1 + SAME),
        tolerance=ROUNDING,
        floor_s=makespan_s,
        at_layer=PROMISING,
    )
    return search.run()


class _TooMany(Exception):
    """Signal that a search has too many labels to go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ways:
    """Candidate labels with one more group, which all end at the same layer; one number each.

    Attributes:
        parent: Label without the group.
        start: First layer of the group.
        free_s: Time at which the link is free for the next group.
        late_s: Makespan so far.
        reach_s: Lower bound of the makespan.
        begun_s: Time at which the loader would have begun the first layer, had it never waited.
    """

    parent: Indices
    start: Indices
    free_s: Array
    late_s: Array
    reach_s: Array
    begun_s: Array


class _Search:
    """Labels of one search, in the order of the layers at which they end."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        known_s: float,
        tolerance: float,
        floor_s: float = 0.0,
        spare: float = math.inf,
        at_layer: float = math.inf,
    ) -> None:
        """Start with no layer grouped.

        Args:
            timeline: Costs of the layers.
            known_s: Makespan to beat.
            tolerance: Relative distance from the least makespan that the result may have.
            floor_s: Makespan that need not be beaten.
            spare: Most labels in excess of the number of layers.
            at_layer: Most labels that are kept at each layer, the most promising ones.
        """
        self._timeline = timeline
        self._floor_s = max(floor_s, timeline.latency_s + float(timeline.rest_s[0]))
        self._below_s = known_s / (1.0 + tolerance / 2)
        share = tolerance / (2.0 + tolerance) / max(1, timeline.num_layers)
        self._same_s = share * max(0.0, self._floor_s)
        self._waits = bool(timeline.room.any())
        self._starts = _earliest_starts(timeline)
        self._due_s = _due(timeline, self._starts)
        least = np.minimum.accumulate((self._due_s - timeline.loaded_s)[::-1])[::-1]
        self._hidden_s = least + (timeline.busy_s - timeline.seconds)[:-1]
        self._first: list[int] = []
        self._count, room = 0, 2 * (timeline.num_layers + 1)
        self._spare, self._at_layer = spare, at_layer
        self._stop: Indices = np.empty(room, dtype=np.intp)
        self._parent: Indices = np.empty(room, dtype=np.intp)
        self._free_s, self._late_s, self._busy_s = np.empty((3, room))
        self._loaded_s = np.empty((room, timeline.num_layers if self._waits else 0))

    def run(self) -> list[range]:
        """Return the best grouping below the known makespan; empty if none exists.

        Raises:
            _TooMany: If the search needs too many labels.
        """
        timeline, last = self._timeline, self._timeline.num_layers
        if not last or self._floor_s >= self._below_s:
            return []
        self._first.append(0)
        self._add(0, parent=-1, free_s=timeline.latency_s, late_s=self._floor_s, busy_s=0.0)
        for stop in range(1, last):
            self._first.append(self._count)
            self._keep(stop, self._ways(stop))
        self._first.append(self._count)
        ways = self._ways(last)
        order = np.lexsort((ways.free_s, ways.late_s))
        return self._groups(int(ways.parent[order[0]])) if len(order) else []

    def _ways(self, stop: int) -> _Ways:
        """Return the candidates that end at ``stop`` and can still beat the known makespan."""
        timeline, labels = self._timeline, slice(self._first[self._starts[stop]], self._count)
        start, begin = self._stop[labels], self._free_s[labels]
        if needed := int(timeline.room[stop]):
            begin = np.maximum(begin, self._loaded_s[labels, needed - 1] + timeline.latency_s)
        end = begin + (timeline.seconds[stop] - timeline.seconds[start])
        late = np.maximum(self._late_s[labels], end + timeline.tail_s[start])
        free = np.maximum(end, begin + timeline.latency_s)
        reach = np.maximum(late, free + timeline.rest_s[stop])
        kept = np.flatnonzero(reach < self._below_s)
        begun = np.maximum(self._busy_s[labels][kept], end[kept]) - timeline.busy_s[start[kept]]
        return _Ways(
            parent=labels.start + kept,
            start=start[kept],
            free_s=free[kept],
            late_s=late[kept],
            reach_s=reach[kept],
            begun_s=begun,
        )

    def _keep(self, stop: int, ways: _Ways) -> None:
        """Add the candidates that no other one beats, the most promising first.

        Of equal candidates the one with the smallest last group is kept.
        """
        left = np.lexsort((-ways.start, ways.late_s, ways.free_s, ways.reach_s))
        before = self._count
        while len(left):
            way = int(left[0])
            label = self._add(
                stop,
                parent=int(ways.parent[way]),
                free_s=float(ways.free_s[way]),
                late_s=float(ways.late_s[way]),
                busy_s=float(ways.begun_s[way] + self._timeline.busy_s[stop]),
            )
            if self._waits:
                first = self._needed_from(stop)
                self._loaded_s[label, first:stop] = self._loading(stop, ways, np.array([way]))[0]
            if len(left) == 1 or self._count - before == self._at_layer:
                return
            left = left[~self._beaten(stop, ways, left, way, label)]

    def _beaten(self, stop: int, ways: _Ways, left: Indices, way: int, label: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the candidates in `left` that are better in no value than ``way``, now a label."""
        beaten: npt.NDArray[np.bool_] = ways.free_s[left] >= ways.free_s[way] - self._same_s
        beaten &= ways.late_s[left] >= ways.late_s[way] - self._same_s
        if not self._waits:
            return beaten
        # A request is not sent before the link is about to be free for it. At each later layer the link is
        # free only after the earlier bytes have come. A layer that is loaded by then delays nothing.
        timeline, first = self._timeline, self._needed_from(stop)
        hidden, busy = ways.free_s[left] + self._hidden_s[stop], ways.begun_s[left] + timeline.busy_s[stop]
        beaten &= np.maximum(busy, hidden) >= self._busy_s[label] - self._same_s
        some = left[beaten]
        sent = np.maximum(self._due_s[first:stop] - timeline.seconds[stop], -timeline.latency_s)
        loading = np.maximum(self._loading(stop, ways, some), ways.free_s[some][:, np.newaxis] + sent)
        beaten[beaten] = (loading >= self._loaded_s[label, first:stop] - self._same_s).all(axis=1)
        return beaten

    def _needed_from(self, stop: int) -> int:
        """Return the first layer that a group after ``stop`` may have to wait for."""
        return max(0, int(self._timeline.room[stop + 1]) - 1)

    def _loading(self, stop: int, ways: _Ways, some: Indices) -> Array:
        """Return when layers are loaded, from the first that matters on; a row for each of ``some``."""
        first = self._needed_from(stop)
        before = self._loaded_s[ways.parent[some], first:stop]
        now = ways.begun_s[some][:, np.newaxis] + self._timeline.loaded_s[first:stop]
        return np.where(np.arange(first, stop) >= ways.start[some][:, np.newaxis], now, before)

    def _add(self, stop: int, *, parent: int, free_s: float, late_s: float, busy_s: float) -> int:
        label = self._count
        if label > stop + self._spare:
            raise _TooMany
        if label == len(self._stop):
            self._grow()
        self._stop[label], self._parent[label] = stop, parent
        self._free_s[label], self._late_s[label], self._busy_s[label] = free_s, late_s, busy_s
        self._count += 1
        return label

    def _grow(self) -> None:
        self._stop, self._parent = _doubled(self._stop), _doubled(self._parent)
        self._free_s, self._late_s = _doubled(self._free_s), _doubled(self._late_s)
        self._busy_s, self._loaded_s = _doubled(self._busy_s), _doubled(self._loaded_s)

    def _groups(self, label: int) -> list[range]:
        """Return the groups of a label, and one more up to the last layer."""
        groups, stop = [], self._timeline.num_layers
        while label >= 0:
            start = int(self._stop[label])
            groups.append(range(start, stop))
            label, stop = int(self._parent[label]), start
        return groups[::-1]


def _earliest_starts(timeline: Timeline) -> Indices:
    """Return the first layer of the largest group worth trying before each layer, see the module."""
    seconds, ends = timeline.seconds, np.arange(timeline.num_layers + 1)
    cut = np.minimum(np.searchsorted(seconds, seconds - timeline.latency_s, side="right") - 1, ends - 1)
    again = np.searchsorted(seconds, seconds[cut] - timeline.latency_s, side="right") - 1
    starts = np.where(cut < 0, 0, np.minimum(again, cut - 1) + 1)
    return np.maximum(starts, timeline.room)


def _due(timeline: Timeline, starts: Indices) -> Array:
    """Return the earliest time at which a request waits for each layer; infinite if no request does."""
    first = np.searchsorted(timeline.room, np.arange(1, timeline.num_layers + 1), side="left")
    some = first <= timeline.num_layers
    due = np.full(timeline.num_layers, np.inf)
    due[some] = timeline.seconds[starts[first[some]]] - timeline.latency_s
    return due


def _doubled(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    return np.concatenate((array, np.empty_like(array)))
