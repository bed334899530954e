"""What `cold_start.py` runs, and under which keys it is kept: sweeps, turns, baselines, loaded models.

A record is whole or not there. The next start makes those that are missing, or that were made by other code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from _common import ROOT, commit, version_of
from _planned import Records
from cold_settings import (
    OURS,
    QUICK_KNOB,
    SWEEPS,
    SWEPT_MODEL,
    WAYS,
    Choice,
    Setting,
    Way,
    forms_of,
    swept,
    way_of,
)
from input_bed import Failed

AFTER_REPEATS = 3
"""Processes in which the forward pass of a loaded model is held against a plain one's."""

MEASURING = ("bed", "job", "measure", "models", "ways")
PACKAGES = ("coldstart", "store")
"""Modules beside this one, and parts of the package, that decide what a record's figures are."""

_here = Path(__file__).resolve().parent

Row = Mapping[str, Any]
Tick = Callable[[str], None]


class Asks(Protocol):
    """Runs processes; see ``cold_bed.Jobs``."""

    def shape(self, rate: float | None) -> None:
        """Of the link."""

    def publish(self, model: str, forms: Sequence[str], calls: Collection[tuple[int, int]]) -> dict[str, Any]:
        """A model."""

    def ask(self, do: str, run: str, *, way: Way, cores: int, link: str, **spec: Any) -> dict[str, Any]:
        """One process."""


# -------------------------------------------------------------------------------------------------- keys


def version(package: Path = ROOT / "src" / "upriver") -> str:
    """Of the code that figures depend on."""
    files = [_here / f"cold_{name}.py" for name in MEASURING]
    files += [path for part in PACKAGES for path in sorted((package / part).rglob("*.py"))]
    return version_of(files)


def sweep_key(setting: Setting) -> str:
    """Of everybody's best knob on a setting's link."""
    return f"sweep|{swept(setting).link}"


def turn_key(setting: Setting, number: int) -> str:
    """Of one turn of all ways."""
    return f"{setting.key}|turn{number}"


def baseline_key(setting: Setting) -> str:
    """Of what processes take without a model."""
    return f"{setting.key}|baseline"


def after_key(setting: Setting, number: int) -> str:
    """Of one comparison of a loaded model with plain ones."""
    return f"{setting.key}|after{number}"


def has_after(setting: Setting) -> bool:
    """Whether forward passes of loaded models are compared there: one sample, one core, any link will do."""
    return setting.batch == 1 and setting.gbit is None and setting.one_core and setting.plain


def narrowed(setting: Setting, ways: Collection[str], repeats: int | None = None) -> Setting:
    """A setting with those of its ways that can be run, and no more turns than these."""
    kept = tuple(way for way in setting.ways if way in ways)
    turns = setting.repeats if repeats is None else min(repeats, setting.repeats)
    return replace(setting, ways=kept, repeats=turns)


def missing(setting: Setting, records: Records, now: str, *, sweeps: bool = True) -> list[str]:
    """Keys of what has not been run as the code is, in the order in which it is.

    Args:
        setting: With the ways that can be run.
        records: What there is.
        now: The code's version.
        sweeps: Whether knobs are looked for at all.
    """
    keys = [sweep_key(setting)] if sweeps else []
    keys += [baseline_key(setting), *(turn_key(setting, number) for number in range(setting.repeats))]
    if has_after(setting):
        keys += [after_key(setting, number) for number in range(min(AFTER_REPEATS, setting.repeats))]
    return [key for key in keys if not _is_there(records.rows.get(key, {}), setting, now)]


def _is_there(row: Row, setting: Setting, now: str) -> bool:
    """Whether a record is of this code, and tells of every way, if of any."""
    wanted = {"choices": setting.ways, "baselines": setting.ways, "runs": setting.runs}
    return row.get("version") == now and all(
        set(names) <= set(row[field]) for field, names in wanted.items() if field in row
    )


# --------------------------------------------------------------------------------------------- measuring


