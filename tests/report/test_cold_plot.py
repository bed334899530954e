"""Test the plot of a load: its time starts at the first byte, and it can be read."""

from __future__ import annotations

import pytest

from tests.examples import some

pytest.importorskip("matplotlib")

from tests.report.legible import assert_legible
from upriver.report.cold_plot import WeightSpans, plot_load


def spans(count: int) -> list[WeightSpans]:
    """Return weights requested together at 0.9 s, of which every third is never read."""
    return [
        WeightSpans(f"w{n}", 1000 * (n + 1), 0.9, 1.0 + 0.01 * n, None if n % 3 == 2 else 0.95 + 0.02 * n)
        for n in range(count)
    ]


def test_plot_load_starts_at_the_first_byte() -> None:
    figure = plot_load(spans(3), first_byte_s=1.0, answer_s=1.5, title="load")
    [axes] = figure.axes
    assert axes.get_xlim()[0] == 0
    assert "since the first byte, 1 s into the load" in axes.get_xlabel()
    bars = [(bar.get_x(), bar.get_width(), bar.get_y(), bar.get_height()) for bar in axes.patches]
    assert bars == [
        pytest.approx((0, 0, 0, 1000)),
        pytest.approx((0, 0.01, 1000, 2000)),
        pytest.approx((0, 0.02, 3000, 3000)),
    ]
    reads, answer = axes.lines
    assert list(reads.get_xdata()) == [0, 0] and list(reads.get_ydata()) == [500, 2000]
    assert list(answer.get_xdata()) == pytest.approx([0.5, 0.5])


def test_plot_load_without_bytes_starts_with_the_load() -> None:
    figure = plot_load([], first_byte_s=None, answer_s=0.25, title="load")
    assert "since the load began" in figure.axes[0].get_xlabel()
    assert list(figure.axes[0].lines[-1].get_xdata()) == [0.25, 0.25]
    assert_legible(figure)


@pytest.mark.parametrize("count", some(1, [2, 1, 500]))
def test_plot_load_of_any_number_of_weights_is_legible(count: int) -> None:
    title = "Cold start of my_package.models:build from s3://bucket/" + "a-long-folder/" * 20
    for first_byte_s, answer_s in ((1.0, 1.5), (1.0, 0.5), (0.0, 0.0)):
        figure = plot_load(spans(count), first_byte_s=first_byte_s, answer_s=answer_s, title=title)
        assert_legible(figure)
