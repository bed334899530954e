"""Test the plot of two sides' difference: what it draws, and that it can be read."""

from __future__ import annotations

import math

import pytest

from tests.examples import some
from upriver.report.figure import MOST_NAMES
from upriver.rpc.program_diff import StageDiff
from upriver.rpc.tolerance import Deviation

pytest.importorskip("matplotlib")

from tests.report.legible import assert_legible
from upriver.report.diff_plot import plot_diff


def stage(cut: int, own: float, accumulated: float, *, name: str = "layer") -> StageDiff:
    both = [
        Deviation(relative=each, num_different=int(each > 0), num_elements=9) for each in (own, accumulated)
    ]
    return StageDiff(
        cut=cut,
        name=name,
        kind="Linear",
        operators=("linear.default",),
        constants=(),
        reads=(),
        gives=(),
        own=both[0],
        accumulated=both[1],
    )


def test_plot_draws_both_differences_at_each_cut_that_has_one() -> None:
    rows = [stage(1, 0, 0), stage(2, 1e-7, 1e-7), stage(3, 0, 3e-7), stage(4, math.inf, 1e-6)]
    [axes] = plot_diff(rows, title="Difference").axes
    accumulated, own = axes.lines
    assert axes.get_yscale() == "log"
    assert [value for value in accumulated.get_ydata() if value == value] == [1e-7, 3e-7, 1e-6]
    assert [value for value in own.get_ydata() if value == value] == [1e-7]
    assert list(own.get_xdata()) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", some(1, [MOST_NAMES, 1, 2, 400]))
def test_plot_of_any_number_of_cuts_is_legible(count: int) -> None:
    name = "encoder.layers.{}.attention.output.dropout.0"
    rows = [stage(n + 1, 10.0 ** -(n % 9), 10.0 ** (n % 5 - 8), name=name.format(n)) for n in range(count)]
    assert_legible(plot_diff(rows, title="Difference of transformers:" + "long/name" * 30))


def test_plot_of_equal_sides_is_legible() -> None:
    assert_legible(plot_diff([stage(1, 0, 0), stage(2, 0, 0)], title="nothing"))
