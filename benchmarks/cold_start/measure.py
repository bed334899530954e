"""Make the records of `cold_start` under their keys: sweeps, turns, baselines, loaded models.

A record is of one way, and either complete or absent. The next start makes the records that are missing, that
were made by other code, or that failed and were not tried again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from benchmarks.cold_start.settings import (
    OURS,
    PARTS,
    QUICK_KNOB,
    STREAMED,
    SWEEP_EVEN,
    SWEEP_NEAR,
    SWEEPS,
    WAYS,
    Choice,
    Setting,
    Way,
    forms_of,
    swept,
    way_of,
)
from benchmarks.cold_start.versions import Versions
from benchmarks.harness.children import Failed
from benchmarks.harness.records import Records

AFTER_REPEATS = 10
"""Processes that compare the forward pass of a loaded model with a plain one's."""

BASELINES = 3
"""Processes without a model. Their median counts."""

TRIES = 2
"""Tries of a failing record, which then stays failed until its code changes."""

SWEEP_WEIGHT = 10
"""Approximate number of processes of a sweep."""

Row = Mapping[str, Any]
Tick = Callable[[str], None]


class Asks(Protocol):
    """Run processes; see ``bed.Jobs``."""

    def shape(self, rate: float | None) -> float | None:
        """Limit the link, and return its measured rate."""

    def publish(self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]) -> dict[str, Any]:
        """Publish a model."""

    def ask(self, do: str, run: str, *, way: Way, cores: int, link: str, **spec: Any) -> dict[str, Any]:
        """Run one process."""


# ------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A record to make.

    Attributes:
        key: Key of the record.
        setting: Setting of the record.
        do: Action of a process: ``run``, ``parts``, ``baseline``, ``after``, or ``sweep``, many runs.
        run: Name of the way, as in ``Setting.runs``.
    """

    key: str
    setting: Setting
    do: str
    run: str

    @property
    def ours(self) -> bool:
        """Return whether a failure of this task is a failure of upriver."""
        return self.do in ("parts", "after") or way_of(self.run) in STREAMED

    @property
    def weight(self) -> int:
        """Return the approximate number of processes."""
        return SWEEP_WEIGHT if self.do == "sweep" else 1

    def version(self, versions: Versions) -> str:
        """Return the version of the code that the record depends on."""
        return versions.of("run" if self.do == "sweep" else self.do, self.run)

    def is_there(self, records: Records, versions: Versions, since: float = -math.inf) -> bool:
        """Return whether the record exists with this code.

        A turn's run must also be of this start or a later one.
        """
        row = records.rows.get(self.key, {})
        if row.get("version") != self.version(versions):
            return False
        if self.do == "run" and row["begun"] < since:
            return False
        if self.do == "sweep" and row.get("knobs") != list(WAYS[self.run].knobs):
            return False
        return "error" not in row or row["tries"] >= TRIES


def sweep_key(setting: Setting, way: str) -> str:
    """Return the key of a way's best knob on a setting's link."""
    where = swept(setting)
    return f"sweep|{where.model}-{where.link}|{way}"


def turn_key(setting: Setting, number: int, run: str) -> str:
    """Return the key of one run of one turn, or of the parts of the bound."""
    return f"{setting.key}|turn{number}|{run}"


def baseline_key(setting: Setting, number: int, way: str) -> str:
    """Return the key of a process without a model, which does not depend on the link."""
    return f"{setting.model}-{setting.cores}core|baseline{number}|{way}"


def after_key(setting: Setting, number: int) -> str:
    """Return the key of one comparison of a loaded model with plain ones."""
    return f"{setting.key}|after{number}"


def has_after(setting: Setting) -> bool:
    """Return whether the setting compares forward passes of loaded models: one sample, one core, any link."""
    return has_memory(setting) and setting.gbit is None and setting.timed


def has_memory(setting: Setting) -> bool:
    """Return whether the memory goal applies to the setting."""
    return setting.batch == 1 and setting.one_core


def narrowed(setting: Setting, ways: Collection[str], repeats: int | None = None) -> Setting:
    """Return a setting with its runnable ways, and with at most this many turns."""
    kept = tuple(way for way in setting.ways if way in ways)
    turns = setting.repeats if repeats is None else min(repeats, setting.repeats)
    return replace(setting, ways=kept, repeats=turns)


def tasks(setting: Setting, number: int, *, sweeps: bool = True) -> list[Task]:
    """Return all tasks of one turn of a setting, in order.

    Args:
        setting: With the ways that can be run.
        number: Number of the turn.
        sweeps: Whether knobs are swept at all, and memory is compared with that of imports.
    """
    if number >= setting.repeats:
        return []
    found = [(sweep_key(setting, way), "sweep", way) for way in setting.ways] if sweeps else []
    if sweeps and has_memory(setting) and number < BASELINES:
        found += [(baseline_key(setting, number, way), "baseline", way) for way in setting.ways]
    for run in setting.turn(number):
        way = ("sequential" if "sequential" in setting.ways else OURS) if run == PARTS else run
        found.append((turn_key(setting, number, run), "parts" if run == PARTS else "run", way))
    if has_after(setting) and number < AFTER_REPEATS:
        found.append((after_key(setting, number), "after", OURS))
    return [Task(key=key, setting=setting, do=do, run=run) for key, do, run in found]


def missing(
    setting: Setting, records: Records, versions: Versions, number: int | None = None, *, sweeps: bool = True
) -> list[Task]:
    """Return the tasks of a setting, or of one turn, without a run by this code or close to upriver's run."""
    wanted: dict[str, Task] = {}
    for each in range(setting.repeats) if number is None else (number,):
        turn = tasks(setting, each, sweeps=sweeps)
        since = begun_since(turn, records, versions)
        wanted |= {task.key: task for task in turn if not task.is_there(records, versions, since)}
    return list(wanted.values())


