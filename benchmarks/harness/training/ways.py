"""Compare an epoch by each policy's plan with the plain way: a loop over a ``DataLoader`` at its best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from benchmarks.harness.measuring import Spread
from benchmarks.harness.records import Deadline, Records
from benchmarks.harness.training.plans import LOADER, Found, Setting, alike, run_of
from benchmarks.harness.training.rig import Rig, run_once

PLAIN = "plain"
"""The way without upriver: a ``DataLoader`` at its best."""


@dataclass(frozen=True)
class Ways:
    """A setting and its records: the epochs of some policies' choices, and of the plain way.

    Attributes:
        policies: The policies to compare.
        forms: Labels of the plain loop's forms, among which the best is sought.
    """

    setting: Setting
    records: Records
    policies: ClassVar[tuple[str, ...]]
    forms: ClassVar[tuple[str, ...]]

    @cached_property
    def found(self) -> Found:
        """Return the plans, the policies' choices and the reference."""
        return Found(self.setting, self.records)

    @property
    def unsplit(self) -> str:
        """Return the cut that offloads nothing and gives the reference."""
        return self.found.unsplit

    @property
    def sweep(self) -> tuple[str, ...]:
        """Return the forms of the loop to search; those of a quick form only show that it works."""
        return self.forms if self.setting.repeats > 1 else self.forms[:2]

    def _row(self, label: str, repeat: int) -> dict[str, Any] | None:
        return run_of(self.records, self.setting, label, repeat)

    def why_not(self, label: str, repeat: int) -> str | None:
        """Return why a run does not count: empty when it does, None when it does not exist."""
        row, reference = self._row(label, repeat), self._row(self.unsplit, 0)
        if not label.startswith(LOADER) or row is None or "error" in row:
            return self.found.why_not(label, repeat)
        if repeat == 0:  # a run of the sweep, whose samples come in another order
            return ""
        if reference is None or "losses" not in reference:
            return "no reference"
        return (
            ""
            if alike(row["losses"], reference["losses"], tolerance=self.setting.loss_tolerance)
            else "other losses"
        )

    @property
    def not_counted(self) -> list[str]:
        """Return the runs that do not count, and why."""
        if self.found.plan is None:
            return []
        labels = dict.fromkeys((self.unsplit, *self.sweep, *self.labels))
        return [
            f"{self.setting.key}, {label}, {repeat}: {why}"
            for label in labels
            for repeat in (0, *self.setting.measured)
            if (why := self.why_not(label, repeat))
        ]

    def rows(self, label: str, repeats: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return the records of the runs that count, of all repeats but the sweep's without ``repeats``."""
        repeats = self.setting.measured if repeats is None else repeats
        found = [self._row(label, repeat) for repeat in repeats if self.why_not(label, repeat) == ""]
        return [row for row in found if row is not None]

    @cached_property
    def best_loader(self) -> str | None:
        """Return the fastest loop of the sweep; None before its end, or if none counts."""
        if any(self.why_not(label, 0) is None for label in self.sweep):
            return None
        seconds = {label: rows[0]["seconds"] for label in self.sweep if (rows := self.rows(label, [0]))}
        return min(seconds, key=seconds.__getitem__) if seconds else None

    @cached_property
    def ways(self) -> dict[str, str | None]:
        """Return each way's choice, as records name it; None where it does not fit, or is not known yet."""
        return {name: self.found.choices.get(name) for name in self.policies} | {PLAIN: self.best_loader}

    @property
    def labels(self) -> list[str]:
        """Return the labels of the runs that take turns."""
        return list(dict.fromkeys(label for label in self.ways.values() if label is not None))

    @cached_property
    def missing(self) -> str:
        """Return how much is still missing, or an empty text when the setting is finished."""
        if self.found.plan is None:
            return "not begun"
        if any(self.why_not(label, 0) is None for label in (self.unsplit, *self.sweep)):
            return "the loader's sweep is not done"
        wanted = [(label, repeat) for label in self.labels for repeat in self.setting.measured]
        there = sum(self.why_not(*each) is not None for each in wanted)
        return f"{there} of {len(wanted)} repeats run" if there < len(wanted) else ""

    def seconds(self, name: str) -> Spread | None:
        """Return the seconds of a way's repeats, or None if too few count."""
        label = self.ways[name]
        rows = self.rows(label) if label is not None else []
        enough = len(rows) >= self.setting.least_repeats
        return Spread.of(float(row["seconds"]) for row in rows) if enough else None

    def megabytes(self, name: str) -> float:
        """Return the median of the megabytes that crossed the link to the training side, by its counters."""
        rows = self.rows(self.ways[name] or "")
        return statistics.median(float(row["bytes_from_storage"]) for row in rows) / 1e6

    def cpu_s(self, name: str, side: str) -> float:
        """Return the median of the core seconds that a side computed."""
        return statistics.median(float(row["cpu_s"][side]) for row in self.rows(self.ways[name] or ""))

    def over_plain(self, name: str) -> float | None:
        """Return how many times as fast as the plain way this way is."""
        seconds, plain = self.seconds(name), self.seconds(PLAIN)
        return None if seconds is None or plain is None else plain.median / seconds.median


def commits_of(found: Sequence[Ways]) -> str:
    """Return the commits that some settings were measured at."""
    keys = {one.setting.key for one in found}
    rows = found[0].records.rows.values() if found else ()
    return ", ".join(sorted({str(row["commit"]) for row in rows if row.get("setting") in keys})) or "-"


def measure_ways(
    ways: Callable[[Setting, Records], Ways], rig: Rig, records: Records, deadline: Deadline
) -> None:
    """Run the missing parts of a setting: the plans, the loader's sweep, and all ways' repeats.

    Args:
        ways: Returns the ways of a setting.

    Raises:
        TimeIsUp: If the deadline passes first.
    """
    setting = rig.setting
    deadline.check()
    rig.plan(records)
    for label in (ways(setting, records).unsplit, *ways(setting, records).sweep):
        run_once(rig, records, label, 0, deadline)
    labels = ways(setting, records).labels
    for repeat in setting.measured:
        for label in labels:
            run_once(rig, records, label, repeat, deadline)
