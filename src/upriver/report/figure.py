"""Make figures alike: canvas, title, legend, names of cuts, logarithmic axes, and the image file."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from upriver.text import shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, PALE_BLUE, VERMILION, GREY = "#1f6f8b", "#a9c8d3", "#d55e00", "#8c8c8c"
"""Colours distinct in print and for the colour-blind."""

MOST_NAMES = 60
"""Most names below an axis of `width_of`. Names of more places would overlap."""

NAME_CHARS = 32
"""Characters of a name below an axis, about two inches upright."""

TITLE_CHARS_PER_INCH = 9
"""Characters of a title in an inch, in matplotlib's own font and size."""


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure with its title wrapped to the width. Sizes are in inches."""
    # Use Figure and its canvas directly: pyplot keeps state, and may start a window toolkit.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(textwrap.fill(title, int(TITLE_CHARS_PER_INCH * width)), parse_math=False)
    return figure


def width_of(num_places: int) -> float:
    """Return the inches of a figure with that many places side by side, between a page's and twice that."""
    return max(9.0, min(15.0, 3.0 + 0.22 * num_places))


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Name the places 0, 1, … of the horizontal axis, or every second, third, … of more than `MOST_NAMES`."""
    step = -(-len(names) // MOST_NAMES) or 1
    labels = [shortened(name, NAME_CHARS) for name in names[::step]]
    axes.set_xticks(range(0, len(names), step), labels, rotation=90, fontsize=7, parse_math=False)
    axes.set_xlim(-0.6, max(len(names), 1) - 0.4)


def label_logarithmic(axis: Axis, unit: str = "") -> None:
    """Label a logarithmic axis with plain numbers: each decade, also its 2 and 5, or what suits a part of it.

    Args:
        unit: Unit that decimal prefixes suit, as bytes; empty for plain numbers.
    """
    from matplotlib.ticker import (
        EngFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        StrMethodFormatter,
    )

    low, high = axis.get_view_interval()
    steps = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
    axis.set_major_locator(MaxNLocator(5) if high < 5 * low else steps)
    axis.set_major_formatter(EngFormatter(unit) if unit else StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(labelsize=8)


def legend_entries(*axes: Axes) -> dict[str, Artist]:
    """Return what is labelled in some axes, by label; the first of equal labels."""
    found = [zip(*each.get_legend_handles_labels(), strict=True) for each in reversed(axes)]
    return {label: handle for each in found for handle, label in each}


def legend_above(
    axes: Axes, *, ncols: int, entries: Mapping[str, Artist | tuple[Artist, ...]] | None = None
) -> None:
    """Place the legend above the axes, where it hides nothing.

    Args:
        entries: Artists by label, several as a tuple; those of the axes by default.
    """
    from matplotlib.legend_handler import HandlerTuple

    shown = legend_entries(axes) if entries is None else entries
    axes.legend(
        list(shown.values()),
        list(shown),
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=ncols,
        fontsize=8,
        frameon=False,
        borderaxespad=0.2,
    )


def encoded(figure: Figure, image_format: str) -> bytes:
    """Return the content of the image file, so that the caller can write it atomically.

    Args:
        image_format: ``png``, ``svg`` or ``pdf``.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the font lacks shows as boxes, which needs no warning.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format=image_format)
    return buffer.getvalue()