def begun_since(turn: Iterable[Task], records: Records, versions: Versions) -> float:
    """Return the start time of the benchmark that ran upriver's part of a turn.

    Earlier runs did not take turns with it.
    """
    for task in turn:
        if task.do == "run" and task.run == OURS:
            return records.rows[task.key]["begun"] if task.is_there(records, versions) else math.inf
    return -math.inf


# --------------------------------------------------------------------------------------------- measuring


class Measures:
    """Run missing tasks, and store their records.

    Args:
        jobs: Runs processes.
        records: Store of the records.
        settings: All settings to run, so that models are published once for all of them.
        versions: Versions of the code that processes run.
        tick: Called at the start of each task.
        commit: Commit of the code.
        sweeps: Whether knobs are swept; if not, all ways have the same one.

    Attributes:
        settings: As given.
    """

    def __init__(
        self,
        jobs: Asks,
        records: Records,
        settings: Iterable[Setting],
        versions: Versions,
        tick: Tick,
        *,
        commit: str = "unknown",
        sweeps: bool = True,
    ) -> None:
        self._jobs, self._records, self._versions, self._tick = jobs, records, versions, tick
        self.settings, self._sweeps = tuple(settings), sweeps
        self._published: dict[str, dict[str, Any]] = {}
        self._copied: set[tuple[str, str]] = set()
        self._learnt: set[tuple[str, str, int]] = set()
        self._last = ""
        self._begun = {"commit": commit, "begun": round(time.time())}

    def missing(self, setting: Setting, number: int | None = None) -> list[Task]:
        """Return the missing tasks; see the function of this name."""
        return missing(setting, self._records, self._versions, number, sweeps=self._sweeps)

    def make(self, task: Task) -> Row:
        """Make one record. The reason for a process's failure is part of it.

        Raises:
            Failed: If its model cannot be published.
        """
        setting = swept(task.setting) if task.do == "sweep" else task.setting
        carried = self._jobs.shape(setting.rate)
        stored = self._stored(setting.model)
        facts = {**self._begun, "version": task.version(self._versions), "follows": self._last}
        facts |= {"load": round(os.getloadavg()[0], 2), "carried": carried, **stored}
        if packages := self._versions.packages(task.run):
            facts["packages"] = packages
        if task.do == "sweep":
            found = self._sweep(setting, task.run)
        elif task.do == "run":
            found = self._right(setting, task.run)
        else:
            found = self._tried(setting, task.run, self.choice(setting, task.run), do=task.do)
        if "error" in found:
            before = self._records.rows.get(task.key, {})
            same = before.get("version") == facts["version"]
            found["tries"] = 1 + (before.get("tries", 0) if same else 0)
        self._last = task.run if task.do == "run" else task.do
        row = {**facts, **found}
        self._records.add(task.key, row)
        return row

    def _stored(self, model: str) -> dict[str, Any]:
        """Publish a model in every form that any setting needs, and return its size."""
        if model not in self._published:
            self._tick(f"{model}: publishing")
            own = [setting for setting in self.settings if setting.model == model]
            if self._sweeps:
                own += [each for each in map(swept, self.settings) if each.model == model]
            forms = list(dict.fromkeys(form for setting in own for form in forms_of(setting)))
            # Stages measured alone read upriver's files, whichever other ways take part.
            forms = list(dict.fromkeys(["upriver.safetensors", *forms]))
            calls = {(setting.batch, setting.cores) for setting in own}
            self._published[model] = self._jobs.publish(model, forms, calls)
        return self._published[model]

    def choice(self, setting: Setting, run: str) -> Choice:
        """Return the knob and the assignment of a way on a setting's link."""
        if not self._sweeps:
            return Choice(knob=QUICK_KNOB)
        return Choice(**self._records.rows[sweep_key(setting, way_of(run))]["choice"])

    def _ask(self, setting: Setting, do: str, run: str, choice: Choice) -> dict[str, Any]:
        self._tick(f"{setting.key}: {run}" + ("" if do == "run" else f", {do}"))
        return self._jobs.ask(
            do,
            run,
            way=WAYS[way_of(run)],
            cores=setting.cores,
            link=setting.link,
            model=setting.model,
            batch=setting.batch,
            quick=not self._sweeps,
            **asdict(choice),
        )

    def _right(self, setting: Setting, run: str) -> dict[str, Any]:
        """Run a way. If assigned tensors change low bits, copy tensors from then on."""
        choice = self.choice(setting, run)
        if (setting.key, way_of(run)) in self._copied:
            choice = replace(choice, assign=False)
        known = (setting.link, run, choice.knob) in self._learnt
        if self._sweeps and way_of(run) in STREAMED and not known:
            self._tried(setting, run, choice)  # uncounted run that stores the link's rate
        found = self._tried(setting, run, choice)
        if choice.assign and found.get("equal") is False:
            self._copied.add((setting.key, way_of(run)))
            return self._right(setting, run)
        return {**found, "assign": choice.assign}

    def _tried(self, setting: Setting, run: str, choice: Choice, *, do: str = "run") -> dict[str, Any]:
        if do == "run":
            self._learnt.add((setting.link, run, choice.knob))
        try:
            return self._ask(setting, do, run, choice)
        except Failed as error:
            return {"error": _what_of(error)}

    def _sweep(self, setting: Setting, way: str) -> dict[str, Any]:
        """Find a way's best knob on a link, with tensors copied or, where possible, assigned."""
        knobs, assigns = WAYS[way].knobs, (False, True) if WAYS[way].assigns else (False,)
        rows: dict[Choice, list[dict[str, Any]]] = {
            Choice(knob=knob, assign=assign): [] for assign in assigns for knob in knobs
        }
        wanted = list(rows)
        for _ in range(SWEEPS):
            for choice in wanted:
                rows[choice].append(self._tried(setting, way, choice))
            seconds = {choice: _shortest(tried) for choice, tried in rows.items()}
            wanted = [each for each in wanted if seconds[each] <= SWEEP_NEAR * min(seconds.values())]
            wanted = [each for each in wanted if seconds[each] < float("inf")]
        near_s = SWEEP_EVEN * min(seconds.values())
        even = [choice for choice in rows if seconds[choice] <= near_s]
        best = min(even, key=lambda choice: (choice.knob, seconds[choice]))
        found: dict[str, Any] = {"choice": asdict(best), "knobs": list(knobs), "tried": []}
        for choice, tried in rows.items():
            took = seconds[choice] if seconds[choice] < float("inf") else None
            found["tried"].append({**asdict(choice), "seconds": took, "runs": len(tried)})
        if seconds[best] == float("inf"):
            errors = [row["error"] for tried in rows.values() for row in tried if "error" in row]
            found["error"] = errors[0] if errors else "no answer is the model's"
        return found


def _what_of(error: Failed) -> str:
    """Return which process failed, and its last message, without this machine's paths."""
    lines = str(error).splitlines()
    return "\n".join(dict.fromkeys((lines[0], lines[-1])))


def _shortest(rows: Sequence[Row]) -> float:
    """Return the shortest time of a way with this choice; infinite after a wrong or missing answer."""
    right = [float(row["after_imports_s"]) for row in rows if row.get("equal")]
    return min(right) if len(right) == len(rows) else float("inf")
