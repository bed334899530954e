"""What `cold_start.py` makes of its records: who is ahead, how near to the bound, in how much memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import Spread, machine, table, versions
from _planned import Records
from cold_bound import Parts
from cold_measure import AFTER_REPEATS, baseline_key, sweep_key
from cold_models import MODELS, SEED, SMALL
from cold_page import TEMPLATE
from cold_settings import OURS, PLAIN, STREAMED, SWEEPS, SWEPT_MODEL, WAYS, XL, Setting, way_of

NEAR_BEST, LEAST_SHARE, MOST_MEMORY, MOST_AFTER = 0.03, 0.85, 1.1, 0.01
JUDGED_GBIT = 1.0
"""The link whose bound is a goal."""

STARTED, IMPORTED = "total_s", "after_imports_s"
"""The two clocks: the parent's, from process start, and the process's own, from the end of its imports."""

MEMORY_RUNS = (*WAYS, OURS + PLAIN, "sequential" + PLAIN)

PANEL = (3.4, 2.8)
MIB = 1 << 20

Row = Mapping[str, Any]


class Found:
    """What the records say of one setting.

    Args:
        setting: Which, with all ways that there are.
        records: All that were kept, whatever the code was; the page tells by which.
    """

    def __init__(self, setting: Setting, records: Records) -> None:
        self.setting = setting
        rows = records.rows
        own = {key.removeprefix(f"{setting.key}|"): row for key, row in rows.items()}
        self.turns: list[Row] = [row for key, row in own.items() if key.startswith("turn")]
        self.afters: list[Row] = [row for key, row in own.items() if key.startswith("after")]
        self.baselines: Mapping[str, Row] = rows.get(baseline_key(setting), {}).get("baselines", {})
        self.sweep: Row = rows.get(sweep_key(setting), {})

    @property
    def complete(self) -> bool:
        """Whether any turn has been run in which upriver answered."""
        return self.usable(OURS)

    # ------------------------------------------------------------------------------------------- runs

    def rows(self, run: str) -> list[Row]:
        """Of every turn in which a run was tried."""
        return [turn["runs"][run] for turn in self.turns if run in turn["runs"]]

    def usable(self, run: str) -> bool:
        """Whether it answered rightly whenever it was tried."""
        rows = self.rows(run)
        return bool(rows) and all(row.get("equal") for row in rows)

    @property
    def runs(self) -> list[str]:
        """All that can be compared, in the order of the ways."""
        return [run for run in self.setting.runs if self.usable(run)]

    def spread(self, run: str, clock: str) -> Spread:
        """A figure of a run, in seconds: ``clock`` may be any that its rows have."""
        return Spread.of(row[clock] for row in self.rows(run))

    def best_other(self, clock: str, ending: str | None = None) -> str | None:
        """Of all but upriver's own way, the one with the lowest median.

        Args:
            clock: Which.
            ending: Of the names: with our construction, without, or None for either.
        """
        others = [run for run in self.runs if way_of(run) != OURS and _ends(run, ending)]
        return min(others, key=lambda run: self.spread(run, clock).median, default=None)

    def behind(self, clock: str, ending: str | None = None) -> float | None:
        """How much longer upriver takes than the best other: the median over turns, in which both ran.

        Args:
            clock: Which.
            ending: As for `best_other`; upriver is without its construction where the others are.
        """
        ours = OURS + (ending or "")
        best = self.best_other(clock, ending)
        if best is None or not self.usable(ours):
            return None
        pairs = [
            turn["runs"][ours][clock] / turn["runs"][best][clock]
            for turn in self.turns
            if {ours, best} <= set(turn["runs"])
        ]
        return statistics.median(pairs) - 1 if pairs else None

    def told(self) -> list[str]:
        """Which runs failed or answered wrongly, and how."""
        found = []
        for run in dict.fromkeys(run for turn in self.turns for run in turn["runs"]):
            errors = [row["error"] for row in self.rows(run) if "error" in row]
            unequal = sum(row.get("equal") is False for row in self.rows(run))
            if errors:
                lines = errors[0].splitlines()
                said = " … ".join(dict.fromkeys((lines[0], lines[-1])))
                found.append(f"{self.setting.key}, {run}: {len(errors)} times {said}")
            if unequal:
                found.append(f"{self.setting.key}, {run}: {unequal} answers are not the model's")
        return found

    # ------------------------------------------------------------------------------------------ bound

    @property
    def parts(self) -> Parts:
        """What the stages take by themselves."""
        return Parts.of((turn["parts"] for turn in self.turns), self.setting.rate)

    @property
    def bound_s(self) -> float:
        """The least time from a process that has its imports to an answer."""
        return self.parts.bound(one_core=self.setting.one_core)

    def share(self, run: str) -> float:
        """Of the bound: 1 were as fast as can be."""
        return self.bound_s / self.spread(run, IMPORTED).median

    # ----------------------------------------------------------------------------------------- memory

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return int(self.turns[0]["nbytes"])

    @property
    def call_bytes(self) -> int:
        """What a call takes beside the weights: activations, and what kernels reserve; the least of all."""
        return int(min(turn["parts"]["call_bytes"] for turn in self.turns))

    def memory(self, run: str, field: str = "hwm_bytes") -> float | None:
        """The peak above the process that only imports, in weights; None where it was not measured.

        Args:
            run: Which; its highest peak counts.
            field: ``hwm_bytes`` of the process, ``group_bytes`` of its control group.
        """
        before = self.baselines.get(way_of(run), {}).get(field)
        peaks = [row[field] for row in self.rows(run) if field in row]
        if before is None or not peaks:
            return None
        return float((max(peaks) - before) / self.nbytes)

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

    # ------------------------------------------------------------------------------------------ goals

    @property
    def goals(self) -> dict[str, bool]:
        """Each goal that says something of this setting, and whether it is met."""
        found: dict[str, bool] = {"right": not self.wrong()}
        for goal, clock, ending in (
            ("fastest", STARTED, None),
            ("fastest after imports", IMPORTED, None),
            ("fastest, plain", STARTED, PLAIN),
        ):
            behind = self.behind(clock, ending)
            if behind is not None and self.setting.model != XL.model:
                found[goal] = behind <= NEAR_BEST
                if self.setting.model in SMALL and goal == "fastest":
                    found["small"] = behind <= NEAR_BEST
        if self.setting.gbit == JUDGED_GBIT:
            found["bound"] = self.share(OURS) >= LEAST_SHARE
        memory = self.memory(OURS)
        if memory is not None and self.setting.batch == 1:
            found["memory"] = memory <= MOST_MEMORY
            found["memory for weights"] = memory - self.call_bytes / self.nbytes <= MOST_MEMORY
        if (after := self.after("arrived")) is not None:
            found["after"] = abs(after.median - 1) <= MOST_AFTER
        return found

    def wrong(self) -> list[str]:
        """Answers of ours that are not the model's."""
        told = [
            f"{self.setting.key}, {run}: an answer is not the model's"
            for run in self.setting.runs
            if way_of(run) in STREAMED and any(row.get("equal") is False for row in self.rows(run))
        ]
        if not all(row["equal"] for row in (*self.afters, *(turn["parts"] for turn in self.turns))):
            told.append(f"{self.setting.key}: a loaded model's answer is not the model's")
        return told


