"""Test the plot of cuts: bytes against the stored bytes, operations, and that it can be read."""

from __future__ import annotations

import pytest

from tests.examples import some
from upriver.program.split.cut_survey import Cut
from upriver.report.figure import BLUE, MOST_NAMES, PALE_BLUE, encoded

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from tests.report.legible import assert_legible
from upriver.report.cuts_plot import plot_cuts


def row(number: int, nbytes: float, *, name: str = "layer", flops: float = 1e6, legal: bool = True) -> Cut:
    return Cut(
        cut=number,
        after=name,
        bytes_per_sample=nbytes,
        tensors=1,
        param_bytes_before=0,
        flops_before=number * flops,
        legal=legal,
    )


def coloured(axes: Axes) -> dict[int, tuple[float, tuple[float, ...]]]:
    """Return height and colour of the bar at each cut."""
    bars = (bar for bar in axes.patches if bar.get_fill() and bar.get_facecolor()[3])
    return {round(bar.get_x() + bar.get_width() / 2): (bar.get_height(), bar.get_facecolor()) for bar in bars}


def test_plot_cuts_shows_which_cut_sends_less_than_what_is_stored() -> None:
    sizes = [600_000, 3_000_000, 110_000, 109_999, 4000]
    axes = plot_cuts([row(*each) for each in enumerate(sizes)], title="cuts", stored_bytes=110_000).axes[0]
    dark, pale = to_rgba(BLUE), to_rgba(PALE_BLUE)
    assert coloured(axes) == dict(enumerate(zip(sizes, (pale, pale, pale, dark, dark), strict=True)))
    [line] = [each for each in axes.lines if each.get_linestyle() == ":"]
    assert list(line.get_ydata()) == [110_000, 110_000]
    legend = axes.get_legend()
    assert legend is not None
    labels = {text.get_text() for text in legend.get_texts()}
    assert {"a stored sample: 110 kB", "crosses the cut: less than a stored sample"} < labels
    assert "not a legal cut" not in labels


def test_plot_cuts_without_stored_bytes_compares_with_the_input() -> None:
    rows = [row(0, 600), row(1, 500), row(2, 700, legal=False)]
    axes = plot_cuts(rows, title="cuts").axes[0]
    [line] = [each for each in axes.lines if each.get_linestyle() == ":"]
    assert list(line.get_ydata()) == [600, 600]
    assert coloured(axes)[1][1] == to_rgba(BLUE) and coloured(axes)[2][1] == to_rgba(PALE_BLUE)
    legend = axes.get_legend()
    assert legend is not None
    assert {"the model's input: 600 B", "not a legal cut"} < {text.get_text() for text in legend.get_texts()}


@pytest.mark.parametrize("count", some(1, [1, MOST_NAMES, 2, 400]))
def test_plot_cuts_of_any_number_of_cuts_is_legible(count: int) -> None:
    names = [f"encoder.layers.{number}.attention.output.dropout.0" for number in range(count)]
    rows = [row(n, 10.0 ** (n % 7), name=name, legal=n % 5 != 4) for n, name in enumerate(names)]
    assert_legible(plot_cuts(rows, title="Cuts of transformers:" + "long/name" * 30, stored_bytes=12345))


@pytest.mark.full
def test_plot_cuts_without_bytes_or_operations_is_legible() -> None:
    for sizes in ((0.0,), (0.0, 0.0), (5.0, 5.0), (0.0, 5e12)):
        assert_legible(plot_cuts([row(n, size, flops=0) for n, size in enumerate(sizes)], title="nothing"))


def test_plot_cuts_takes_names_for_text() -> None:
    figure = plot_cuts([row(0, 5, name="$\\frac{$ _^"), row(1, 5, name="层")], title="$\\sum_$ 网")
    assert encoded(figure, "png").startswith(b"\x89PNG")
