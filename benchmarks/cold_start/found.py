"""Evaluate the records of `cold_start` for one setting, and the goals that it meets."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from benchmarks.cold_start.bound import Parts
from benchmarks.cold_start.measure import BASELINES, baseline_key, has_memory, sweep_key
from benchmarks.cold_start.models import SMALL
from benchmarks.cold_start.settings import OURS, PARTS, PLAIN, STREAMED, WAYS, Setting, way_of
from benchmarks.harness.measuring import Spread
from benchmarks.harness.records import Records

NEAR_BEST, LEAST_SHARE, MOST_MEMORY, MOST_AFTER = 0.03, 0.85, 1.1, 0.01
MOST_FAILED = 0.2
"""Largest share of failed or wrong turns of a way. Above it, the way is not compared."""

SURE = 0.95
"""Confidence of the interval that is reported with a median; see `Found.behind_between`."""

JUDGED_GBIT = 1.0
"""The link whose bound is a goal."""

JUDGED_BYTES = 90_000_000
"""Least weights of which a tenth is more than the memory that a store's client needs for any load."""

STARTED, IMPORTED, EVENED = "total_s", "after_imports_s", "evened_s"
"""The clocks: the parent's, from process start; the process's own, from the end of its imports; and the
parent's with usual import times, where these are known (`imports`)."""

COMPARED: Mapping[str, tuple[str, str | None]] = {
    "fastest": (STARTED, None),
    "fastest, evened": (EVENED, None),
    "fastest after imports": (IMPORTED, None),
    "fastest, plain": (STARTED, PLAIN),
    "fastest, plain, evened": (EVENED, PLAIN),
    "small": (STARTED, None),
    "small, evened": (EVENED, None),
}
"""Goals that compare upriver with the best other way: by clock, and by the ending of the ways' names."""

Row = Mapping[str, Any]


def newest(rows: Mapping[int, Row]) -> dict[int, Row]:
    """Return the rows with the code version of the last row, by number."""
    if not rows:
        return {}
    version = max(rows.values(), key=lambda row: row["begun"])["version"]
    return {number: row for number, row in rows.items() if row["version"] == version}