def _ends(run: str, ending: str | None) -> bool:
    return ending is None or run.endswith(PLAIN) == (ending == PLAIN)


def wrong(found: Iterable[Found]) -> list[str]:
    """Every answer of ours that is not the model's."""
    return [each for one in found for each in one.wrong()]


GOALS: Mapping[str, str] = {
    "right": "every answer of ours `torch.equal` to the whole model's",
    "fastest": f"from process start: first to answer, or within {NEAR_BEST:.0%} of whoever is",
    "fastest after imports": "from the end of imports: the same",
    "fastest, plain": "from process start, nobody with our construction: the same",
    "small": "no loss on models of 10 MB and less",
    "bound": f"at least {LEAST_SHARE} of the bound at {JUDGED_GBIT:g} Gbit/s",
    "memory": f"at one sample at most {MOST_MEMORY:g} times the weights above a process that only imports",
    "memory for weights": "the same without what a call of a plain model takes beside its weights",
    "after": f"a call of the loaded model within {MOST_AFTER:.0%} of a plain one's",
}


# ------------------------------------------------------------------------------------------------ the page


def write(found: Sequence[Found], records: Records, folder: Path, name: str, *, hint: str = "") -> str:
    """The page and its picture, from what there is; what the page says."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(found, records, name, hint=hint)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    complete = [each for each in found if each.complete]
    if complete:
        draw(complete, folder / f"{name}.png")
    return text


def page(found: Sequence[Found], records: Records, name: str, *, hint: str = "") -> str:
    """The same as text alone."""
    complete = [each for each in found if each.complete]
    left = [each.setting.key for each in found if not each.complete]
    told = [line for each in found for line in each.told()]
    tried = {way_of(run) for each in complete for turn in each.turns for run in turn["runs"]}
    out = [way.title for key, way in WAYS.items() if key not in tried]
    return TEMPLATE.format(
        verdicts="\n".join(f"- {verdict(goal, complete)}" for goal in GOALS),
        left=f"\nNot run yet: {', '.join(left)}.\n" if left else "",
        started=seconds_table(complete, STARTED, ""),
        started_plain=seconds_table(complete, STARTED, PLAIN),
        imported=seconds_table(complete, IMPORTED, ""),
        imported_plain=seconds_table(complete, IMPORTED, PLAIN),
        behind=behind_table(complete),
        efforts=efforts_table(complete),
        bounds=bounds_table(complete),
        memory=memory_table(complete),
        afters=afters_table(complete),
        after_repeats=AFTER_REPEATS,
        sweeps=sweeps_table(complete),
        models=models_table(complete),
        told="".join(f"\n- {line}" for line in told) or " none.",
        out=", ".join(out) or "none",
        hint=f" Their environment: {hint}." if out and hint else "",
        groups=_groups_text(complete),
        swept=MODELS[SWEPT_MODEL].title,
        sweep_runs=SWEEPS,
        seed=SEED,
        name=name,
        near_best=NEAR_BEST,
        commits=", ".join(sorted({row["commit"] for each in complete for row in each.turns})) or "-",
        loads=_loads_text(complete),
        machine=machine(),
        versions=versions("torch", "transformers", "torchvision", "safetensors", "obstore"),
    )


def verdict(goal: str, found: Sequence[Found]) -> str:
    """A goal, and where it is missed."""
    judged = {each.setting.key: each.goals[goal] for each in found if goal in each.goals}
    if not judged:
        return f"{GOALS[goal]}: not judged"
    missed = [key for key, met in judged.items() if not met]
    met = f"met in {len(judged) - len(missed)} of {len(judged)} settings"
    return f"{GOALS[goal]}: **{'missed' if missed else 'met'}**, {met}" + (
        f"; not in {', '.join(missed)}" if missed else ""
    )


def seconds_table(found: Sequence[Found], clock: str, ending: str) -> str:
    """Seconds of everybody, by one clock, with our construction or without."""
    ways = [way for way in WAYS if any(way + ending in each.runs for each in found)]
    rows = [
        [
            each.setting.key,
            *(each.spread(way + ending, clock).text() if way + ending in each.runs else "" for way in ways),
        ]
        for each in found
        if any(way + ending in each.runs for way in ways)
    ]
    return _table(["setting", *(WAYS[way].title for way in ways)], rows)


def behind_table(found: Sequence[Found]) -> str:
    """Against whom upriver is held, and how far it is ahead or behind."""
    rows = []
    for each in found:
        cells = [each.setting.key, str(len(each.rows(OURS)))]
        for clock, ending in ((STARTED, None), (IMPORTED, None), (STARTED, PLAIN), (IMPORTED, PLAIN)):
            best, behind = each.best_other(clock, ending), each.behind(clock, ending)
            cells += ["", ""] if best is None or behind is None else [best, f"{behind:+.1%}"]
        rows.append(cells)
    header = ["setting", "turns"]
    for clock in ("from start", "after imports", "from start, plain", "after imports, plain"):
        header += [f"best other {clock}", "upriver over it"]
    return _table(header, rows)


def efforts_table(found: Sequence[Found]) -> str:
    """What everybody's imports take, and all CPU time until the answer: medians."""
    shown = [way for way in WAYS if any(way in each.runs for each in found)]
    rows = []
    for each in found:
        cells = [each.setting.key]
        for way in shown:
            fields = ("imported_s", "cpu_s") if way in each.runs else ()
            cells.append(" / ".join(f"{each.spread(way, field).median:.2f}" for field in fields))
        rows.append(cells)
    return _table(["setting", *(WAYS[way].title for way in shown)], rows)


