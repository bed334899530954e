"""Test the plot of plans: its bars, the marked plans, and that no question breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.planning import alexnet, cluster, clusters, profiles, stage, workloads
from tests.report.asking import EPOCH, plans, points
from upriver.policies import POLICIES
from upriver.report.choices import marks
from upriver.report.plan_plot import GREYS, TIERS, draw_cuts, plot_plans
from upriver.types import Cluster, ComputeTier, CutRow, Profile, StorageTier, Workload

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

PNG = b"\x89PNG"


def small() -> Cluster:
    return replace(cluster(concurrency=4), compute=ComputeTier(memory_bytes=1.2e9))


def drawn(machines: Cluster) -> tuple[Figure, list[CutRow]]:
    asked = plans(alexnet(storage_s=6e-5), machines)
    figure = Figure()
    FigureCanvasAgg(figure)
    rows = list(next(iter(asked.values())).table)
    draw_cuts(figure.subplots(), rows, marks(asked))
    return figure, rows


def test_bars_are_the_seconds_of_each_tier_one_on_the_other() -> None:
    figure, rows = drawn(small())
    bars = [c for c in figure.axes[0].containers if len(c.patches) == len(rows)]
    assert len(bars) == 3
    for place, row in enumerate(rows):
        bottom = 0.0
        for (_, name, colour), grey, container in zip(TIERS, GREYS, bars, strict=True):
            patch = container.patches[place]
            assert patch.get_height() == pytest.approx(getattr(row.cost, name))
            assert patch.get_y() == pytest.approx(bottom)
            assert patch.get_facecolor() == to_rgba(colour if row.feasible else grey)
            bottom += patch.get_height()
    assert {row.feasible for row in rows} == {True, False}


def test_choices_stand_above_their_cuts() -> None:
    figure, rows = drawn(small())
    asked = plans(alexnet(storage_s=6e-5), small())
    texts = {round(text.xy[0]): text.get_text() for text in figure.axes[0].texts}
    expected = marks(asked)
    assert {rows[place].cut for place in texts} == set(expected)
    for place, text in texts.items():
        for name in expected[rows[place].cut]:
            assert name in text
    assert any("%" in text for text in texts.values()) == any(len(p.routes) > 1 for p in asked.values())


def test_the_legend_names_what_there_is() -> None:
    for machines, grey in ((small(), True), (cluster(), False)):
        legend = drawn(machines)[0].axes[0].get_legend()
        assert legend is not None
        labels = {text.get_text() for text in legend.get_texts()}
        assert labels == {"storage", "network", "compute", "epoch"} | ({"does not fit"} if grey else set())


@given(profile=profiles(), cluster=clusters(), workload=workloads)
@settings(max_examples=12, deadline=None)
def test_every_question_has_a_picture(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    sweep = points(profile, cluster, (1e5, 1e9), workload)
    picture = plot_plans(plans(profile, cluster, workload), title="random", points=sweep)
    assert picture.startswith(PNG)


@pytest.mark.parametrize("count", [1, 59, 300])
def test_long_and_short_chains(count: int) -> None:
    long = replace(alexnet(), stages=tuple(stage(f"s{k}", 1000 + k) for k in range(count)), freeze=count)
    assert plot_plans(plans(long, cluster()), title="long").startswith(PNG)


def test_names_are_no_formulas_and_need_no_font() -> None:
    odd = alexnet()
    stages = (replace(odd.stages[0], name="$\\frac{$ _^"), replace(odd.stages[1], name="层"), *odd.stages[2:])
    asked = plans(replace(odd, stages=stages), cluster())
    assert plot_plans(asked, title="$\\sum_$ 网").startswith(PNG)


def test_nothing_that_fits_is_drawn_all_the_same() -> None:
    tiny = replace(cluster(), compute=ComputeTier(memory_bytes=0), storage=StorageTier(memory_bytes=0))
    picture = plot_plans(plans(alexnet(), tiny), title="none", points=points(alexnet(), tiny))
    assert picture.startswith(PNG)


def test_a_plan_without_cuts_has_an_empty_picture() -> None:
    bare = replace(POLICIES["hapi"](alexnet(), cluster(), EPOCH), table=())
    assert plot_plans({"hapi": bare}, title="unsplit").startswith(PNG)


def test_other_forms_of_picture() -> None:
    one = {"hapi": POLICIES["hapi"](alexnet(), cluster(), EPOCH)}
    assert b"<svg" in plot_plans(one, title="a", image_format="svg")
    assert plot_plans(one, title="a", image_format="pdf").startswith(b"%PDF")
