"""Check that a figure can be read alone, by the boxes of its texts as they are drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import combinations

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import Collection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

UNIT = re.compile(r"\((bytes|s\b|number|%|nats|MB|bit/s|FLOP)|0 to 100 %")
"""Unit in the label of an axis of numbers."""

BLACK = "#000000"
"""Colour of texts and of lines that a label names."""

TOUCHING = 0.5
"""Pixels by which boxes may overlap: edges of boxes are rounded."""

GAP = 4.0
"""Pixels between two texts of one line, without which they read as one: about a space."""


def assert_legible(figure: Figure) -> None:
    """Check title, units, legend, named colours, and that no text covers or leaves another's place."""
    figure.draw_without_rendering()
    assert figure.get_suptitle()
    _assert_apart(figure)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            _assert_unit(axis)
    legends = [child for axes in figure.axes for child in axes.get_children() if isinstance(child, Legend)]
    assert legends and all(legend.get_texts() for legend in legends)
    boxes = [axes.get_window_extent() for axes in figure.axes]
    for legend in legends:
        assert not any(_overlap(legend.get_window_extent(), box) for box in boxes), "a legend covers data"
    named = {BLACK} | {colour for legend in legends for colour in _colours(legend.findobj())}
    named |= {to_hex(axis.label.get_color()) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)}
    for axes in figure.axes:
        unnamed = set(_drawn(axes)) - named
        assert not unnamed, f"the legend does not name {unnamed}"


def _assert_apart(figure: Figure) -> None:
    texts = [(text, text.get_window_extent()) for text in _texts(figure)]
    for text, box in texts:
        inside = Bbox.intersection(box, figure.bbox)
        assert inside is not None and inside.width > box.width - 2 and inside.height > box.height - 2, (
            f"{text.get_text()!r} is cut off"
        )
    for axes in figure.axes:
        frame = axes.get_window_extent()
        for text in axes.texts:
            box = text.get_window_extent()
            assert frame.containsx(box.x0) and frame.containsx(box.x1), f"{text} leaves its axes"
            assert frame.containsy(box.y0) and frame.containsy(box.y1), f"{text} leaves its axes"
    for (one, box), (other, other_box) in combinations(texts, 2):
        assert not _overlap(box.padded(GAP, 0), other_box), f"{one.get_text()!r} covers {other.get_text()!r}"


def _texts(figure: Figure) -> Iterator[Text]:
    """Yield what is drawn: tick labels outside the view are not."""
    hidden = {id(text) for axes in figure.axes for text in _hidden(axes)}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in hidden:
            yield text


def _hidden(axes: Axes) -> Iterator[Text]:
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        margin = 1e-9 * (high - low)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not axis.get_visible() or not low - margin <= tick.get_loc() <= high + margin:
                yield from (tick.label1, tick.label2)
        if not axis.get_visible():
            yield from (axis.label, axis.offsetText)


def _assert_unit(axis: Axis) -> None:
    shown = [tick.label1 for tick in axis.get_major_ticks() if tick.label1.get_visible()]
    shown += [tick.label2 for tick in axis.get_major_ticks() if tick.label2.get_visible()]
    texts = [text.get_text() for text in shown if text.get_text()]
    if not axis.get_visible() or not texts:
        return
    label = axis.get_label_text()
    assert label, f"an axis with {texts[:3]} has no label"
    if all(re.match(r"[\u2212\d.]+( |$)", text) for text in texts):
        assert UNIT.search(label) or "number" in label or "cut" in label, f"no unit in {label!r}"


def _drawn(axes: Axes) -> Iterator[str]:
    """Yield the colours of bars, lines and areas."""
    yield from _colours((*axes.patches, *axes.lines, *axes.collections))


def _colours(artists: Iterable[Artist]) -> Iterator[str]:
    for artist in artists:
        if isinstance(artist, Collection):
            if isinstance(artist, PolyCollection) or len(artist.get_offsets()):
                yield from map(to_hex, artist.get_facecolors())
        elif isinstance(artist, Patch) and artist.get_fill() and artist.get_facecolor()[3] > 0:
            yield to_hex(artist.get_facecolor())
        elif isinstance(artist, Line2D):
            yield to_hex(artist.get_color())


def _overlap(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    return shared is not None and shared.width > TOUCHING and shared.height > TOUCHING