def bounds_table(found: Sequence[Found]) -> str:
    """The parts of the bound, and how near each comes to it."""
    header = ["setting", "first byte", "D", "L", "E", "bound"]
    shown = [way for way in WAYS if any(way in each.runs for each in found)]
    rows = []
    for each in found:
        parts = each.parts
        seconds = (
            parts.first_byte_s,
            parts.download_s,
            parts.load_s,
            parts.execute_s,
            each.bound_s,
        )
        shares = [f"{each.share(way):.2f}" if way in each.runs else "" for way in shown]
        rows.append([each.setting.key, *(f"{value:.3f}" for value in seconds), *shares])
    return _table([*header, *(WAYS[way].title for way in shown)], rows)


def memory_table(found: Sequence[Found]) -> str:
    """Peaks above a process that only imports, in weights: of the process, and of its control group."""
    shown = [run for run in MEMORY_RUNS if any(run in each.runs for each in found)]
    rows = []
    for each in found:
        if each.setting.batch != 1 or each.setting.gbit is not None or not each.setting.one_core:
            continue
        cells = [f"{each.nbytes / MIB:.0f}", f"{each.call_bytes / each.nbytes:.2f}"]
        for run in shown:
            peaks = [each.memory(run), each.memory(run, "group_bytes")] if run in each.runs else []
            cells.append(" / ".join("-" if peak is None else f"{peak:.2f}" for peak in peaks))
        rows.append([each.setting.key, *cells])
    return _table(["setting", "weights, MiB", "a call", *(_run_title(run) for run in shown)], rows)