class Found:
    """The records of one setting.

    Args:
        setting: The setting, with all its ways.
        records: All stored records. Of each run those of the newest code count.

    Attributes:
        turns: Rows of each run, by the number of the turn.
    """

    def __init__(self, setting: Setting, records: Records) -> None:
        self.setting = setting
        turns: dict[str, dict[int, Row]] = defaultdict(dict)
        afters: dict[int, Row] = {}
        for key, row in records.rows.items():
            if found := re.fullmatch(rf"{re.escape(setting.key)}\|(turn|after)(\d+)(?:\|(.*))?", key):
                kind, number, run = found.groups()
                (turns[run] if kind == "turn" else afters)[int(number)] = row
        self.turns = {run: newest(rows) for run, rows in turns.items()}
        parts, after = self.turns.pop(PARTS, {}), list(newest(afters).values())
        self._parts = {number: row for number, row in parts.items() if row.get("equal")}
        self.afters = _right(after)
        self._loaded_wrongly = any(row.get("equal") is False for row in (*parts.values(), *after))
        self.baselines: dict[str, list[Row]] = {}
        for way in setting.ways:
            keys = {number: baseline_key(setting, number, way) for number in range(BASELINES)}
            kept = {number: records.rows[key] for number, key in keys.items() if key in records}
            self.baselines[way] = [row for row in newest(kept).values() if "error" not in row]
        sweeps = {way: sweep_key(setting, way) for way in setting.ways}
        self.sweeps: dict[str, Row] = {
            way: records.rows[key]
            for way, key in sweeps.items()
            if key in records and "choice" in records.rows[key]
        }

    def even(self, imports: Mapping[tuple[int, str], float]) -> None:
        """Add to each row the time from process start with usual imports, under ``EVENED``.

        Args:
            imports: Import seconds of each correct run of each turn.
        """
        for run, rows in self.turns.items():
            self.turns[run] = {
                number: {**row, EVENED: row[STARTED] - row["imported_s"] + imports[number, run]}
                if (number, run) in imports
                else row
                for number, row in rows.items()
            }

    @property
    def begun(self) -> bool:
        """Return whether any turn with upriver has run."""
        return bool(self.rows(OURS))

    # ------------------------------------------------------------------------------------------- runs

    def rows(self, run: str) -> list[Row]:
        """Return the rows of every turn in which a run was tried."""
        return list(self.turns.get(run, {}).values())

    def right(self, run: str) -> list[Row]:
        """Return the rows of every turn in which a run answered correctly."""
        return _right(self.rows(run))

    def usable(self, run: str) -> bool:
        """Return whether a run can be compared: it answered correctly, with few exceptions."""
        tried, right = len(self.rows(run)), len(self.right(run))
        return right > 0 and tried - right <= MOST_FAILED * tried

    @cached_property
    def runs(self) -> list[str]:
        """Return all comparable runs, in the order of the ways."""
        return [run for run in self.setting.runs if self.usable(run)]

    @property
    def out(self) -> list[str]:
        """Return the runs that were tried and cannot be compared."""
        return [run for run in self.setting.runs if self.rows(run) and not self.usable(run)]

    def spread(self, run: str, clock: str) -> Spread:
        """Return a figure of a run, in seconds. ``clock`` may be any field of its rows."""
        return Spread.of(row[clock] for row in self.right(run))

    def best_other(self, clock: str, ending: str | None = None) -> str | None:
        """Return the run with the lowest median, except upriver's own way.

        Args:
            clock: Name of the clock.
            ending: Of the names: with our construction, without, or None for either.
        """
        others = [run for run in self._others(ending) if self._seconds(run, clock)]
        return min(others, key=lambda run: self.spread(run, clock).median, default=None)

    def _others(self, ending: str | None) -> list[str]:
        """Return all runs that upriver's own way is compared with."""
        return [run for run in self.runs if way_of(run) != OURS and _ends(run, ending)]

    def pairs(self, one: str, other: str) -> list[tuple[Row, Row]]:
        """Return two runs' rows of each turn in which both answered correctly."""
        ours, theirs = self.turns.get(one, {}), self.turns.get(other, {})
        both = [(ours[number], theirs[number]) for number in ours if number in theirs]
        return [pair for pair in both if len(_right(pair)) == len(pair)]

    def behind(self, clock: str, ending: str | None = None) -> float | None:
        """Return how much longer upriver takes than the best other: the median over turns with both.

        Of several equal ways one is the best by chance. So each turn compares upriver with the best other way
        of all remaining turns. That way was lucky elsewhere, if at all.

        Args:
            clock: Name of the clock.
            ending: As for `best_other`; upriver is without its construction where the others are.
        """
        ratios = self._ratios(clock, ending)
        return statistics.median(ratios) - 1 if ratios else None

    def behind_between(self, clock: str, ending: str | None = None) -> tuple[float, float] | None:
        """Return the interval of `behind` after any number of such turns, with confidence `SURE`.

        The interval uses ranks alone, so any distribution of the times is allowed. It is None with too few
        turns.
        """
        ratios = self._ratios(clock, ending)
        if not ratios:
            return None
        from scipy.stats import quantile_test  # which takes 2 s to import

        low, high = quantile_test(ratios).confidence_interval(SURE)
        return (float(low) - 1, float(high) - 1) if math.isfinite(low) and math.isfinite(high) else None

    def _ratios(self, clock: str, ending: str | None) -> list[float]:
        """Return upriver's time over the best other's, for each turn in which both answered correctly."""
        ours = OURS + (ending or "")
        if not self.usable(ours):
            return []
        others = [self._seconds(run, clock) for run in self._others(ending)]
        found = []
        for number, own in self._seconds(ours, clock).items():
            if rivals := [times for times in others if number in times]:
                best = min(rivals, key=lambda times: _median_without(times, number))
                found.append(own / best[number])
        return found

    def _seconds(self, run: str, clock: str) -> dict[int, float]:
        """Return the seconds of each correct turn of a run, by number; empty where a clock is missing."""
        rows = self.turns.get(run, {}).items()
        return {number: row[clock] for number, row in rows if row.get("equal") and clock in row}

    @property
    def apart(self) -> int:
        """Return the turns in which upriver and its best competitor ran in different benchmark starts."""
        best = self.best_other(STARTED)
        return sum(one["begun"] != other["begun"] for one, other in self.pairs(OURS, best or OURS))

    def told(self) -> list[str]:
        """Return the runs that failed, answered wrongly or did not end, and how."""
        found = []
        for run in self.turns:
            errors = [row["error"] for row in self.rows(run) if "error" in row]
            if errors:
                said = " … ".join(errors[0].splitlines())
                found.append(f"{self.setting.key}, {run}: {len(errors)} times {said}")
            for what, count in (
                ("answers are not the model's", sum(row.get("equal") is False for row in self.rows(run))),
                ("processes had to be killed after their answer", len(self._unended(run))),
            ):
                if count:
                    found.append(f"{self.setting.key}, {run}: {count} {what}")
        return found

    def _unended(self, run: str) -> list[Row]:
        return [row for row in self.rows(run) if row.get("ended") is False]

    # ------------------------------------------------------------------------------------------ bound

    @cached_property
    def parts(self) -> Parts | None:
        """Return the times of the stages alone, or None if they were not measured."""
        return Parts.of(self._parts.values(), self.setting.rate) if self._parts else None

    @property
    def bound_s(self) -> float | None:
        """Return the least time from the end of the imports to an answer; None if it is unknown."""
        return None if self.parts is None else self._bound(self.parts)

    def _bound(self, parts: Parts) -> float:
        return parts.bound(one_core=self.setting.one_core)

    def share(self, run: str) -> float | None:
        """Return the bound over a run's time: 1 is optimal. None if no turn has both.

        The result is the median over turns of each turn's bound over its run. A core may be twice as fast on
        one day as on another, and the bound is not measured in every turn.
        """
        seconds = self._seconds(run, IMPORTED)
        shares = [
            self._bound(Parts.of([row], self.setting.rate)) / seconds[number]
            for number, row in self._parts.items()
            if number in seconds
        ]
        return statistics.median(shares) if shares else None

    # ----------------------------------------------------------------------------------------- memory

    @property
    def stored(self) -> Row:
        """Return ``nbytes`` and ``tensors`` of the model."""
        return self.rows(OURS)[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights."""
        return int(self.stored["nbytes"])

    @property
    def call_bytes(self) -> int | None:
        """Return the least memory of a call without the weights: activations, and reservations of kernels."""
        return min((int(row["call_bytes"]) for row in self._parts.values()), default=None)

    def above(self, run: str, field: str = "hwm_bytes") -> float | None:
        """Return the highest peak above a process that only imports, in bytes; None if not measured.

        The importing process is measured after its imports, because the memory they used for a while is free
        again for the weights. Its control group reports the peak alone.

        Args:
            run: Name of the run.
            field: ``hwm_bytes`` of the process, ``group_bytes`` of its control group.
        """
        name = "rss_bytes" if field == "hwm_bytes" else field
        before = [row[name] for row in self.baselines.get(way_of(run), []) if name in row]
        peaks = [row[field] for row in self.right(run) if field in row]
        return float(max(peaks) - statistics.median(before)) if before and peaks else None

    # ------------------------------------------------------------------------------------- afterwards

    def after(self, who: str) -> Spread | None:
        """Return a model's forward times over the plain one's: a median for each process; None if not run."""
        if not self.afters:
            return None
        ratios = []
        for row in self.afters:
            plain = row["seconds"]["plain"]
            ratios.append(
                statistics.median(one / other for one, other in zip(row["seconds"][who], plain, strict=True))
            )
        return Spread.of(ratios)

    def after_is_even(self) -> bool | None:
        """Return whether the loaded model is as fast; None where two plain ones differ by more than that."""
        arrived, control = self.after("arrived"), self.after("control")
        if arrived is None or control is None or abs(control.median - 1) > MOST_AFTER:
            return None
        return abs(arrived.median - 1) <= MOST_AFTER

    # ------------------------------------------------------------------------------------------ goals

    @property
    def goals(self) -> dict[str, bool]:
        """Return each goal that applies to this setting, and whether it is met."""
        found: dict[str, bool] = {"right": not self.wrong()}
        if self.setting.timed:
            found |= self._speed()
        if self.setting.gbit == JUDGED_GBIT and self.bound_s is not None:
            share = self.share(OURS) if self.usable(OURS) else 0.0
            if share is not None:
                found["bound"] = share >= LEAST_SHARE
        if has_memory(self.setting) and self.nbytes >= JUDGED_BYTES:
            found |= self._memory()
        if (even := self.after_is_even()) is not None:
            found["after"] = even
        return found

    def _speed(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for goal, (clock, ending) in COMPARED.items():
            if goal.startswith("small") and self.setting.model not in SMALL:
                continue
            behind, ours = self.behind(clock, ending), OURS + (ending or "")
            if behind is not None:
                found[goal] = behind <= NEAR_BEST
            elif self.rows(ours) and not self.usable(ours):
                found[goal] = False
        return found

    def surely_behind(self, goal: str) -> bool:
        """Return whether upriver would miss a goal of `COMPARED` after any number of such turns."""
        between = self.behind_between(*COMPARED[goal])
        return between is not None and between[0] > NEAR_BEST

    def _memory(self) -> dict[str, bool]:
        above = self.above(OURS)
        if above is None:
            return {}
        found = {"memory": above <= MOST_MEMORY * self.nbytes}
        if self.call_bytes is not None:
            found["memory for weights"] = above - self.call_bytes <= MOST_MEMORY * self.nbytes
        return found

    def wrong(self) -> list[str]:
        """Return upriver's wrong or missing answers."""
        told = []
        for run in self.setting.runs:
            if way_of(run) in STREAMED and len(self.right(run)) < len(self.rows(run)):
                unequal = any(row.get("equal") is False for row in self.rows(run))
                what = "an answer is not the model's" if unequal else "an answer is missing"
                told.append(f"{self.setting.key}, {run}: {what}")
        if self._loaded_wrongly:
            told.append(f"{self.setting.key}: a loaded model's answer is not the model's")
        return told


def _right(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("equal")]


def _median_without(times: Mapping[int, float], number: int) -> float:
    """Return the median of all turns but one, or of that one if it is the only one."""
    return statistics.median([time for each, time in times.items() if each != number] or times.values())


def _ends(run: str, ending: str | None) -> bool:
    return ending is None or run.endswith(PLAIN) == (ending == PLAIN)


def wrong(found: Sequence[Found]) -> list[str]:
    """Return every wrong answer of upriver, and every peer without a right answer."""
    told = [each for one in found for each in one.wrong()]
    for way in WAYS:
        runs = [(one, run) for one in found for run in (way, way + PLAIN) if one.rows(run)]
        if runs and way not in STREAMED and not any(one.right(run) for one, run in runs):
            told.append(f"{way} answered rightly nowhere, so nothing is compared with it")
    return told
