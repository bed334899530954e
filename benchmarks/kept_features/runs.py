"""Find in the records of `kept_features` what was run, which runs count, and how the ways compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.harness.measuring import Interval, Spread, ratio_interval
from benchmarks.harness.records import Records
from benchmarks.harness.training.plans import alike
from benchmarks.kept_features.settings import (
    AUTO,
    FILE,
    HAND,
    LOADER,
    MEMORY,
    NONE,
    PLAIN,
    RIVAL,
    Setting,
    run_key,
)

OTHERS = (PLAIN, HAND, NONE)
"""Ways that ``auto`` must not be behind."""


@dataclass(frozen=True)
class Runs:
    """A setting and its records.

    The first run of ``none`` is the reference: other runs count if they are by the same code and learned the
    same.
    """

    setting: Setting
    records: Records

    # ---------------------------------------------------------------------------------- which runs count

    @property
    def reference(self) -> dict[str, Any] | None:
        """Return the first run of upriver that keeps nothing, whose losses are the reference."""
        return self.records.rows.get(run_key(self.setting, NONE, 1))

    def row(self, label: str, repeat: int) -> dict[str, Any] | None:
        """Return a record; None if there is none by the code of the reference. A sweep is of any code."""
        row, reference = self.records.rows.get(run_key(self.setting, label, repeat)), self.reference
        if row is None or repeat == 0:
            return row
        return row if reference is not None and row["code"] == reference["code"] else None

    def why_not(self, label: str, repeat: int) -> str | None:
        """Return why a run does not count: empty when it does, None when it does not exist."""
        row, reference = self.row(label, repeat), self.reference
        if row is None:
            return None
        if "error" in row:
            return f"failed: {row['error']}"
        if repeat == 0:
            return ""
        if reference is None or "error" in reference:
            return "no reference"
        both = min(len(row["losses"]), len(reference["losses"]))
        losses, wanted = row["losses"][:both], reference["losses"][:both]
        same = losses == wanted if label in (NONE, AUTO) else alike(losses, wanted)
        return "" if same else "other losses"

    def rows(self, label: str | None, end: int) -> dict[int, dict[str, Any]]:
        """Return the runs that count and reach an end, by repeat.

        Args:
            label: Label of the way; None of no run.
            end: Number of the epoch, or of the job, from 1.
        """
        if label is None:
            return {}
        counting = [repeat for repeat in self.setting.measured if self.why_not(label, repeat) == ""]
        found = {repeat: row for repeat in counting if (row := self.row(label, repeat)) is not None}
        return {repeat: row for repeat, row in found.items() if len(row["ends_s"]) >= end}

    @property
    def not_counted(self) -> list[str]:
        """Return the runs that do not count, and why."""
        swept = [(label, 0) for label in self.forms]
        every = [(label, repeat) for label in self._labels.values() for repeat in self.setting.measured]
        return [
            f"{self.setting.key}, {label}, {repeat}: {why}"
            for label, repeat in (*swept, *every)
            if (why := self.why_not(label, repeat))
        ]

    # -------------------------------------------------------------------------------- what is left to run

    @property
    def forms(self) -> list[str]:
        """Return the labels of the sweep. Files are tried with the workers that are best for memory."""
        memory = self._fastest(self._forms_in(self.setting.sweep, MEMORY))
        return [*self.setting.sweep, *([memory.replace(MEMORY, FILE)] if memory is not None else [])]

    @property
    def unswept(self) -> list[str]:
        """Return the labels of the forms that the sweep has yet to run, as far as they are known."""
        return [label for label in self.forms if self.why_not(label, 0) is None]

    @staticmethod
    def _forms_in(labels: Sequence[str], *forms: str) -> list[str]:
        return [label for label in labels if label.split()[0] in forms]

    def _fastest(self, labels: Sequence[str]) -> str | None:
        """Return the label of the fastest in the sweep; None before all have run, or if none counts."""
        if any(self.why_not(label, 0) is None for label in labels):
            return None
        rows = {label: self.records.rows[run_key(self.setting, label, 0)] for label in labels}
        counting = [label for label in labels if self.why_not(label, 0) == ""]
        return min(counting, key=lambda label: float(rows[label]["ends_s"][-1]), default=None)

    @cached_property
    def _labels(self) -> dict[str, str]:
        """Return each way's label, which names the fastest form of the sweep; nothing before that is known.

        Only files outlast a process, so features of several jobs are kept in them.
        """
        by_hand = (MEMORY, FILE) if self.setting.jobs == 1 else (FILE,)
        fastest = {
            PLAIN: self._fastest(self._forms_in(self.forms, LOADER)),
            HAND: self._fastest(self._forms_in(self.forms, *by_hand)),
        }
        labels = {way: fastest.get(way, way) for way in self.setting.ways}
        return {way: label for way, label in labels.items() if label is not None}

    def label(self, way: str) -> str | None:
        """Return the label of a way; None if it is not known yet."""
        return self._labels.get(way)

    @property
    def turns(self) -> list[tuple[str, int, int]]:
        """Return label, repeat and end of all runs, in order.

        The first repeat has all ways. Each further one has ``auto`` and features kept by hand, which take
        turns to be first, and the rivals as long as they are some.
        """
        runs = []
        for repeat in self.setting.measured:
            ends = {way: self.setting.ends_of(way) for way in (NONE, HAND, AUTO, PLAIN)}
            if repeat > 1:
                ends = {HAND: ends[HAND], **self.rivals, AUTO: ends[AUTO]}
            order = [way for way in ends if way in self._labels]
            if repeat % 2 == 0:
                order.reverse()
            runs += [(self._labels[way], repeat, ends[way]) for way in order]
        return runs

    @property
    def rivals(self) -> dict[str, int]:
        """Return the ways besides features kept by hand that may be the best other one, and up to which end.

        They are known after the first repeat.
        """
        first = {way: self.rows(self.label(way), 1).get(1) for way in OTHERS}
        ends_s = {way: row["ends_s"] for way, row in first.items() if row is not None}
        near: dict[str, int] = {}
        for end in self.setting.judged:
            there = {way: each[end - 1] for way, each in ends_s.items() if len(each) >= end}
            near |= {way: end for way, s in there.items() if s <= RIVAL * min(there.values())}
        near.pop(HAND, None)
        return near

    @property
    def next_turn(self) -> list[tuple[str, int, int]]:
        """Return what is missing of the first repeat that is not whole."""
        left = [run for run in self.turns if self.why_not(*run[:2]) is None]
        return [run for run in left if run[1] == left[0][1]]

    @cached_property
    def missing(self) -> str:
        """Return how much is still missing, or an empty text when the setting is finished."""
        if self.unswept:
            return "the sweep of forms is not done"
        if self.reference is None:
            return "not begun"
        there = sum(self.why_not(*run[:2]) is not None for run in self.turns)
        return f"{there} of {len(self.turns)} runs" if there < len(self.turns) else ""

    # --------------------------------------------------------------------------------- how they compare

    def ends_s(self, way: str, end: int) -> dict[int, float]:
        """Return the seconds until an end of the runs that count, by repeat."""
        return {repeat: row["ends_s"][end - 1] for repeat, row in self.rows(self.label(way), end).items()}

    def spread(self, way: str, end: int) -> Spread | None:
        """Return the seconds until an end; None if no run counts."""
        seconds = self.ends_s(way, end)
        return Spread.of(seconds.values()) if seconds else None

    def best_other(self, end: int) -> str | None:
        """Return the way with the least median of those that ``auto`` must not be behind."""
        spreads = {way: spread for way in OTHERS if (spread := self.spread(way, end)) is not None}
        return min(spreads, key=lambda way: spreads[way].median, default=None)

    def ratio(self, one: str, other: str, end: int) -> Interval | None:
        """Return the seconds of one way over those of another in the repeats that both have."""
        ones, others = self.ends_s(one, end), self.ends_s(other, end)
        both = sorted(ones.keys() & others.keys())
        return ratio_interval([ones[at] for at in both], [others[at] for at in both])

    def over_best(self, end: int) -> Interval | None:
        """Return the seconds of ``auto`` over those of the best other way."""
        best = self.best_other(end)
        return None if best is None else self.ratio(AUTO, best, end)

    def figure(self, way: str, *path: str) -> float:
        """Return the median of a figure of whole runs, by its path in the record; not a number of no run."""
        values = []
        for row in self.rows(self.label(way), self.setting.ends_of(way)).values():
            value: Any = row
            for part in path:
                value = value[part]
            values.append(float(value))
        return statistics.median(values) if values else math.nan

    def equal_bits(self, way: str) -> tuple[int, int]:
        """Return how many runs of a way had the losses of the reference to the bit, and how many count."""
        rows = self.rows(self.label(way), 1).values()
        wanted = self.reference["losses"] if self.reference is not None and rows else []
        pairs = [(row["losses"][: len(wanted)], wanted[: len(row["losses"])]) for row in rows]
        return sum(losses == those for losses, those in pairs), len(rows)

    def furthest(self, way: str) -> float:
        """Return the largest relative difference of a loss from the reference's."""
        wanted: Sequence[float] = self.reference["losses"] if self.reference is not None else ()
        rows = self.rows(self.label(way), 1).values()
        pairs = ((loss, right) for row in rows for loss, right in zip(row["losses"], wanted, strict=False))
        return max((abs(loss / right - 1) for loss, right in pairs), default=math.nan)
