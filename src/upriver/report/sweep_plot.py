"""Plot a sweep: each policy's predicted epoch and its cut over the bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from upriver.report.choices import shares, unit_of
from upriver.report.figure import label_logarithmic, legend_above
from upriver.report.sweep import SweepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Eight colours for the colour-blind (Okabe and Ito, "Color Universal Design", 2008)."""

MARKERS = "osD^vPX*"
"""Markers, as a second way to tell lines apart."""


def draw_sweep(points: Sequence[SweepPoint], epochs: Axes, cuts: Axes) -> None:
    """Draw predicted epochs on one pair of axes and choices on the other; a mix has a point for each cut."""
    from matplotlib.ticker import MaxNLocator

    epochs.sharex(cuts)
    epochs.tick_params(axis="x", labelbottom=False)
    rates = [8 * point.bandwidth_bytes_per_s for point in points]
    names = list(points[0].plans)
    for number, name in enumerate(names):
        plans = [point.plans[name] for point in points]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        # Later lines are thinner: equal ones appear as one with a halo.
        width = 1.0 + 0.7 * (len(names) - 1 - number)
        seconds = [float("nan") if plan.predicted is None else plan.predicted.epoch_s for plan in plans]
        epochs.plot(rates, seconds, color=colour, marker=marker, markersize=4, linewidth=width, label=name)
        mains = [next(iter(shares(plan)), float("nan")) for plan in plans]
        cuts.step(rates, mains, where="mid", color=colour, linewidth=width)
        each = [
            (rate, cut, 60 * share)
            for rate, plan in zip(rates, plans, strict=True)
            for cut, share in shares(plan).items()
        ]
        if each:
            x, y, sizes = zip(*each, strict=True)
            cuts.scatter(x, y, s=sizes, color=colour, marker=marker, zorder=3)
    cuts.set_xscale("log")
    label_logarithmic(cuts.xaxis, "bit/s")
    predicted = [p.predicted.epoch_s for point in points for p in point.plans.values() if p.predicted]
    if predicted and min(predicted) > 0:
        epochs.set_yscale("log")
        label_logarithmic(epochs.yaxis)
    for axes in (epochs, cuts):
        axes.grid(alpha=0.3)
    epochs.set_ylabel(f"predicted {unit_of(points[0].plans)} (s)")
    legend_above(epochs, ncols=4)
    cuts.yaxis.set_major_locator(MaxNLocator(integer=True))
    cuts.set_ylabel("cut (larger: larger share)")
    cuts.set_xlabel("bandwidth (bit/s)")
