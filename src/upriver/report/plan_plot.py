"""Plot plans: each policy's choice, and the seconds of each cut by resource."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from upriver.report.choices import DOES_NOT_FIT, choice_text, marks, shares, table_of, unit_of
from upriver.report.figure import BLUE, legend_above, legend_entries, name_places, new_figure, width_of
from upriver.report.sweep import SweepPoint
from upriver.report.sweep_plot import draw_sweep
from upriver.types import CutRow, Plan

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIERS = (
    ("storage", "storage_s", BLUE),
    ("network", "network_s", "#e69f00"),
    ("compute", "compute_s", "#009e73"),
)
"""Label, field of `Cost` and colour, distinct in print and for the colour-blind, as in the other plots."""

GREYS = ("#9a9a9a", "#bdbdbd", "#dcdcdc")
"""Colours of the three for a cut that does not fit."""

CHOICE_CHARS = 40
"""Characters of a mix of cuts at the right of its policy."""


def plot_plans(plans: Mapping[str, Plan], *, title: str, points: Sequence[SweepPoint] = ()) -> Figure:
    """Draw the choices, below them the seconds of every cut, and below these the sweep.

    Args:
        plans: Plans by policy name, all for the same question, so that they share one table.
        points: Points of a sweep; empty for no sweep.
    """
    rows = table_of(plans)
    heights = [0.4 + 0.22 * len(plans), 5.5, *([2.8, 2.8] if points else [])]
    figure = new_figure(width_of(len(rows)), 0.5 + sum(heights), title)
    choices, cuts, *below = figure.subplots(len(heights), 1, height_ratios=heights)
    choices.sharex(cuts)
    draw_cuts(cuts, rows, marks(plans).keys(), unit=unit_of(plans))
    draw_choices(choices, rows, plans)
    if points:
        draw_sweep(points, *below)
    return figure


def draw_choices(axes: Axes, rows: Sequence[CutRow], plans: Mapping[str, Plan]) -> None:
    """Draw a line for each policy with a dot at its cut, or dots as large as the shares of a mix."""
    places = {row.cut: place for place, row in enumerate(rows)}
    dots = [
        (places[cut], line, 60 * share)
        for line, plan in enumerate(plans.values())
        for cut, share in shares(plan).items()
        if cut in places
    ]
    if dots:
        x, y, sizes = zip(*dots, strict=True)
        axes.scatter(x, y, s=sizes, color="black")
    told = [textwrap.shorten(choice_text(plan), CHOICE_CHARS, placeholder=" …") for plan in plans.values()]
    beside = axes.twinx()
    for each, names, label in ((axes, list(plans), "policy"), (beside, told, "chosen cut")):
        each.set_yticks(range(len(plans)), names, fontsize=8)
        each.set_ylim(len(plans) - 0.5, -0.5)
        each.set_ylabel(label)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def draw_cuts(axes: Axes, rows: Sequence[CutRow], chosen: Set[int], *, unit: str = "epoch") -> None:
    """Draw stacked seconds of storage, network and compute at every cut, grey if it does not fit.

    Args:
        chosen: Cuts whose bars have an edge.
        unit: Unit of the times: an ``epoch``, in which the three overlap, or a ``request``.
    """
    places = range(len(rows))
    tops = [0.0] * len(rows)
    edges = ["black" if row.cut in chosen else "none" for row in rows]
    for (label, field, colour), grey in zip(TIERS, GREYS, strict=True):
        heights = [getattr(row.cost, field) for row in rows]
        colours = [colour if row.feasible else grey for row in rows]
        axes.bar(places, heights, bottom=tops, width=0.8, color=colours, edgecolor=edges)
        axes.bar([0], [0], color=colour, label=label)  # a grey first bar would make a grey legend
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    epochs = [row.cost.epoch_s for row in rows]
    width = max(2.0, min(14.0, 500 / max(len(rows), 1)))
    axes.scatter(places, epochs, marker="_", s=width**2, color="black", zorder=3, label=unit)
    highest = max([*tops, *epochs], default=0.0)
    axes.set_ylim(0, 1.05 * highest or 1.0)
    name_places(axes, [f"{row.name}  {row.cut}" for row in rows])
    axes.set_xlabel("stage before the cut, and the cut's number (edged: chosen)")
    overlap = ", the three overlap" if unit == "epoch" else ""
    axes.set_ylabel(f"predicted {unit} (s{overlap})")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    entries: dict[str, Artist | tuple[Artist, ...]] = {**legend_entries(axes)}
    if not all(row.feasible for row in rows):
        entries[DOES_NOT_FIT] = tuple(axes.bar([0], [0], color=grey).patches[0] for grey in GREYS)
    legend_above(axes, ncols=5, entries=entries)
