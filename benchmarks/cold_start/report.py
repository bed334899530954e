"""Report the records of `cold_start`: who is ahead, the distance from the bound, and the memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cold_start.found import (
    COMPARED,
    EVENED,
    IMPORTED,
    JUDGED_BYTES,
    JUDGED_GBIT,
    LEAST_SHARE,
    MOST_AFTER,
    MOST_FAILED,
    MOST_MEMORY,
    NEAR_BEST,
    STARTED,
    SURE,
    Found,
)
from benchmarks.cold_start.imports import Imports, even_imports
from benchmarks.cold_start.measure import AFTER_REPEATS, BASELINES, has_memory
from benchmarks.cold_start.models import MODELS, SEED
from benchmarks.cold_start.page import TEMPLATE
from benchmarks.cold_start.settings import (
    OURS,
    PARTS_REPEATS,
    PLAIN,
    SWEEP_EVEN,
    SWEEP_NEAR,
    SWEEPS,
    SWEPT_MODEL,
    SWEPT_SMALL,
    WAYS,
    swept,
    way_of,
)
from benchmarks.cold_start.ways import STORED_PART_BYTES
from benchmarks.harness.measuring import Spread, machine, versions
from benchmarks.harness.reports import legend_outside, table
from upriver.report.figure import new_figure

MEMORY_RUNS = (*WAYS, OURS + PLAIN, "sequential" + PLAIN)

PANEL = (3.4, 2.8)
MIB = 1 << 20


GOALS: Mapping[str, str] = {
    "right": "every answer of ours `torch.equal` to the whole model's",
    "fastest": f"from process start: first to answer, or within {NEAR_BEST:.0%} of whoever is",
    "fastest, evened": "the same with imports evened out",
    "fastest after imports": "from the end of imports: the same",
    "fastest, plain": "from process start, nobody with our construction: the same",
    "fastest, plain, evened": "the same with imports evened out",
    "small": "no loss on models of 10 MB and less",
    "small, evened": "the same with imports evened out",
    "bound": f"at least {LEAST_SHARE} of the bound at {JUDGED_GBIT:g} Gbit/s",
    "memory": f"at one sample, with weights of {JUDGED_BYTES / 1e6:.0f} MB or more, at most {MOST_MEMORY:g} "
    "times the weights above a process that only imports",
    "memory for weights": "the same without what a call of a plain model takes beside its weights",
    "after": f"a call of the loaded model within {MOST_AFTER:.0%} of a plain one's",
}


# ------------------------------------------------------------------------------------------------ the page


def write(found: Sequence[Found], folder: Path, name: str, *, hint: str = "") -> str:
    """Write the page and its plot from the existing records. Return the text of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(found, name, hint=hint)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    drawn = [each for each in found if each.bound_s is not None and each.runs]
    if drawn:
        draw(drawn, folder / f"{name}.png")
    return text


def page(found: Sequence[Found], name: str, *, hint: str = "") -> str:
    """Return the text of the page. The rows then have evened imports."""
    imports = even_imports(found)
    begun = [each for each in found if each.begun]
    timed = [each for each in begun if each.setting.timed]
    left = [each.setting.key for each in found if not each.begun]
    told = [line for each in found for line in each.told()]
    tried = {way_of(run) for each in begun for run in each.turns}
    out = [way.title for key, way in WAYS.items() if key not in tried]
    return TEMPLATE.format(
        verdicts="\n".join(f"- {verdict(goal, begun)}" for goal in GOALS),
        left=f"\nNot run yet: {', '.join(left)}.\n" if left else "",
        started=seconds_table(timed, STARTED, ""),
        started_plain=seconds_table(timed, STARTED, PLAIN),
        imported=seconds_table(timed, IMPORTED, ""),
        imported_plain=seconds_table(timed, IMPORTED, PLAIN),
        untimed=_untimed_text([each for each in begun if not each.setting.timed]),
        behind=behind_table(timed, {"from start": STARTED, "after imports": IMPORTED}),
        evened=behind_table(timed, {"with imports evened out": EVENED}),
        imports=imports_table(imports),
        apart=sum(each.apart for each in timed),
        turns=sum(len(each.rows(OURS)) for each in timed),
        most_failed=MOST_FAILED,
        efforts=efforts_table(timed),
        bounds=bounds_table(timed),
        parts_repeats=PARTS_REPEATS,
        memory=memory_table(begun),
        baselines=BASELINES,
        judged=JUDGED_BYTES / 1e6,
        afters=afters_table(begun),
        after_repeats=AFTER_REPEATS,
        most_after=MOST_AFTER,
        sweeps=sweeps_table(begun),
        models=models_table(begun),
        told="".join(f"\n- {line}" for line in told) or " none.",
        out=", ".join(out) or "none",
        hint=f" Their environment: {hint}." if out and hint else "",
        groups=_groups_text(begun),
        swept=MODELS[SWEPT_MODEL].title,
        swept_small=MODELS[SWEPT_SMALL].title,
        sweep_runs=SWEEPS,
        sweep_near=SWEEP_NEAR - 1,
        sweep_even=SWEEP_EVEN - 1,
        parts_gib=STORED_PART_BYTES / 2**30,
        seed=SEED,
        name=name,
        near_best=NEAR_BEST,
        sure=SURE,
        code=_code_text(begun),
        loads=_loads_text(begun),
        machine=machine(),
        versions=versions("torch", "transformers", "torchvision", "safetensors", "obstore"),
        packages=_packages_text(begun),
    )


