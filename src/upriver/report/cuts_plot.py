"""Plot every cut of a model: the bytes that cross it, and the operations before it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Protocol

BYTES_COLOUR, FLOPS_COLOUR = "#1f6f8b", "#d55e00"
"""Blue and vermilion, distinct in print and for the colour-blind."""

MOST_NAMES = 60
"""Most cuts with names. Names of more cuts would overlap."""


class PlottedCut(Protocol):
    """Fields of a cut that the plot needs."""

    @property
    def after(self) -> str:
        """Name of the operation or stage before the cut."""

    @property
    def bytes_per_sample(self) -> float:
        """Bytes per sample that cross the cut."""

    @property
    def flops_before(self) -> float:
        """Floating-point operations before the cut, per sample."""

    @property
    def legal(self) -> bool:
        """True if a model may be cut there."""


def plot_cuts(rows: Sequence[PlottedCut], *, title: str, image_format: str) -> bytes:
    """Draw the plot: bytes as steps, operations as a line, hatched where no cut is legal.

    Args:
        rows: Cuts in order.
        image_format: ``png``, ``svg`` or ``pdf``.
    """
    # Use Figure and its canvas directly: pyplot keeps state, and may start a window toolkit.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = range(len(rows))
    figure = Figure(figsize=(max(7.0, min(20.0, 0.3 * len(rows))), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    sizes = [row.bytes_per_sample / 1e6 for row in rows]
    axes.step(numbers, sizes, where="mid", color=BYTES_COLOUR, linewidth=2)
    for number, row in zip(numbers, rows, strict=True):
        if not row.legal:
            axes.axvspan(number - 0.5, number + 0.5, facecolor="none", edgecolor="#b0b0b0", hatch="///")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylabel("MB that cross the cut, per sample", color=BYTES_COLOUR)
    if len(rows) <= MOST_NAMES:
        axes.set_xticks(numbers, [row.after for row in rows], rotation=90, fontsize=7)
    else:
        axes.set_xlabel("cut")
    work = axes.twinx()
    work.plot(numbers, [row.flops_before / 1e9 for row in rows], "--", color=FLOPS_COLOUR, linewidth=1.5)
    work.set_ylim(bottom=0)
    work.set_ylabel("GFLOP before the cut, per sample", color=FLOPS_COLOUR)
    axes.set_title(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=image_format, dpi=120)
    return drawn.getvalue()
