"""Plot the demo's results: epoch times, bytes over the link, and loss curves that coincide."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#8c8c8c", "#1f6f8b")
"""Plain and near-data, distinct in print and for the colour-blind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Measurements of one training run.

    Attributes:
        epoch_bytes: Bytes over the link in each epoch.
        losses: Loss of each training step.
    """

    label: str
    epoch_s: Sequence[float]
    epoch_bytes: Sequence[int]
    losses: Sequence[float]


def plot_demo(plain: Curve, near_data: Curve, *, title: str, image_format: str = "png") -> bytes:
    """Draw the plot.

    Args:
        plain: Run with all work on the trainer.
        near_data: Run with work near the data.
        image_format: ``png``, ``svg`` or ``pdf``.

    Returns:
        Content of the image file, so that the caller can write it atomically.
    """
    # Use Figure and its canvas directly: pyplot keeps state, and may start a window toolkit.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    seconds, bytes_, losses = figure.subplots(1, 3, width_ratios=(1, 1, 1.4))
    curves = (plain, near_data)
    _bars(seconds, curves, [curve.epoch_s for curve in curves], "epoch time", "seconds")
    megabytes = [[each / 1e6 for each in curve.epoch_bytes] for curve in curves]
    _bars(bytes_, curves, megabytes, "over the link, per epoch", "MB")
    _losses(losses, curves)
    figure.suptitle(title)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=image_format, dpi=120)
    return drawn.getvalue()


def _bars(
    axes: Axes, curves: Sequence[Curve], heights: Sequence[Sequence[float]], title: str, unit: str
) -> None:
    """Draw epochs side by side, with one bar for each run."""
    width = 0.8 / len(curves)
    for index, (curve, values) in enumerate(zip(curves, heights, strict=True)):
        places = [epoch + (index - (len(curves) - 1) / 2) * width for epoch in range(1, len(values) + 1)]
        bars = axes.bar(places, values, width=width, label=curve.label, color=COLOURS[index])
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set(title=title, xlabel="epoch", ylabel=unit)
    axes.set_xticks(range(1, max(map(len, heights)) + 1))


def _losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw a wide pale line below and a thin one above: equal curves appear as one line with a halo."""
    for index, (curve, width, style) in enumerate(zip(curves, (5.0, 1.5), ("-", "--"), strict=True)):
        steps = range(1, len(curve.losses) + 1)
        axes.plot(steps, curve.losses, style, linewidth=width, label=curve.label, color=COLOURS[index])
    axes.set(title="training loss", xlabel="step", ylabel="cross-entropy")
    axes.set_ylim(bottom=0)
    axes.legend()