def verdict(goal: str, found: Sequence[Found]) -> str:
    """Return a goal, where it is missed, and the ways that are missing because they failed or were wrong."""
    goals = {each.setting.key: each.goals for each in found}
    judged = {key: own[goal] for key, own in goals.items() if goal in own}
    if not judged:
        return f"{GOALS[goal]}: not judged"
    missed = [key for key, met in judged.items() if not met]
    text = f"{GOALS[goal]}: **{'missed' if missed else 'met'}**, "
    text += f"met in {len(judged) - len(missed)} of {len(judged)} settings"
    if missed:
        text += f"; not in {', '.join(missed)}"
        if goal == "right":
            text += f" ({'; '.join(line for each in found for line in each.wrong())})"
        if goal in COMPARED:
            behind = [each for each in found if each.setting.key in missed]
            sure = [each.setting.key for each in behind if each.surely_behind(goal)]
            text += f". With a certainty of {SURE:.0%} behind in: {', '.join(sure) or 'none'}"
    out = [f"{run} in {each.setting.key}" for each in found for run in each.out]
    if out and goal.startswith("fastest"):
        text += f"; not compared, as they failed or were wrong: {', '.join(out)}"
    return text


def _untimed_text(found: Sequence[Found]) -> str:
    """Return the seconds of settings that run for their memory; an empty text if there are none."""
    if not found:
        return ""
    turns = max(len(each.rows(OURS)) for each in found)
    return f"""
Run for their memory, in {turns} {"turn" if turns == 1 else "turns"}, and not judged. From process start, and
from the end of imports:

{seconds_table(found, STARTED, "")}

{seconds_table(found, IMPORTED, "")}
"""


def seconds_table(found: Sequence[Found], clock: str, ending: str) -> str:
    """Return the seconds of all ways by one clock, with our construction or without."""
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


def behind_table(found: Sequence[Found], clocks: Mapping[str, str]) -> str:
    """Return the competitor of upriver in each setting, and how far upriver is ahead or behind.

    Args:
        found: Settings.
        clocks: Clocks by their names in the header.
    """
    compared = {
        title + name: (clock, ending)
        for ending, name in ((None, ""), (PLAIN, ", plain"))
        for title, clock in clocks.items()
    }
    rows = []
    for each in found:
        cells = [each.setting.key, str(len(each.rows(OURS)))]
        for clock, ending in compared.values():
            best, behind = each.best_other(clock, ending), each.behind(clock, ending)
            between = each.behind_between(clock, ending)
            text = "" if between is None else f" ({between[0]:+.1%} to {between[1]:+.1%})"
            cells += ["", ""] if best is None or behind is None else [best, f"{behind:+.1%}{text}"]
        rows.append(cells)
    header = ["setting", "turns"]
    for title in compared:
        header += [f"best other {title}", "upriver over it"]
    return _table(header, rows)


def imports_table(imports: Mapping[str, Imports]) -> str:
    """Return the usual import times: of upriver, and the additional times of others."""
    shown = [way for way in WAYS if any(way in each.extra_s for each in imports.values())]
    rows = [
        [
            library,
            str(each.turns),
            f"{each.usual_s:.2f}",
            f"{each.off_s:.2f}",
            *(f"{each.extra_s[way]:+.2f}" if way in each.extra_s else "" for way in shown),
        ]
        for library, each in imports.items()
    ]
    header = ["library", "turns", "ways of upriver's loader", "half are off by up to"]
    return _table([*header, *(WAYS[way].title for way in shown)], rows)


def efforts_table(found: Sequence[Found]) -> str:
    """Return the medians of each way's import time and of its CPU time until the answer."""
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
    """Return the parts of the bound, and how near each way is to it."""
    header = ["setting", "first byte", "D", "L", "E", "bound"]
    shown = [way for way in WAYS if any(way in each.runs for each in found)]
    rows = []
    for each in found:
        if (parts := each.parts) is None:
            continue
        seconds = (
            parts.first_byte_s,
            parts.download_s,
            parts.load_s,
            parts.execute_s,
            parts.bound(one_core=each.setting.one_core),
        )
        shares = [each.share(way) if way in each.runs else None for way in shown]
        told = ["" if share is None else f"{share:.2f}" for share in shares]
        rows.append([each.setting.key, *(f"{value:.3f}" for value in seconds), *told])
    return _table([*header, *(WAYS[way].title for way in shown)], rows)


