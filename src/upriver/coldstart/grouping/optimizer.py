"""The grouping with the least predicted makespan, by dynamic programming over the layers.

    minimise    Timeline.makespan(groups)
    subject to  groups are consecutive, cover every layer, and none is larger than the memory cap

A way to group the first layers, a *label* here, is known by four things: when the link is free for the next
group, how late the answer is at least for the groups so far, when the loader is free, and when each of the
last layers is loaded, which a later request may have to wait for. The makespan grows with each of them, so a
label that is better than another in none of them can be dropped, and what is left at the last layer is exact.

What keeps the labels few:

- A group that could be cut so that either part keeps the link busy for a latency need not be whole: its first
  part would be there earlier and nothing later. So groups that end at a layer begin within two latencies'
  worth of bytes, and a layer.
- A label that cannot beat the best grouping known, even if no request from there on had to be waited for
  (``Timeline.rest_s``), is dropped. The groupings of the other policies are known from the start.
- Being late by less than what no grouping can beat is the same as not being late, and so is a layer that is
  loaded before any request that could wait for it can be sent.

Up to :data:`EXACT_LAYERS` layers that is all, to rounding. Above, the makespan may be :data:`TOLERANCE` above
the least one. A label must promise a gain of half of that, and is dropped if another is better in everything
but for as much as a layer's share of the other half. Such a step makes the makespan later by no more than it
gives away, since nothing in the recurrence makes a delay grow; and there is one for each layer at most.

A memory cap of a few latencies' worth of bytes, where these are hundreds of MB, leaves hundreds of labels at
a layer. A search with :data:`SPARE_LABELS` more than layers begins again and keeps only the most promising
at each layer: then all that is certain is that no known grouping is better.

Where executing takes longest, many groupings have the same makespan, and most of them leave the link idle for
nothing. So a second search, for which all that is no later than the least makespan is not late, finds the one
after which the link is free first: it loses least where executing takes less than was predicted.
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
"""With more of them a search may stop :data:`TOLERANCE` above the least makespan."""

TOLERANCE = 0.001
"""Far below what the seconds of a link or of a layer can be predicted to."""

ROUNDING = 1e-12
"""The tolerance of a search that is exact."""

SAME = 1e-9
"""Makespans that are no further apart are the same, whatever order their parts were added in."""

SPARE_LABELS = 500
"""By how many more than one a layer, which is usual, a search that may stop early begins again."""

PROMISING = 2
"""How many are kept at each layer if that was not enough."""


def shortest(timeline: Timeline, known: Iterable[list[range]]) -> list[range]:
    """The grouping with the least makespan: one of those known, or a better one.

    Args:
        timeline: What the layers take.
        known: At least one grouping that keeps the memory cap. The first one, where none is better; else of
            equals the one after which the link is free first.
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
    """Of the groupings with this makespan the one after which the link is free first."""
    search = _Search(
        timeline,
        known_s=makespan_s * (1 + SAME),
        tolerance=ROUNDING,
        floor_s=makespan_s,
        at_layer=PROMISING,
    )
    return search.run()


class _TooMany(Exception):
    """A search keeps too many labels to go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ways:
    """Labels with one more group, all to the same layer; one number each.

    Attributes:
        parent: The label without the group.
        start: The group's first layer.
        free_s: When the link is free for the next group.
        late_s: The makespan so far.
        reach_s: The makespan at best.
        begun_s: When the loader would have begun with the first layer, had it never waited.
    """

    parent: Indices
    start: Indices
    free_s: Array
    late_s: Array
    reach_s: Array
    begun_s: Array


class _Search:
    """Labels, in the order of the layers at which they end."""

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
        """Begin with nothing grouped.

        Args:
            timeline: What the layers take.
            known_s: The makespan that is to be beaten.
            tolerance: How far above the least one the result may be.
            floor_s: A makespan that need not be beaten.
            spare: How many more labels than layers there may be.
            at_layer: How many labels are kept at each layer; the most promising ones.
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
        """The best grouping below the given makespan; empty if there is none.

        Raises:
            _TooMany: If that takes too many labels.
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
        """Every label with a group that ends at ``stop``, if it can still beat what is known."""
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
        """Add the labels that no other one beats, the most promising first.

        Of equals that is the one whose last group is the smallest.
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
        """Which of those left are no better in anything than ``way``, which has become a label."""
        beaten: npt.NDArray[np.bool_] = ways.free_s[left] >= ways.free_s[way] - self._same_s
        beaten &= ways.late_s[left] >= ways.late_s[way] - self._same_s
        if not self._waits:
            return beaten
        # A request cannot be sent before the link is about to be free for it, and it is free at each later
        # layer after what comes before has come. A layer that is loaded by then makes nothing wait.
        timeline, first = self._timeline, self._needed_from(stop)
        hidden, busy = ways.free_s[left] + self._hidden_s[stop], ways.begun_s[left] + timeline.busy_s[stop]
        beaten &= np.maximum(busy, hidden) >= self._busy_s[label] - self._same_s
        some = left[beaten]
        sent = np.maximum(self._due_s[first:stop] - timeline.seconds[stop], -timeline.latency_s)
        loading = np.maximum(self._loading(stop, ways, some), ways.free_s[some][:, np.newaxis] + sent)
        beaten[beaten] = (loading >= self._loaded_s[label, first:stop] - self._same_s).all(axis=1)
        return beaten

    def _needed_from(self, stop: int) -> int:
        """The first layer that a group after ``stop`` may have to wait for."""
        return max(0, int(self._timeline.room[stop + 1]) - 1)

    def _loading(self, stop: int, ways: _Ways, some: Indices) -> Array:
        """When each layer from the first that matters is loaded; a row for each of ``some``."""
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
        """The groups of a label, and one more to the last layer."""
        groups, stop = [], self._timeline.num_layers
        while label >= 0:
            start = int(self._stop[label])
            groups.append(range(start, stop))
            label, stop = int(self._parent[label]), start
        return groups[::-1]


def _earliest_starts(timeline: Timeline) -> Indices:
    """The first layer of the largest group worth trying that ends before each layer, as the module says."""
    seconds, ends = timeline.seconds, np.arange(timeline.num_layers + 1)
    cut = np.minimum(np.searchsorted(seconds, seconds - timeline.latency_s, side="right") - 1, ends - 1)
    again = np.searchsorted(seconds, seconds[cut] - timeline.latency_s, side="right") - 1
    starts = np.where(cut < 0, 0, np.minimum(again, cut - 1) + 1)
    return np.maximum(starts, timeline.room)


def _due(timeline: Timeline, starts: Indices) -> Array:
    """When a request that waits for each layer is sent at the earliest; infinite where there is none."""
    first = np.searchsorted(timeline.room, np.arange(1, timeline.num_layers + 1), side="left")
    some = first <= timeline.num_layers
    due = np.full(timeline.num_layers, np.inf)
    due[some] = timeline.seconds[starts[first[some]]] - timeline.latency_s
    return due


def _doubled(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    return np.concatenate((array, np.empty_like(array)))
