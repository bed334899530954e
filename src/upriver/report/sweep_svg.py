"""Draw a sweep as inline SVG at the width of a phone, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from upriver.report.choices import unit_of
from upriver.report.sweep import SweepPoint
from upriver.report.sweep_plot import COLOURS
from upriver.text import rate_text, seconds_text

WIDTH, HEIGHT = 360, 240
"""Size of the drawing. A phone shows it one to one, a desktop twice as large."""

LEFT, RIGHT, TOP, BOTTOM = 44, 8, 20, 36
LEGEND_LINE = 13


def epochs_svg(points: Sequence[SweepPoint]) -> str:
    """Draw the predicted epoch of each policy over the bandwidth, both logarithmic.

    Later lines are thinner, so that equal ones appear as one with a halo.
    """
    names = list(points[0].plans)
    x = _Scale([point.bandwidth_bytes_per_s for point in points], LEFT, WIDTH - RIGHT)
    seconds = [plan.predicted.epoch_s for point in points for plan in point.plans.values() if plan.predicted]
    y = _Scale([s for s in seconds if s > 0], HEIGHT - BOTTOM, TOP)
    quantity = f"predicted {unit_of(points[0].plans)}"
    parts = [_frame(), _text(4, 9, f"{quantity} (s, logarithmic)", "start")]
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "bandwidth (bit/s, logarithmic)", "middle")]
    parts += [_text(x.at(value), HEIGHT - 22, rate_text(value), "middle") for value in x.labels()]
    parts += [_text(LEFT - 4, y.at(value) + 3, f"{seconds_text(value)} s", "end") for value in y.labels()]
    for number, name in enumerate(names):
        colour, width = _colour(number), 1.0 + 0.8 * (len(names) - 1 - number)
        places = [
            (x.at(point.bandwidth_bytes_per_s), y.at(plan.predicted.epoch_s))
            for point in points
            if (plan := point.plans[name]).predicted and plan.predicted.epoch_s > 0
        ]
        if places:
            parts.append(_line(places, colour, width))
        parts.append(_legend(number, name, colour))
    height = HEIGHT + LEGEND_LINE * math.ceil(len(names) / 3) + 4
    label = f'role="img" aria-label="{quantity} over the bandwidth"'
    return f'<svg class="line" viewBox="0 0 {WIDTH} {height}" {label}>{"".join(parts)}</svg>'


class _Scale:
    """Logarithmic scale of some values over a range of the drawing."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.least, self.most = min(values, default=1.0), max(values, default=1.0)
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        """Return the coordinate of a value; the middle if there is only one value."""
        if self.least == self.most:
            return (self._first + self._last) / 2
        part = math.log(value / self.least) / math.log(self.most / self.least)
        return self._first + part * (self._last - self._first)

    def labels(self) -> list[float]:
        """Return the values of the labels: both ends and their geometric middle."""
        between = math.exp((math.log(self.least) + math.log(self.most)) / 2)
        return [self.least] if self.least == self.most else [self.least, between, self.most]


def _colour(number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    return "currentColor" if colour == "#000000" else colour  # black would vanish on a dark page


def _frame() -> str:
    return (
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" '
        'stroke-width="1"/>'
    )


def _line(places: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if len(places) == 1:
        return (
            f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="{width + 2:.1f}" fill="{colour}"/>'
        )
    return f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{width:.1f}"/>'


def _legend(number: int, name: str, colour: str) -> str:
    x, y = LEFT + number % 3 * 104, HEIGHT + 8 + LEGEND_LINE * (number // 3)
    box = f'<rect x="{x}" y="{y - 7}" width="8" height="8" fill="{colour}"/>'
    return box + _text(x + 12, y, name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    # The label at an end of the axis must not extend over the edge.
    edge = "end" if anchor == "middle" and x > WIDTH - 40 else anchor
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="9" text-anchor="{edge}" fill="currentColor">'
        f"{escape(text)}</text>"
    )
