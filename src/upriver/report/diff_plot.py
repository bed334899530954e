"""Plot how far two sides' results are apart at each cut of a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from upriver.report.figure import (
    BLUE,
    VERMILION,
    label_logarithmic,
    legend_above,
    name_places,
    new_figure,
    width_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from upriver.rpc.program_diff import StageDiff


def plot_diff(stages: Sequence[StageDiff], *, title: str) -> Figure:
    """Draw each stage's own difference as a point, and the accumulated one as a curve, on one axis.

    Stages of equal bits have no point: the axis is logarithmic.
    """
    figure = new_figure(width_of(len(stages)), 5.0, title)
    axes = figure.subplots()
    own = [_drawn(stage.own.relative) for stage in stages]
    accumulated = [_drawn(stage.accumulated.relative) for stage in stages]
    places = range(len(stages))
    axes.plot(places, accumulated, ".-", color=BLUE, label="accumulated: from each side's own results")
    axes.plot(places, own, "x", color=VERMILION, label="own: from equal inputs")
    positive = [value for value in (*own, *accumulated) if math.isfinite(value)]
    if positive:
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 2, 2 * max(positive))
        label_logarithmic(axes.yaxis)
    else:
        axes.set_yticks([])
    name_places(axes, [f"{stage.name}  {stage.cut}" for stage in stages])
    axes.set_xlabel("module or operator before the cut, and the cut's number")
    axes.set_ylabel("largest difference at the cut (share of the largest value)")
    legend_above(axes, ncols=2)
    return figure


def _drawn(value: float) -> float:
    """Return a value that a logarithmic axis has, or NaN, which is not drawn."""
    return value if math.isfinite(value) and value > 0 else math.nan
