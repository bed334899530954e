"""Plot the demo's results: one epoch of each run over time, epoch times, bytes, and losses that coincide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from upriver.report.figure import BLUE, GREY, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (GREY, BLUE)
"""Plain and near-data."""

MOST_VALUES = 4
"""Most epochs with values on their bars. Values of more bars would overlap."""

LANES = ("near the data", "link", "trainer")
"""Names of the lanes in the order of a `BusySpan`, from the top."""

LANE_HEIGHT = 0.85
"""Height of a lane that is busy all the time; lanes are 1 apart."""


class BusySpan(NamedTuple):
    """BusySpan shares of the storage tier, the link and the trainer during a span of an epoch, 0 to 1.

    Attributes:
        start_s: Start of the span, since that of the epoch.
        stop_s: End of the span.
    """

    start_s: float
    stop_s: float
    storage: float
    link: float
    trainer: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Measurements of one training run.

    Attributes:
        epoch_bytes: Bytes over the link in each epoch.
        losses: Loss of each training step.
        busy: Spans of the epoch that is drawn over time.
        busy_epoch: Number of that epoch, from 1.
    """

    label: str
    epoch_s: Sequence[float]
    epoch_bytes: Sequence[int]
    losses: Sequence[float]
    busy: Sequence[BusySpan]
    busy_epoch: int


def plot_demo(plain: Curve, near_data: Curve, *, title: str) -> Figure:
    """Draw one epoch of each run over time, and below them all epochs.

    Args:
        plain: Run with all work on the trainer.
        near_data: Run with work near the data.
    """
    figure = new_figure(12.0, 8.0, title)
    curves = (plain, near_data)
    panels = figure.subplot_mosaic([["plain"] * 3, ["near"] * 3, ["time", "bytes", "loss"]])
    for key, curve, colour in zip(("plain", "near"), curves, COLOURS, strict=True):
        _timeline(panels[key], curve, colour)
    panels["plain"].sharex(panels["near"])
    panels["plain"].tick_params(labelbottom=False)
    panels["near"].set(xlabel="time since the start of the epoch (s)", xlim=(0, _longest(curves)))
    for curve, colour in zip(curves, COLOURS, strict=True):
        panels["plain"].bar([0], [0], color=colour, label=curve.label)
    legend_above(panels["plain"], ncols=2)
    _bars(panels["time"], [curve.epoch_s for curve in curves])
    panels["time"].set(title="epoch time", ylabel="time (s)")
    _bars(panels["bytes"], [[each / 1e6 for each in curve.epoch_bytes] for curve in curves])
    panels["bytes"].set(title="over the link in an epoch", ylabel="size (MB)")
    _losses(panels["loss"], curves)
    return figure


def _longest(curves: Sequence[Curve]) -> float:
    return max((span.stop_s for curve in curves for span in curve.busy), default=0.0) or 1.0


def _timeline(axes: Axes, curve: Curve, colour: str) -> None:
    """Draw a lane for each resource, filled as high as it is busy."""
    seconds = [span.start_s for span in curve.busy] + [span.stop_s for span in curve.busy[-1:]]
    for lane in range(len(LANES)):
        shares = [span[2 + lane] for span in curve.busy]
        bottom = len(LANES) - 1 - lane
        tops = [bottom + LANE_HEIGHT * share for share in (*shares, *shares[-1:])]
        axes.fill_between(seconds, bottom, tops, step="post", color=colour, linewidth=0)
        axes.axhline(bottom, color="black", linewidth=0.5)
    axes.set_yticks([LANE_HEIGHT / 2 + lane for lane in range(len(LANES))], reversed(LANES))
    axes.set_ylim(0, len(LANES))
    axes.set_ylabel("busy (lane: 0 to 100 %)")
    end = f": {curve.busy[-1].stop_s:.1f} s" if curve.busy else ""
    axes.set_title(f"{curve.label}, epoch {curve.busy_epoch}{end}", loc="right", fontsize=10)


def _bars(axes: Axes, heights: Sequence[Sequence[float]]) -> None:
    """Draw epochs next to each other, with one bar for each run."""
    from matplotlib.ticker import MaxNLocator

    width = 0.8 / len(heights)
    for index, values in enumerate(heights):
        places = [epoch + (index - (len(heights) - 1) / 2) * width for epoch in range(1, len(values) + 1)]
        bars = axes.bar(places, values, width=width, color=COLOURS[index])
        if len(values) <= MOST_VALUES:
            axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.margins(y=0.12)
    axes.set(xlabel="epoch (number)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw a wide line below and a thin one above: equal curves appear as one line with a halo."""
    for curve, colour, width, style in zip(curves, COLOURS, (5.0, 1.5), ("-", "--"), strict=True):
        axes.plot(range(1, len(curve.losses) + 1), curve.losses, style, linewidth=width, color=colour)
    same = ": one curve on the other" if list(curves[0].losses) == list(curves[1].losses) else ""
    axes.set(title=f"training loss{same}", xlabel="training step (number)", ylabel="cross-entropy (nats)")
    axes.set_ylim(bottom=0)
