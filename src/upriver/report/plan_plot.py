"""Plot plans: the seconds of each cut by resource, and the policies that chose it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from upriver.report.choices import marks, table_of, unit_of
from upriver.report.sweep import SweepPoint
from upriver.report.sweep_plot import draw_sweep
from upriver.types import CutRow, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIERS = (
    ("storage", "storage_s", "#1f6f8b"),
    ("network", "network_s", "#e69f00"),
    ("compute", "compute_s", "#009e73"),
)
"""Label, field of `Cost` and colour, distinct in print and for the colour-blind, as in the other plots."""

GREYS = ("#9a9a9a", "#bdbdbd", "#dcdcdc")
"""Colours of the three for a cut that does not fit."""

MOST_NAMES = 60
"""Most cuts with names. Names of more cuts would overlap."""


def plot_plans(
    plans: Mapping[str, Plan], *, title: str, points: Sequence[SweepPoint] = (), image_format: str = "png"
) -> bytes:
    """Draw the seconds of every cut with the choices marked, and below them the sweep.

    Args:
        plans: Plans by policy name, all for the same question, so that they share one table.
        points: Points of a sweep; empty for no sweep.
        image_format: ``png``, ``svg`` or ``pdf``.

    Returns:
        Content of the image file, so that the caller can write it atomically.
    """
    # Use Figure and its canvas directly: pyplot keeps state, and may start a window toolkit.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = table_of(plans)
    figure = Figure(
        figsize=(max(8.0, min(20.0, 0.35 * len(rows))), 11 if points else 6), layout="constrained"
    )
    FigureCanvasAgg(figure)
    if points:
        above, *below = figure.subplots(3, 1, height_ratios=(2, 1, 1))
        draw_sweep(points, *below)
    else:
        above = figure.subplots()
    draw_cuts(above, rows, marks(plans), unit=unit_of(plans))
    figure.suptitle(title, parse_math=False)
    return _encoded(figure, image_format)


def draw_cuts(
    axes: Axes, rows: Sequence[CutRow], marked: Mapping[int, Sequence[str]], *, unit: str = "epoch"
) -> None:
    """Draw stacked seconds of storage, network and compute at every cut, grey if it does not fit.

    Args:
        marked: Labels above each cut.
        unit: Unit of the times: an ``epoch``, in which the three overlap, or a ``request``.
    """
    places = range(len(rows))
    tops = [0.0] * len(rows)
    edges = ["black" if row.cut in marked else "none" for row in rows]
    for (label, field, colour), grey in zip(TIERS, GREYS, strict=True):
        heights = [getattr(row.cost, field) for row in rows]
        colours = [colour if row.feasible else grey for row in rows]
        axes.bar(places, heights, bottom=tops, width=0.8, color=colours, edgecolor=edges)
        axes.bar([0], [0], color=colour, label=label)  # a grey first bar would make a grey legend
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    epochs = [row.cost.epoch_s for row in rows]
    width = max(2.0, min(14.0, 500 / max(len(rows), 1)))
    axes.scatter(places, epochs, marker="_", s=width**2, color="black", zorder=3, label=unit)
    if not all(row.feasible for row in rows):
        axes.bar([0], [0], color=GREYS[1], label="does not fit")
    highest = max([*tops, *epochs], default=0.0)
    for place, row, top in zip(places, rows, tops, strict=True):
        if row.cut in marked:
            _mark(axes, place, max(top, row.cost.epoch_s), marked[row.cut])
    axes.set_ylim(0, 1.45 * highest if highest > 0 else 1)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    overlap = " (the three overlap)" if unit == "epoch" else ""
    axes.set_ylabel(f"predicted seconds of one {unit}{overlap}")
    _name_cuts(axes, rows)
    axes.legend(loc="upper right", ncols=5, fontsize=8)


def _mark(axes: Axes, place: int, height: float, names: Sequence[str]) -> None:
    text = "\n".join(names) if len(names) <= 2 else ",\n".join(_in_lines(names))
    axes.annotate(
        text,
        (place, height),
        xytext=(0, 6),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="bottom",
        multialignment="left",
        fontsize=8,
        fontweight="bold",
        parse_math=False,
    )


def _in_lines(names: Sequence[str]) -> list[str]:
    """Join the names into at most three lines, since a cut is narrow."""
    each = -(-len(names) // 3)
    return [", ".join(names[start : start + each]) for start in range(0, len(names), each)]


def _name_cuts(axes: Axes, rows: Sequence[CutRow]) -> None:
    if len(rows) > MOST_NAMES:
        axes.set_xlabel("number of the cut")
        step = -(-len(rows) // 20)
        axes.set_xticks(range(0, len(rows), step), [str(row.cut) for row in rows[::step]])
        return
    labels = [f"{row.name}  {row.cut}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=90, fontsize=7, parse_math=False)


def _encoded(figure: Figure, image_format: str) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the font lacks shows as boxes, which needs no warning.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format=image_format, dpi=120)
    return buffer.getvalue()