def memory_table(found: Sequence[Found]) -> str:
    """Return the peaks above a process that only imports: of the process, and of its control group."""
    shown = [run for run in MEMORY_RUNS if any(run in each.runs for each in found)]
    rows = []
    for each in found:
        if not has_memory(each.setting) or each.setting.gbit is not None:
            continue
        cells = [f"{each.nbytes / MIB:.0f}", _amount(each, each.call_bytes)]
        for run in shown:
            peaks = [each.above(run), each.above(run, "group_bytes")] if run in each.runs else []
            cells.append(" / ".join(_amount(each, peak) for peak in peaks))
        rows.append([each.setting.key, *cells])
    return _table(["setting", "weights, MiB", "a call", *(_run_title(run) for run in shown)], rows)


def _amount(found: Found, nbytes: float | None) -> str:
    """Format bytes as a multiple of the weights, or in MiB for small models."""
    if nbytes is None:
        return "-"
    if found.nbytes < JUDGED_BYTES:
        return f"{nbytes / MIB:.0f} MiB"
    return f"{nbytes / found.nbytes:.2f}"


def _run_title(run: str) -> str:
    return WAYS[way_of(run)].title + (", plain" if run.endswith(PLAIN) else "")


def afters_table(found: Sequence[Found]) -> str:
    """Return the times of forward passes after the load."""
    rows = []
    for each in found:
        arrived, control = each.after("arrived"), each.after("control")
        if arrived is not None and control is not None:
            rows.append([each.setting.model, arrived.text(4), control.text(4)])
    return _table(["model", "arrived over plain", "another plain one over it"], rows)


def sweeps_table(found: Sequence[Found]) -> str:
    """Return the tried values of each knob, a link at a time."""
    kept = {
        (swept(each.setting).link, swept(each.setting).model, way): sweep
        for each in found
        for way, sweep in each.sweeps.items()
    }
    rows = []
    for (link, model, way), sweep in kept.items():
        cells = [
            f"{_choice_text(row)}: " + ("cannot" if row["seconds"] is None else f"{row['seconds']:.2f}")
            for row in sweep["tried"]
        ]
        taken = _choice_text(sweep["choice"])
        rows.append([link, model, WAYS[way].title, WAYS[way].what, "; ".join(cells), taken])
    return _table(["link", "model", "way", "knob", "seconds after imports", "taken"], rows)


def _choice_text(choice: Mapping[str, object]) -> str:
    return f"{choice['knob']}{', taken as it came' if choice['assign'] else ''}"


def models_table(found: Sequence[Found]) -> str:
    """Return the description of the models."""
    stored = {each.setting.model: each.stored for each in found}
    rows = [
        [name, MODELS[name].title, MODELS[name].library, f"{row['nbytes'] / MIB:.0f}", row["tensors"]]
        for name, row in stored.items()
    ]
    return _table(["", "model", "library", "weights, MiB", "tensors"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return table(header, rows) if rows else "Not run yet."


def _groups_text(found: Sequence[Found]) -> str:
    files = {row["group_file"] for each in found for row in each.rows(OURS) if "group_file" in row}
    if not files:
        return "none could be made on this machine, so it is missing"
    return f"`{'`, `'.join(sorted(files))}`"


def _loads_text(found: Sequence[Found]) -> str:
    loads = [row["load"] for each in found for row in each.rows(OURS)]
    return f"{statistics.median(loads):.1f}, at most {max(loads):.1f}" if loads else "-"


def _code_text(found: Sequence[Found]) -> str:
    """Return the code versions of upriver's own runs. A second version is reported."""
    kept = {(row["version"], row["commit"]) for each in found for row in each.rows(OURS)}
    texts = sorted(f"{version} (commit {commit})" for version, commit in kept)
    several = len({version for version, _ in kept}) > 1
    return (", ".join(texts) or "-") + (": settings are of different ones" if several else "")


def _packages_text(found: Sequence[Found]) -> str:
    """Return the packages of the peers' environment."""
    rows = [row for each in found for run in each.turns for row in each.rows(run)]
    kept = {f"{name} {version}" for row in rows for name, version in row.get("packages", {}).items()}
    return ", ".join(sorted(kept)) or "none"


# ------------------------------------------------------------------------------------------------- picture


def draw(found: Sequence[Found], path: Path) -> None:
    """Draw a panel for each setting: the times after imports of all ways, and the bound."""
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    title = "First answer of a cold start: medians, with the lowest and the highest of the runs"
    figure = new_figure(PANEL[0] * columns, PANEL[1] * rows, title)
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
        axes.axvline(each.bound_s or 0.0, color="C3", lw=1, label="bound")
        axes.set_yticks(range(len(ways)), ways, fontsize=6)
        axes.invert_yaxis()
        axes.set_title(each.setting.key, fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
    figure.supxlabel("time from the end of imports to the first answer (s)", fontsize=10)
    legend_outside(figure, loc="outside right upper")
    figure.savefig(path)


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return the distances from the median to the lowest and to the highest value."""
    return [
        [each.median - min(each.values) for each in spreads],
        [max(each.values) - each.median for each in spreads],
    ]