def _run_title(run: str) -> str:
    return WAYS[way_of(run)].title + (", plain" if run.endswith(PLAIN) else "")


def afters_table(found: Sequence[Found]) -> str:
    """Forward passes once everything is there."""
    rows = []
    for each in found:
        arrived, control = each.after("arrived"), each.after("control")
        if arrived is not None and control is not None:
            rows.append([each.setting.model, arrived.text(4), control.text(4)])
    return _table(["model", "arrived over plain", "another plain one over it"], rows)


def sweeps_table(found: Sequence[Found]) -> str:
    """What was tried of each knob, a link at a time."""
    rows = []
    for link, sweep in {each.setting.link: each.sweep for each in found if each.sweep}.items():
        for way, tried in sweep["tried"].items():
            choice = sweep["choices"][way]
            cells = [
                f"{row['knob']}{', taken as it came' if row['assign'] else ''}: "
                + ("cannot" if row["seconds"] is None else f"{row['seconds']:.2f}")
                for row in tried
            ]
            best = f"{choice['knob']}{', taken as it came' if choice['assign'] else ''}"
            rows.append([link, WAYS[way].title, WAYS[way].what, "; ".join(cells), best])
    return _table(["link", "way", "knob", "seconds after imports", "taken"], rows)


def models_table(found: Sequence[Found]) -> str:
    """What the models are."""
    rows = []
    for name in dict.fromkeys(each.setting.model for each in found):
        turn = next(each.turns[0] for each in found if each.setting.model == name)
        model, size = MODELS[name], f"{turn['nbytes'] / MIB:.0f}"
        rows.append([name, model.title, model.library, size, turn["tensors"]])
    return _table(["", "model", "library", "weights, MiB", "tensors"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return table(header, rows) if rows else "Not run yet."


def _groups_text(found: Sequence[Found]) -> str:
    files = {row["group_file"] for each in found for row in each.rows(OURS) if "group_file" in row}
    if not files:
        return "none could be made on this machine, so it is missing"
    return f"`{'`, `'.join(sorted(files))}`"


def _loads_text(found: Sequence[Found]) -> str:
    loads = [row["load"] for each in found for row in each.turns]
    return f"{statistics.median(loads):.1f}, at most {max(loads):.1f}" if loads else "-"


# ------------------------------------------------------------------------------------------------- picture


def draw(found: Sequence[Found], path: Path) -> None:
    """A panel for each setting: what everybody takes after imports, and the bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, each in enumerate(found, start=1):
        axes = figure.add_subplot(rows, columns, number)
        ways = [way for way in WAYS if way in each.runs or way + PLAIN in each.runs]
        for shift, ending, shade in ((-0.2, "", "C0"), (0.2, PLAIN, "0.7")):
            drawn = [(place, way) for place, way in enumerate(ways) if way + ending in each.runs]
            medians = [each.spread(way + ending, IMPORTED) for _, way in drawn]
            axes.barh(
                [place + shift for place, _ in drawn],
                [spread.median for spread in medians],
                height=0.38,
                color=shade,
                xerr=_errors(medians),
                error_kw={"lw": 0.7},
                label="constructed by upriver" if not ending else "constructed as ever",
            )
        axes.axvline(each.bound_s, color="C3", lw=1, label="bound")
        axes.set_yticks(range(len(ways)), ways, fontsize=6)
        axes.invert_yaxis()
        axes.set_title(each.setting.key, fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
    figure.supxlabel("seconds from the end of imports to the first answer", fontsize=8)
    figure.axes[0].legend(fontsize=5)
    figure.savefig(path, dpi=120)


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """From the median to the lowest and to the highest."""
    return [
        [each.median - min(each.values) for each in spreads],
        [max(each.values) - each.median for each in spreads],
    ]
