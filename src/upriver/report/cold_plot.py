"""Plot a load: the times at which each weight was requested, arrived and was first read."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

FILLED_COLOUR, TOUCHED_COLOUR = "#1f6f8b", "#d55e00"
"""Blue and vermilion, distinct in print and for the colour-blind."""


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


def plot_ways(ways: Sequence[WeightSpans], *, answer_s: float, title: str, image_format: str) -> bytes:
    """Draw the plot: megabytes in execution order over seconds.

    Args:
        ways: Times of the weights, in execution order.
        answer_s: Time of the first result.
        image_format: ``png``, ``svg`` or ``pdf``.
    """
    # Use Figure and its canvas directly: pyplot keeps state, and may start a window toolkit.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ends = [sum(way.nbytes for way in ways[: number + 1]) / 1e6 for number in range(len(ways))]
    heights = [way.nbytes / 1e6 for way in ways]
    axes.barh(
        [end - height / 2 for end, height in zip(ends, heights, strict=True)],
        [way.filled_s - way.asked_s for way in ways],
        left=[way.asked_s for way in ways],
        height=heights,
        color=FILLED_COLOUR,
        alpha=0.45,
        label="asked for, until there",
    )
    read = [
        (way.touched_s, end - way.nbytes / 2e6)
        for way, end in zip(ways, ends, strict=True)
        if way.touched_s is not None
    ]
    axes.plot(
        [at for at, _ in read], [place for _, place in read], ".", color=TOUCHED_COLOUR, label="first read"
    )
    axes.axvline(answer_s, color="black", linewidth=1, label="first answer")
    axes.set_xlim(left=0)
    axes.set_ylim(max(ends, default=1.0), 0)
    axes.set_xlabel("seconds since the load began")
    axes.set_ylabel("MB of weights, in execution order")
    axes.legend(loc="lower left")
    axes.set_title(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=image_format, dpi=120)
    return drawn.getvalue()
