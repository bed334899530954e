"""Plot every cut of a model: the bytes that cross it, and the operations before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from upriver.report.figure import (
    BLUE,
    PALE_BLUE,
    VERMILION,
    label_logarithmic,
    legend_above,
    legend_entries,
    name_places,
    new_figure,
    width_of,
)
from upriver.text import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


def plot_cuts(rows: Sequence[PlottedCut], *, title: str, stored_bytes: float | None = None) -> Figure:
    """Draw bytes as bars with the stored bytes as a line, operations as a curve, hatches at illegal cuts.

    Args:
        rows: Cuts in order, cut 0 first.
        stored_bytes: Bytes of a stored sample. Without it, the line is at the bytes of the model's input.
    """
    from matplotlib.ticker import EngFormatter

    figure = new_figure(width_of(len(rows)), 6.0, title)
    axes = figure.subplots()
    if stored_bytes is None:
        _draw_bytes(axes, rows, rows[0].bytes_per_sample, "the model's input")
    else:
        _draw_bytes(axes, rows, stored_bytes, "a stored sample")
    flops = [row.flops_before for row in rows]
    work = axes.twinx()
    work.plot(range(len(rows)), flops, ".--", color=VERMILION, label="operations before the cut")
    work.set_ylim(0, 1.05 * max(flops) or 1.0)
    work.yaxis.set_major_formatter(EngFormatter("FLOP"))
    work.set_ylabel("operations before the cut (FLOP per sample)", color=VERMILION)
    name_places(axes, [f"{row.after}  {number}" for number, row in enumerate(rows)])
    axes.set_xlabel("module or operator before the cut, and the cut's number")
    legend_above(axes, ncols=3, entries=legend_entries(axes, work))
    return figure


def _draw_bytes(axes: Axes, rows: Sequence[PlottedCut], stored_bytes: float, stored: str) -> None:
    sizes = [row.bytes_per_sample for row in rows]
    fewer = [number for number, size in enumerate(sizes) if size < stored_bytes]
    others = [number for number, size in enumerate(sizes) if size >= stored_bytes]
    for numbers, colour, compared in ((fewer, BLUE, "less than"), (others, PALE_BLUE, "not less than")):
        if numbers:
            heights = [sizes[number] for number in numbers]
            axes.bar(numbers, heights, color=colour, label=f"crosses the cut: {compared} {stored}")
    axes.axhline(stored_bytes, color="black", linestyle=":", label=f"{stored}: {bytes_text(stored_bytes)}")
    illegal = [number for number, row in enumerate(rows) if not row.legal]
    if illegal:
        whole_height = axes.get_xaxis_transform()
        axes.bar(
            illegal,
            1.0,
            width=1.0,
            transform=whole_height,
            facecolor="none",
            edgecolor="#b0b0b0",
            hatch="///",
            linewidth=0,
            label="not a legal cut",
        )
    positive = [size for size in (*sizes, stored_bytes) if size > 0]
    if positive:
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 2, 2 * max(positive))
        label_logarithmic(axes.yaxis, "B")
    axes.set_ylabel("crossing the cut (bytes per sample)", color=BLUE)
