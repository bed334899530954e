"""What the records of `cold_start.py` say of one setting, and which goals it meets."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from scipy.stats import quantile_test

from _common import Spread
from _planned import Records
from cold_bound import Parts
from cold_measure import BASELINES, baseline_key, has_memory, sweep_key
from cold_models import SMALL
from cold_settings import OURS, PARTS, PLAIN, STREAMED, WAYS, Setting, way_of

NEAR_BEST, LEAST_SHARE, MOST_MEMORY, MOST_AFTER = 0.03, 0.85, 1.1, 0.01
MOST_FAILED = 0.2
"""Of a way's turns; one that fails or answers wrongly more often is out of the comparison."""

SURE = 0.95
"""Of the interval that is told with a median; see `Found.behind_between`."""

JUDGED_GBIT = 1.0
"""The link whose bound is a goal."""

JUDGED_BYTES = 90_000_000
"""Weights of which a tenth is more than what a client of a store takes whatever it loads."""

STARTED, IMPORTED, EVENED = "total_s", "after_imports_s", "evened_s"
"""The clocks: the parent's, from process start; the process's own, from the end of its imports; and the
parent's, had imports taken what is usual for them, where that is known (`cold_imports`)."""

COMPARED: Mapping[str, tuple[str, str | None]] = {
    "fastest": (STARTED, None),
    "fastest, evened": (EVENED, None),
    "fastest after imports": (IMPORTED, None),
    "fastest, plain": (STARTED, PLAIN),
    "fastest, plain, evened": (EVENED, PLAIN),
    "small": (STARTED, None),
    "small, evened": (EVENED, None),
}
"""Goals that hold upriver against the best other: by which clock, and the ending of their names."""

Row = Mapping[str, Any]


def newest(rows: Mapping[int, Row]) -> dict[int, Row]:
    """Those that are of the code by which the last one was made, by number."""
    if not rows:
        return {}
    version = max(rows.values(), key=lambda row: row["begun"])["version"]
    return {number: row for number, row in rows.items() if row["version"] == version}


