"""Test the plot of plans: its bars, the marked plans, and that no question breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.examples import examples, some
from tests.planning import alexnet, cluster, clusters, profiles, stage, workloads
from tests.report.asking import EPOCH, plans, points
from upriver.policies import POLICIES
from upriver.report.choices import choice_text, shares
from upriver.report.figure import MOST_NAMES, encoded
from upriver.report.plan_plot import GREYS, TIERS, plot_plans
from upriver.report.sweep import logarithmic
from upriver.types import Cluster, ComputeTier, CutRow, Profile, StorageTier, TailProfile, Workload

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tests.report.legible import assert_legible

PNG = b"\x89PNG"


def small() -> Cluster:
    return replace(cluster(concurrency=4), compute=ComputeTier(memory_bytes=1.2e9))


def drawn(machines: Cluster) -> tuple[Figure, list[CutRow]]:
    asked = plans(alexnet(storage_s=6e-5), machines)
    return plot_plans(asked, title="alexnet"), list(next(iter(asked.values())).table)


def test_bars_are_the_seconds_of_each_tier_one_on_the_other() -> None:
    figure, rows = drawn(small())
    bars = [c for c in figure.axes[1].containers if len(c.patches) == len(rows)]
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


def test_plot_plans_marks_each_choice_in_the_line_of_its_policy() -> None:
    figure, rows = drawn(small())
    choices, cuts, told = figure.axes
    asked = plans(alexnet(storage_s=6e-5), small())
    expected = [
        (rows[place].cut, line) for place, line in choices.collections[0].get_offsets().data.astype(int)
    ]
    assert expected == [(cut, line) for line, plan in enumerate(asked.values()) for cut in shares(plan)]
    assert [text.get_text() for text in choices.get_yticklabels()] == list(asked)
    assert [text.get_text() for text in told.get_yticklabels()] == [choice_text(p) for p in asked.values()]
    chosen = {cut for plan in asked.values() for cut in shares(plan)}
    for row, bar in zip(rows, cuts.containers[0].patches, strict=True):
        assert (bar.get_edgecolor() == to_rgba("black")) == (row.cut in chosen)


def test_the_legend_names_what_there_is() -> None:
    for machines, grey in ((small(), True), (cluster(), False)):
        legend = drawn(machines)[0].axes[1].get_legend()
        assert legend is not None
        labels = {text.get_text() for text in legend.get_texts()}
        assert labels == {"storage", "network", "compute", "epoch"} | ({"does not fit"} if grey else set())


@given(profile=profiles(), cluster=clusters(), workload=workloads)
@settings(max_examples=examples(12), deadline=None)
def test_every_question_has_a_picture(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    sweep = points(profile, cluster, (1e5, 1e9), workload)
    figure = plot_plans(plans(profile, cluster, workload), title="random", points=sweep)
    figure.draw_without_rendering()


@pytest.mark.parametrize("count", some(1, [MOST_NAMES, 1, 300]))
@pytest.mark.parametrize("machines", some(1, [small(), cluster(4e6)]), ids=["small", "slow"])
def test_plot_plans_of_short_and_long_chains_is_legible(count: int, machines: Cluster) -> None:
    names = [f"encoder.layers.{k}.attention.output.dropout.0" for k in range(count)]
    stages = tuple(stage(name, 1000 + k, storage=1e-5) for k, name in enumerate(names))
    long = replace(alexnet(), stages=stages, freeze=count)
    assert_legible(plot_plans(plans(long, machines), title="Where to cut " + "a/long/name" * 20))


@pytest.mark.full
def test_plot_plans_with_a_sweep_is_legible() -> None:
    for rates in ((1e6,), (1e6, 1.1e6, 1.2e6), logarithmic(1e4, 1e9)):
        sweep = points(alexnet(storage_s=6e-5), small(), rates)
        assert_legible(plot_plans(plans(alexnet(storage_s=6e-5), small()), title="alexnet", points=sweep))


@pytest.mark.full
def test_plot_plans_of_zero_seconds_is_legible() -> None:
    free = replace(
        alexnet(storage_s=0, compute_s=0, stored_bytes=0),
        stages=(stage("free", 0, storage=0, compute=0),),
        freeze=1,
        tail=TailProfile(seconds=(0, 0), param_bytes=0, peak_bytes=0),
    )
    sweep = points(free, cluster())
    assert_legible(plot_plans(plans(free, cluster()), title="free", points=sweep))


@pytest.mark.full
def test_names_are_no_formulas_and_need_no_font() -> None:
    odd = alexnet()
    stages = (replace(odd.stages[0], name="$\\frac{$ _^"), replace(odd.stages[1], name="层"), *odd.stages[2:])
    asked = plans(replace(odd, stages=stages), cluster())
    assert encoded(plot_plans(asked, title="$\\sum_$ 网"), "png").startswith(PNG)


@pytest.mark.full
def test_nothing_that_fits_is_drawn_all_the_same() -> None:
    tiny = replace(cluster(), compute=ComputeTier(memory_bytes=0), storage=StorageTier(memory_bytes=0))
    assert_legible(plot_plans(plans(alexnet(), tiny), title="none", points=points(alexnet(), tiny)))


def test_a_plan_without_cuts_has_an_empty_picture() -> None:
    bare = replace(POLICIES["hapi"](alexnet(), cluster(), EPOCH), table=())
    assert_legible(plot_plans({"hapi": bare}, title="unsplit"))


@pytest.mark.full
def test_other_forms_of_picture() -> None:
    figure = plot_plans({"hapi": POLICIES["hapi"](alexnet(), cluster(), EPOCH)}, title="a")
    assert b"<svg" in encoded(figure, "svg")
    assert encoded(figure, "pdf").startswith(b"%PDF")
