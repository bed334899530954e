"""A load as a picture: when each weight was asked for, when it came, and when something first read it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

FILLED_COLOUR, TOUCHED_COLOUR = "#1f6f8b", "#d55e00"
"""Blue and vermilion: apart in print and for the colour-blind."""


class WeightSpans(NamedTuple):
    """Of one weight.

    Attributes:
        name: Of it.
        nbytes: How large it is.
        asked_s: When its first byte was asked for.
        filled_s: When it was there.
        touched_s: When something first read it; None where nothing did before everything was there.
    """

    name: str
    nbytes: int
    asked_s: float
    filled_s: float
    touched_s: float | None


def plot_ways(ways: Sequence[WeightSpans], *, answer_s: float, title: str, image_format: str) -> bytes:
    """Draw the picture: megabytes in execution order over seconds.

    Args:
        ways: In execution order.
        answer_s: When the first answer was there.
        title: One line above everything.
        image_format: ``png``, ``svg`` or ``pdf``.
    """
    # Figure and its canvas are used directly: pyplot keeps state, and a window toolkit where there is one.
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