class Found:
    """What the records say of one setting.

    Args:
        setting: Which, with all ways that there are.
        records: All that were kept. Of each run those count that are of the newest code.

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
        keys = {way: sweep_key(setting, way) for way in setting.ways}
        self.sweeps: dict[str, Row] = {
            way: records.rows[key]
            for way, key in keys.items()
            if key in records and "choice" in records.rows[key]
        }

    def even(self, imports: Mapping[tuple[int, str], float]) -> None:
        """Have rows say what their runs had taken from process start with other imports, under ``EVENED``.

        Args:
            imports: Seconds of each turn's each run that answered rightly.
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
        """Whether any turn has been run in which upriver took part."""
        return bool(self.rows(OURS))

    # ------------------------------------------------------------------------------------------- runs

    def rows(self, run: str) -> list[Row]:
        """Of every turn in which a run was tried."""
        return list(self.turns.get(run, {}).values())

    def right(self, run: str) -> list[Row]:
        """Of every turn in which it answered rightly."""
        return _right(self.rows(run))

    def usable(self, run: str) -> bool:
        """Whether it can be compared: it answered rightly, but for a few times at most."""
        tried, right = len(self.rows(run)), len(self.right(run))
        return right > 0 and tried - right <= MOST_FAILED * tried

    @cached_property
    def runs(self) -> list[str]:
        """All that can be compared, in the order of the ways."""
        return [run for run in self.setting.runs if self.usable(run)]

    @property
    def out(self) -> list[str]:
        """Runs that were tried and cannot be compared."""
        return [run for run in self.setting.runs if self.rows(run) and not self.usable(run)]

    def spread(self, run: str, clock: str) -> Spread:
        """A figure of a run, in seconds: ``clock`` may be any that its rows have."""
        return Spread.of(row[clock] for row in self.right(run))

    def best_other(self, clock: str, ending: str | None = None) -> str | None:
        """Of all but upriver's own way, the one with the lowest median.

        Args:
            clock: Which.
            ending: Of the names: with our construction, without, or None for either.
        """
        others = [run for run in self._others(ending) if self._seconds(run, clock)]
        return min(others, key=lambda run: self.spread(run, clock).median, default=None)

    def _others(self, ending: str | None) -> list[str]:
        """All that upriver's own way is held against."""
        return [run for run in self.runs if way_of(run) != OURS and _ends(run, ending)]

    def pairs(self, one: str, other: str) -> list[tuple[Row, Row]]:
        """Two runs of each turn in which both answered rightly."""
        ours, theirs = self.turns.get(one, {}), self.turns.get(other, {})
        both = [(ours[number], theirs[number]) for number in ours if number in theirs]
        return [pair for pair in both if len(_right(pair)) == len(pair)]

    def behind(self, clock: str, ending: str | None = None) -> float | None:
        """How much longer upriver takes than the best other: the median over turns in which both ran.

        Of many that are as good one is the best by chance. So in each turn upriver is held against the best
        of the others by all turns but that one, which has been lucky elsewhere, if at all.

        Args:
            clock: Which.
            ending: As for `best_other`; upriver is without its construction where the others are.
        """
        ratios = self._ratios(clock, ending)
        return statistics.median(ratios) - 1 if ratios else None

    def behind_between(self, clock: str, ending: str | None = None) -> tuple[float, float] | None:
        """Between what `behind` would lie after any number of such turns, with a certainty of `SURE`.

        Ranks alone decide, however times are spread. None where there are too few turns to say.
        """
        ratios = self._ratios(clock, ending)
        if not ratios:
            return None
        low, high = quantile_test(ratios).confidence_interval(SURE)
        return (float(low) - 1, float(high) - 1) if math.isfinite(low) and math.isfinite(high) else None

    def _ratios(self, clock: str, ending: str | None) -> list[float]:
        """Of each turn in which both answered rightly: upriver's time over the best other's."""
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
        """Of each turn in which a run answered rightly, by its number; none where a clock is not there."""
        rows = self.turns.get(run, {}).items()
        return {number: row[clock] for number, row in rows if row.get("equal") and clock in row}

    @property
    def apart(self) -> int:
        """Turns in which upriver ran in another start of the benchmark than its best competitor."""
        best = self.best_other(STARTED)
        return sum(one["begun"] != other["begun"] for one, other in self.pairs(OURS, best or OURS))

    def told(self) -> list[str]:
        """Which runs failed, answered wrongly or did not end, and how."""
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
        """What the stages take by themselves; None if that was not measured."""
        return Parts.of(self._parts.values(), self.setting.rate) if self._parts else None

    @property
    def bound_s(self) -> float | None:
        """The least time from a process that has its imports to an answer; None if it is not known."""
        return None if self.parts is None else self._bound(self.parts)

    def _bound(self, parts: Parts) -> float:
        return parts.bound(one_core=self.setting.one_core)

    def share(self, run: str) -> float | None:
        """Of the bound: 1 were as fast as can be. None where no turn has both.

        The median over turns of each one's own bound over its run: a core of one day may be twice as fast as
        another day's, and the bound is not measured in every turn.
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
        """``nbytes`` and ``tensors`` of the model."""
        return self.rows(OURS)[0]

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return int(self.stored["nbytes"])

    @property
    def call_bytes(self) -> int | None:
        """What a call takes beside the weights: activations, and what kernels reserve; the least of all."""
        return min((int(row["call_bytes"]) for row in self._parts.values()), default=None)

    def above(self, run: str, field: str = "hwm_bytes") -> float | None:
        """The highest peak above a process that only imports, in bytes; None where it was not measured.

        A process that only imports is taken when it is done with that, as what its imports took for a while
        is there again for the weights. Of its control group there is the peak alone.

        Args:
            run: Which.
            field: ``hwm_bytes`` of the process, ``group_bytes`` of its control group.
        """
        name = "rss_bytes" if field == "hwm_bytes" else field
        before = [row[name] for row in self.baselines.get(way_of(run), []) if name in row]
        peaks = [row[field] for row in self.right(run) if field in row]
        return float(max(peaks) - statistics.median(before)) if before and peaks else None

    # ------------------------------------------------------------------------------------- afterwards

    def after(self, who: str) -> Spread | None:
        """Forward passes of a model over the plain one's: a median for each process; None if not run."""
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
        """Whether the loaded model is as fast; None where two plain ones differ by more than the goal is."""
        arrived, control = self.after("arrived"), self.after("control")
        if arrived is None or control is None or abs(control.median - 1) > MOST_AFTER:
            return None
        return abs(arrived.median - 1) <= MOST_AFTER

    # ------------------------------------------------------------------------------------------ goals

    @property
    def goals(self) -> dict[str, bool]:
        """Each goal that says something of this setting, and whether it is met."""
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
        """Whether upriver would stay behind in a goal of `COMPARED` after any number of such turns."""
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
        """Answers of ours that are not the model's, or that are not there."""
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
    """Of all turns but one, or of that one if there is no other."""
    return statistics.median([time for each, time in times.items() if each != number] or times.values())


def _ends(run: str, ending: str | None) -> bool:
    return ending is None or run.endswith(PLAIN) == (ending == PLAIN)


def wrong(found: Sequence[Found]) -> list[str]:
    """Every answer of ours that is not the model's, and every peer whose answers never are."""
    told = [each for one in found for each in one.wrong()]
    for way in WAYS:
        runs = [(one, run) for one in found for run in (way, way + PLAIN) if one.rows(run)]
        if runs and way not in STREAMED and not any(one.right(run) for one, run in runs):
            told.append(f"{way} answered rightly nowhere, so nothing is compared with it")
    return told
