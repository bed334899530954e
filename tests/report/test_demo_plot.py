"""Test the plot of the demo: one epoch over time, its colours, and that it can be read."""

from __future__ import annotations

import io

import pytest

from tests.examples import some

pytest.importorskip("matplotlib")

from PIL import Image

from tests.report.legible import assert_legible
from upriver.report.demo_plot import LANE_HEIGHT, BusySpan, Curve, plot_demo
from upriver.report.figure import encoded


def curve(label: str, seconds: float, *, epochs: int = 2, steps: int = 3) -> Curve:
    return Curve(
        label=label,
        epoch_s=[seconds] * epochs,
        epoch_bytes=[round(1e6 * seconds)] * epochs,
        losses=[2.0 - 0.1 * step for step in range(steps)],
        busy=[BusySpan(0, seconds / 2, 0.5, 1.0, 0.25), BusySpan(seconds / 2, seconds, 0.0, 1.0, 0.75)],
        busy_epoch=2,
    )


def test_plot_demo_draws_an_epoch_of_each_run_on_one_time_axis() -> None:
    figure = plot_demo(curve("plain", 30), curve("near-data", 12), title="both")
    plain, near = figure.axes[:2]
    assert plain.get_xlim() == near.get_xlim() == (0, 30)
    assert plain.get_title(loc="right") == "plain, epoch 2: 30.0 s"
    assert [text.get_text() for text in plain.get_yticklabels()] == ["trainer", "link", "near the data"]
    for lane, shares in enumerate(((0.5, 0.0), (1.0, 1.0), (0.25, 0.75))):
        outline = near.collections[lane].get_paths()[0].vertices
        for time_s, share in zip((3, 9), shares, strict=True):
            tops = [y for x, y in outline if abs(x - time_s) <= 3]
            assert any(y == pytest.approx(2 - lane + LANE_HEIGHT * share) for y in tops)
    legend = plain.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "near-data"]


def test_plot_demo_says_whether_losses_are_equal() -> None:
    other = curve("near-data", 12)
    assert plot_demo(curve("plain", 30), other, title="a").axes[-1].get_title().endswith("on the other")
    assert plot_demo(curve("plain", 30, steps=2), other, title="a").axes[-1].get_title() == "training loss"


@pytest.mark.full
def test_plot_demo_has_both_colours_and_all_formats() -> None:
    figure = plot_demo(curve("plain", 30), curve("near-data", 12), title="both")
    with Image.open(io.BytesIO(encoded(figure, "png"))) as picture:
        assert picture.format == "PNG"
        colours = {tuple(pixel) for pixel in picture.convert("RGB").get_flattened_data()}
    assert {(0x8C, 0x8C, 0x8C), (0x1F, 0x6F, 0x8B)} <= colours
    assert encoded(figure, "pdf").startswith(b"%PDF")


@pytest.mark.full
@pytest.mark.parametrize(
    ("seconds", "epochs", "steps"), some(1, [(30.0, 3, 21), (0.0, 1, 1), (1234.5, 40, 500)])
)
def test_plot_demo_of_few_and_many_epochs_is_legible(seconds: float, epochs: int, steps: int) -> None:
    both = (curve(label, seconds, epochs=epochs, steps=steps) for label in ("plain", "near-data"))
    title = "Fine-tuning ResNet-18: 25% at -4 (as stored), 75% at 11 (layer4.0), " * 3
    assert_legible(plot_demo(*both, title=title))
