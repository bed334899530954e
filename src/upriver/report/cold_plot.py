"""Plot a load: the times at which each weight was requested, arrived and was first read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from upriver.report.figure import BLUE, VERMILION, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class WeightSpans(NamedTuple):
    """Times of one weight.

    Attributes:
        asked_s: Time of the request for its first byte.
        filled_s: Time of its arrival.
        touched_s: Time of its first read; None if nothing read it before all weights had arrived.
    """

    name: str
    nbytes: int
    asked_s: float
    filled_s: float
    touched_s: float | None


def plot_load(
    weights: Sequence[WeightSpans], *, first_byte_s: float | None, answer_s: float, title: str
) -> Figure:
    """Draw bytes in execution order over the time since the first byte; earlier times are at its left edge.

    Args:
        weights: Times of the weights, in execution order.
        first_byte_s: Time of the first byte. None if no byte was requested: time then starts with the load.
        answer_s: Time of the first result.
    """
    from matplotlib.ticker import EngFormatter

    def at(seconds: float) -> float:
        return max(0.0, seconds - (first_byte_s or 0.0))

    figure = new_figure(9.0, 5.5, title)
    axes = figure.subplots()
    ends = list(accumulate(weight.nbytes for weight in weights))
    middles = [end - weight.nbytes / 2 for end, weight in zip(ends, weights, strict=True)]
    axes.barh(
        middles,
        [at(weight.filled_s) - at(weight.asked_s) for weight in weights],
        left=[at(weight.asked_s) for weight in weights],
        height=[weight.nbytes for weight in weights],
        color=BLUE,
        alpha=0.45,
        label="requested, until it has arrived",
    )
    reads = [
        (at(weight.touched_s), middle)
        for weight, middle in zip(weights, middles, strict=True)
        if weight.touched_s is not None
    ]
    axes.plot(
        [read for read, _ in reads],
        [middle for _, middle in reads],
        ".",
        color=VERMILION,
        clip_on=False,
        label="first read",
    )
    axes.axvline(at(answer_s), color="black", linewidth=1, label="first answer")
    axes.set_xlim(left=0)
    axes.set_ylim(max(ends, default=1.0), 0)
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.set_ylabel("weights in the order of their first read (bytes)")
    start = (
        "the load began" if first_byte_s is None else f"the first byte, {first_byte_s:.3g} s into the load"
    )
    axes.set_xlabel(f"time since {start} (s)")
    legend_above(axes, ncols=3)
    return figure
