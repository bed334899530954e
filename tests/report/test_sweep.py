"""Test policies over bandwidths: equal to asking each time, as data, table and drawing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.planning import alexnet, cluster, clusters, profiles, workloads
from tests.report.asking import EPOCH, points
from upriver.policies import POLICIES
from upriver.report.choices import choice_text, fastest, marks, share_text, shares
from upriver.report.plan import to_dict
from upriver.report.sweep import choices_table, epochs_table, logarithmic, sweep_bandwidth, sweep_to_dict
from upriver.report.sweep_svg import epochs_svg
from upriver.types import Cluster, ComputeTier, Link, Plan, Profile, StorageTier, Workload


@given(profile=profiles(), cluster=clusters(), workload=workloads)
@settings(max_examples=examples(30))
def test_each_point_is_what_a_fresh_question_answers(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    for point in sweep_bandwidth(POLICIES, (1e5, 1e8), profile, cluster, workload):
        link = Link(bandwidth_bytes_per_s=point.bandwidth_bytes_per_s, rtt_s=cluster.link.rtt_s)
        for name, policy in POLICIES.items():
            fresh = policy(profile, replace(cluster, link=link), workload)
            assert to_dict(point.plans[name]) == to_dict(fresh)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
@settings(max_examples=examples(30))
def test_every_sweep_can_be_written(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    sweep = points(profile, cluster, (1e4, 1e6, 1e9), workload)
    document = json.loads(json.dumps(sweep_to_dict(sweep), allow_nan=False))
    for written in document["points"]:
        for choice in written["plans"].values():
            assert (choice["predicted"] is not None) == choice["feasible"] == bool(choice["shares"])
            assert not choice["shares"] or sum(choice["shares"].values()) == pytest.approx(1)
    assert len(choices_table(sweep).splitlines()) == len(epochs_table(sweep).splitlines()) == 5
    ElementTree.fromstring(epochs_svg(sweep))


def test_the_cut_moves_to_fewer_bytes_as_the_link_thins() -> None:
    profile = alexnet()
    sweep = sweep_bandwidth(POLICIES, logarithmic(1e5, 1e10), profile, cluster(concurrency=4), EPOCH)
    for name in ("hapi", "exhaustive"):
        sizes = [profile.cut_bytes(point.plans[name].cut) for point in sweep]
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    for name in ("nosplit", "freeze", "min"):
        assert len({point.plans[name].cut for point in sweep}) == 1


def test_no_more_bandwidth_makes_an_epoch_longer() -> None:
    sweep = sweep_bandwidth(POLICIES, logarithmic(1e5, 1e10), alexnet(), cluster(), EPOCH)
    epochs = [p.predicted.epoch_s for point in sweep if (p := point.plans["exhaustive"]).predicted]
    assert len(epochs) == 13 and epochs == sorted(epochs, reverse=True)


def test_what_does_not_fit_is_a_dash() -> None:
    tiny = replace(cluster(), compute=ComputeTier(memory_bytes=1000), storage=StorageTier(memory_bytes=0))
    sweep = points(alexnet(), tiny, (1e6,))
    assert choices_table(sweep).splitlines()[2].split() == ["8", "Mbit/s", *["-"] * len(POLICIES)]
    assert epochs_table(sweep).splitlines()[2].split() == ["8", "Mbit/s", *["-"] * len(POLICIES)]
    assert all(choice["cut"] is None for choice in sweep_to_dict(sweep)["points"][0]["plans"].values())
    assert "polyline" not in epochs_svg(sweep) and "circle" not in epochs_svg(sweep)


def mix(plan: Plan, *cuts_and_shares: tuple[int, float]) -> Plan:
    route = plan.routes[0]
    routes = []
    for cut, share in cuts_and_shares:
        segments = (replace(route.segments[0], stop=cut), replace(route.segments[-1], start=cut))
        routes.append(replace(route, segments=segments, share=share))
    return replace(plan, routes=tuple(routes))


def test_choices_in_words() -> None:
    one = POLICIES["freeze"](alexnet(), cluster(), EPOCH)
    two = mix(one, (5, 0.25), (13, 0.625), (6, 0.125))
    none = replace(one, feasible=False, predicted=None)
    assert [choice_text(plan) for plan in (one, two, none)] == [
        *("17", "13 62.5% + 5 25% + 6 12.5%", "does not fit")
    ]
    assert list(shares(two)) == [13, 5, 6] and shares(none) == {}
    assert marks({"a": one, "b": two, "c": mix(one, (13, 1.0)), "d": none}) == {
        17: ["a"],
        13: ["b 62.5%", "c"],
        5: ["b 25%"],
        6: ["b 12.5%"],
    }
    assert fastest([one, none]) is one and fastest([none]) is None
    assert [share_text(share) for share in (1.0, 0.5, 0.0004, 1 / 3)] == ["100%", "50%", "0.04%", "33.3%"]


def test_the_drawing_has_a_line_for_each_policy_inside_its_frame() -> None:
    picture = epochs_svg(points(alexnet(), cluster(), logarithmic(6.25e6, 1.5e9)))
    assert picture.count("<polyline") == len(POLICIES)
    for name in POLICIES:
        assert f">{name}</text>" in picture
    for text in re.findall(r'polyline points="([^"]*)"', picture):
        for place in text.split():
            x, y = map(float, place.split(","))
            assert 44 <= x <= 352 and 8 <= y <= 216
    assert epochs_svg(points(alexnet(), cluster(), (1e6,))).count("<circle") == len(POLICIES)


def test_one_end_is_enough() -> None:
    assert logarithmic(5.0, 5.0) == (5.0,)
