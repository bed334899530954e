"""Plot `load_aware`: latency over time as Figures 6 and 9, and against bandwidth as 7 and 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load_aware.found import Found
from benchmarks.load_aware.schedule import CHOOSING, FULL, LEVELS, LOADPART, LOCAL, NEUROSURGEON, OURS

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
    panels(found, path, over_time, ("seconds since the beginning", "seconds of a request"), columns=2)


def draw_rates(found: Sequence[Found], path: Path) -> None:
    """Plot medians over the rate."""
    panels(found, path, over_rates, ("Mbit/s", "seconds of a request"), columns=2)


def panels(
    found: Sequence[Found],
    path: Path,
    draw: Callable[[Any, Found], None],
    labels: tuple[str, str],
    *,
    columns: int,
) -> None:
    """Save a figure with one panel for each setting.

    Args:
        found: The settings.
        path: File of the figure.
        draw: Draws one setting into its axes.
        labels: Labels of both axes.
        columns: Panels in a row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, each in enumerate(found, start=1):
        axes = figure.add_subplot(rows, columns, number)
        draw(axes, each)
        axes.set_title(each.setting.network, fontsize=8)
        axes.tick_params(labelsize=6)
    figure.supxlabel(labels[0], fontsize=8)
    figure.supylabel(labels[1], fontsize=8)
    figure.axes[0].legend(fontsize=6)
    figure.savefig(path, dpi=120)


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
    axes.set_xticks(rates, [f"{mbit:g}" for mbit in rates])
