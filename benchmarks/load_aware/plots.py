"""Plot `load_aware`: latency over time as Figures 6 and 9, and against bandwidth as 7 and 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.reports import legend_outside
from benchmarks.load_aware.found import Found
from benchmarks.load_aware.schedule import CHOOSING, FULL, LEVELS, LOADPART, LOCAL, NEUROSURGEON, OURS
from upriver.report.figure import label_logarithmic, new_figure

PANEL = (4.2, 2.8)
"""Size of one network's panel, in inches."""

STYLES: Mapping[str, Mapping[str, Any]] = {
    OURS: {"color": "C0", "marker": "*", "zorder": 5},
    LOADPART: {"color": "C1", "marker": "."},
    NEUROSURGEON: {"color": "C3", "marker": "x"},
    LOCAL: {"color": "0.45", "marker": "s"},
    FULL: {"color": "0.65", "marker": "D"},
}


def draw_over_time(found: Sequence[Found], path: Path) -> None:
    """Plot every request of the choosing ways, a panel for each network, with the changes and our cuts."""
    part = found[0].setting.part
    unit = "load of the server" if part == "load" else "Mbit/s"
    title = f"Requests while the {part} changes. Top of each panel: {unit}, and our usual cut"
    panels(found, path, over_time, ("time (s)", "request (s)"), title=title)


def draw_rates(found: Sequence[Found], path: Path) -> None:
    """Plot medians over the rate."""
    panels(
        found,
        path,
        over_rates,
        ("link (Mbit/s)", "request (s)"),
        title="Median request of each way over the rate",
    )


def panels(
    found: Sequence[Found],
    path: Path,
    draw: Callable[[Any, Found], None],
    labels: tuple[str, str],
    *,
    title: str,
) -> None:
    """Save a figure with one panel for each setting.

    Args:
        found: The settings.
        path: File of the figure.
        draw: Draws one setting into its axes.
        labels: Labels of both axes.
        title: Title of the figure.
    """
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = new_figure(PANEL[0] * columns, 0.6 + PANEL[1] * rows, title)
    for number, each in enumerate(found, start=1):
        axes = figure.add_subplot(rows, columns, number)
        draw(axes, each)
        axes.set_title(each.setting.network, fontsize=8)
        axes.set_xlabel(labels[0], fontsize=8)
        axes.tick_params(labelsize=6)
    figure.supylabel(labels[1], fontsize=8)
    legend_outside(figure, loc="outside lower center", ncols=5)
    figure.savefig(path)


def over_time(axes: Any, found: Found) -> None:
    """Plot one network while the load or the link changes."""
    begins = [told["at_s"] for told in found.row["phases"]]
    ends = [*begins[1:], found.row["requests"][-1]["at_s"]]
    for number, (phase, begin, end) in enumerate(zip(found.phases, begins, ends, strict=True)):
        load = found.setting.part == "load"
        depth = list(LEVELS).index(phase.level) / len(LEVELS) if load else 0.3 * (number % 2)
        axes.axvspan(begin, end, color="0.9", alpha=depth, lw=0)
        told = phase.level if load else f"{phase.mbit:g}"
        text = f"{told}\n{found.label(found.usual_cut(number, OURS))}"
        axes.text(
            (begin + end) / 2,
            0.98,
            text,
            fontsize=5,
            ha="center",
            va="top",
            transform=axes.get_xaxis_transform(),
        )
        for way in (LOCAL, FULL):
            style = {"color": STYLES[way]["color"], "lw": 0.8, "ls": "--" if way == LOCAL else ":"}
            axes.hlines(found.spread(number, way).median, begin, end, label=None if number else way, **style)
    for way in CHOOSING:
        rows = [each for each in found.row["requests"] if each["way"] == way]
        axes.plot(
            [each["at_s"] for each in rows],
            [each["seconds"] for each in rows],
            lw=0.6,
            ms=3,
            label=way,
            **STYLES[way],
        )
    axes.set_ylim(0, 1.15 * max(each["seconds"] for each in found.row["requests"]))


def over_rates(axes: Any, found: Found) -> None:
    """Plot one network at every rate."""
    rates = found.rates
    for way in found.ways:
        seconds = [found.at_rate(way, mbit) for mbit in rates]
        axes.plot(rates, seconds, lw=1, ms=4, label=way, **STYLES[way])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    label_logarithmic(axes.yaxis)
    axes.set_xticks(rates, [f"{mbit:g}" for mbit in rates])