class Measures:
    """Runs what is missing, and keeps it.

    Args:
        jobs: Runs processes.
        records: Where it is kept.
        settings: All that will be run, so that models are published once for all of them.
        tick: Told of what begins.
        sweeps: Whether knobs are looked for; if not, all ways have the same one.
    """

    def __init__(
        self,
        jobs: Asks,
        records: Records,
        settings: Iterable[Setting],
        tick: Tick,
        *,
        sweeps: bool = True,
    ) -> None:
        self._jobs, self._records, self._tick = jobs, records, tick
        self._settings, self._sweeps = tuple(settings), sweeps
        self._published: dict[str, dict[str, Any]] = {}
        self._copied: set[tuple[str, str]] = set()
        self.now = version()

    def make(self, setting: Setting, key: str) -> None:
        """One record.

        Raises:
            Failed: If ours cannot run; what others cannot is part of the record.
        """
        kind = key.removeprefix(f"{setting.key}|")
        if key.startswith("sweep|"):
            found = self._sweep(swept(setting))
        else:
            self._jobs.shape(setting.rate)
            stored = self._stored(setting.model)
            if kind == "baseline":
                found = {"baselines": self._baselines(setting)}
            elif kind.startswith("turn"):
                found = stored | self._turn(setting, int(kind.removeprefix("turn")))
            else:
                found = self._ask(setting, "after", OURS)
        facts = {"version": self.now, "commit": commit(), "load": round(os.getloadavg()[0], 2)}
        self._records.add(key, {**facts, **found})

    def _stored(self, model: str) -> dict[str, Any]:
        """A model that is in the store, and its size; with all that any setting asks of it."""
        if model not in self._published:
            self._tick(f"{model}: publishing")
            own = [setting for setting in self._settings if setting.model == model]
            if self._sweeps and model == SWEPT_MODEL:
                own += map(swept, self._settings)
            forms = list(dict.fromkeys(form for setting in own for form in forms_of(setting)))
            # What is measured by itself reads ours, whoever else takes part.
            forms = list(dict.fromkeys(["upriver.safetensors", *forms]))
            calls = {(setting.batch, setting.cores) for setting in own}
            self._published[model] = self._jobs.publish(model, forms, calls)
        return self._published[model]

    def choice(self, setting: Setting, run: str) -> Choice:
        """How a way is set on a setting's link."""
        if not self._sweeps:
            return Choice(knob=QUICK_KNOB)
        return Choice(**self._records.rows[sweep_key(setting)]["choices"][way_of(run)])

    def _ask(self, setting: Setting, do: str, run: str, choice: Choice | None = None) -> dict[str, Any]:
        self._tick(f"{setting.key}: {run}" + ("" if do == "run" else f", {do}"))
        return self._jobs.ask(
            do,
            run,
            way=WAYS[way_of(run)],
            cores=setting.cores,
            link=setting.link,
            model=setting.model,
            batch=setting.batch,
            **asdict(choice or self.choice(setting, run)),
        )

    def _turn(self, setting: Setting, number: int) -> dict[str, Any]:
        """Each way once, and the parts of the bound."""
        sequential = "sequential" if "sequential" in setting.ways else OURS
        parts = self._ask(setting, "parts", sequential)
        return {"parts": parts, "runs": {run: self._right(setting, run) for run in setting.turns(number)}}

    def _right(self, setting: Setting, run: str) -> dict[str, Any]:
        """A run; where tensors that were taken as they came change low bits, with copies from then on."""
        choice = self.choice(setting, run)
        if (setting.key, way_of(run)) in self._copied:
            choice = replace(choice, assign=False)
        found = self._tried(setting, run, choice)
        if choice.assign and found.get("equal") is False:
            self._copied.add((setting.key, way_of(run)))
            return self._right(setting, run)
        return {**found, "assign": choice.assign}

    def _tried(self, setting: Setting, run: str, choice: Choice) -> dict[str, Any]:
        try:
            return self._ask(setting, "run", run, choice)
        except Failed as error:
            if way_of(run) == OURS:
                raise
            return {"error": str(error)}

    def _baselines(self, setting: Setting) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for way in setting.ways:
            try:
                found[way] = self._ask(setting, "baseline", way)
            except Failed as error:
                found[way] = {"error": str(error)}
        return found

    def _sweep(self, setting: Setting) -> dict[str, Any]:
        """Everybody's best knob on a link; copied or not with the best one."""
        self._jobs.shape(setting.rate)
        self._stored(setting.model)
        tried: dict[str, list[dict[str, Any]]] = {}
        choices: dict[str, Any] = {}
        for way in dict.fromkeys(way for each in self._settings for way in each.ways):
            rows = [self._seconds(setting, way, Choice(knob=knob)) for knob in WAYS[way].knobs]
            best = min(rows, key=_seconds_of)
            if WAYS[way].assigns:
                rows.append(self._seconds(setting, way, Choice(knob=best["knob"], assign=True)))
                best = min(rows, key=_seconds_of)
            tried[way] = rows
            choices[way] = {"knob": best["knob"], "assign": best["assign"]}
        return {"choices": choices, "tried": tried, "model": setting.model}

    def _seconds(self, setting: Setting, way: str, choice: Choice) -> dict[str, Any]:
        """The shortest of some runs; none of a way that answers wrongly, or not at all, when set so."""
        rows = [self._tried(setting, way, choice) for _ in range(SWEEPS)]
        right = [row["after_imports_s"] for row in rows if row.get("equal")]
        return {**asdict(choice), "seconds": min(right) if len(right) == len(rows) else None}


def _seconds_of(row: Row) -> float:
    return float("inf") if row["seconds"] is None else float(row["seconds"])
