"""Check LoADPart's Algorithm 1 against the paper's own words and against brute force, with our policy."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import ALEXNET_BYTES, alexnet, clusters, profiles, workloads
from upriver.errors import ConfigError, NoFeasibleCut
from upriver.latency import ALL_SENT, LatencyModel, LatencySums
from upriver.policies import POLICIES, REQUEST_POLICIES, choose
from upriver.policies.loadpart import decide, plan
from upriver.report.plan import to_dict
from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StageProfile,
    StorageTier,
    Tier,
    Workload,
)

ONE = Workload(batch_size=1, num_samples=1)

every_policy = pytest.mark.parametrize("name", REQUEST_POLICIES)


def network(device: list[float], server: list[float], sent: list[float]) -> Profile:
    """Return a chain from its seconds on both sides and its crossing sizes: stages + 1, the input's first."""
    return Profile(
        model="chain",
        freeze=0,
        input=InputProfile(stored_bytes=sent[0], tensor_bytes=sent[0]),
        stages=tuple(
            StageProfile(
                name=f"s{k}",
                kind="test",
                out_bytes=size,
                seconds={"compute": (0.0, here), "storage": (0.0, there)},
            )
            for k, (here, there, size) in enumerate(zip(device, server, sent[1:], strict=True), start=1)
        ),
    )


def link(upload: float, download: float | None = None, **storage: Any) -> Cluster:
    return Cluster(
        link=Link(bandwidth_bytes_per_s=upload, download_bytes_per_s=download),
        storage=StorageTier(**storage),
    )


def by_the_book(
    device: list[float], server: list[float], sent: list[float], upload: float, download: float, load: float
) -> int:
    """Run Algorithm 1 line by line as in the paper; B_d is infinite where the answer is free."""
    n = len(device)
    f, g = [0.0, *device], [0.0, *(load * each for each in server)]
    prefix, suffix = [0.0] * (n + 2), [0.0] * (n + 2)
    for i in range(1, n + 2):
        prefix[i] = prefix[i - 1] + f[i - 1]
        suffix[n - i + 1] = suffix[n - i + 2] + g[n - i + 1]
    least, p = math.inf, -1
    for i in range(1, n + 2):
        value = prefix[i] if i == n + 1 else prefix[i] + sent[i - 1] / upload + suffix[i] + sent[n] / download
        if value <= least:
            least, p = value, i - 1
    return p


def exact(
    device: list[float],
    server: list[float],
    sent: list[float],
    upload: float,
    download: float | None,
    load: float,
) -> list[Fraction]:
    """Return Problem (1) at every p, without rounding."""
    f, g, s = ([Fraction(each) for each in list_] for list_ in (device, server, sent))
    n = len(f)
    answer = Fraction(0) if download is None else s[n] / Fraction(download)
    split = [
        sum(f[:p], Fraction(0)) + s[p] / Fraction(upload) + Fraction(load) * sum(g[p:], Fraction(0)) + answer
        for p in range(n)
    ]
    return [*split, sum(f, Fraction(0))]


@pytest.mark.full
def test_a_thousand_random_chains_with_ties_against_brute_force() -> None:
    """Numbers are whole sixteenths and rates are powers of two: floats are exact, and ties are ties."""
    draw = random.Random(1)
    tied = 0
    for _ in range(1_000):
        n = draw.randint(1, 40)
        device, server = ([draw.randint(0, 3) / 16 for _ in range(n)] for _ in range(2))
        sent = [float(draw.choice((0, 64, 128, 256))) for _ in range(n + 1)]
        upload, load = 2.0 ** draw.randint(6, 12), draw.choice((1.0, 1.5, 2.0, 4.0))
        download = draw.choice((None, 2.0 ** draw.randint(6, 12)))
        totals = exact(device, server, sent, upload, download, load)
        best = [p for p, total in enumerate(totals) if total == min(totals)]
        tied += len(best) > 1
        sums = LatencyModel(network(device, server, sent), link(1.0)).sums
        found = decide(sums, upload=upload, download=download, load=load)
        assert found == best[-1]
        assert found == by_the_book(device, server, sent, upload, download or math.inf, load)
        asked = link(upload, download, load=load)
        assert plan(network(device, server, sent), asked, ONE).cut == best[-1]
    assert tied > 50


seconds = st.floats(0, 100, allow_subnormal=False)
sizes = st.floats(0, 1e9, allow_subnormal=False)
rates = st.floats(1, 1e12)


@given(
    chain=st.lists(st.tuples(seconds, seconds, sizes), min_size=1, max_size=30),
    first=sizes,
    upload=rates,
    download=st.none() | rates,
    load=st.floats(1, 1e6),
)
def test_no_other_cut_is_shorter(
    chain: list[tuple[float, float, float]], first: float, upload: float, download: float | None, load: float
) -> None:
    device, server, sent = ([each[i] for each in chain] for i in range(3))
    sent = [first, *sent]
    totals = exact(device, server, sent, upload, download, load)
    sums = LatencyModel(network(device, server, sent), link(1.0)).sums
    found = decide(sums, upload=upload, download=download, load=load)
    assert float(totals[found]) == pytest.approx(float(min(totals)), rel=1e-12)
    mine = sums.paper_s(upload=upload, download=download, load=load)
    assert mine.tolist() == pytest.approx([float(total) for total in totals], rel=1e-12)


def slow_device(load: float = 1.0, bandwidth: float = 1e6) -> tuple[Profile, Cluster]:
    """Return AlexNet's sizes; the device takes 40 times as long as the server."""
    return alexnet(storage_s=1e-3, compute_s=40e-3), link(bandwidth, load=load)


def test_a_faster_link_sends_earlier_and_a_busier_server_less() -> None:
    at = [plan(*slow_device(bandwidth=mbit * 125e3), ONE).cut for mbit in (64, 16, 8, 4, 2, 1, 0.1, 0.001)]
    assert at == sorted(at) and at[0] == 0 and at[-1] == len(ALEXNET_BYTES)
    loads = [plan(*slow_device(load, bandwidth=8e6), ONE).cut for load in (1, 10, 20, 40, 80, 1000)]
    assert loads == sorted(loads) and loads[0] == 0 and loads[-1] == len(ALEXNET_BYTES)


def test_what_is_not_sent_costs_nothing_on_the_link() -> None:
    local = plan(*slow_device(bandwidth=1.0), ONE)
    assert local.cut == 21 and local.predicted is not None
    assert " among cuts 0 to 21. " in local.why
    assert local.predicted.bytes == local.predicted.network_s == local.predicted.storage_s == 0
    assert local.predicted.epoch_s == local.predicted.compute_s == pytest.approx(21 * 40e-3)
    sent = plan(*slow_device(bandwidth=1e12), ONE)
    assert sent.cut == 0 and sent.predicted is not None and sent.predicted.bytes == 602112
    assert sent.predicted.compute_s == 0 and sent.table[0].name == ALL_SENT


def test_the_answers_way_back_counts_where_it_is_known() -> None:
    profile = network([1.0, 1.0], [0.0, 0.0], [8.0, 8.0, 100.0])
    assert plan(profile, link(8.0), ONE).cut == 0
    assert plan(profile, link(8.0, 100.0), ONE).cut == 2  # two seconds either way: work stays
    assert plan(profile, link(8.0, 101.0), ONE).cut == 0
    found = plan(profile, link(8.0, 200.0), ONE).predicted
    assert found is not None and (found.bytes, found.network_s, found.epoch_s) == (108.0, 1.5, 1.5)


def test_ours_counts_all_that_a_request_takes() -> None:
    profile = network([1.0, 1.0], [0.0, 0.0], [8.0, 8.0, 100.0])
    there = Cluster(
        link=Link(bandwidth_bytes_per_s=8.0, rtt_s=0.125, download_bytes_per_s=800.0),
        storage=StorageTier(wait_s=0.25, load=2.0, seconds_per_byte={"decode": 2**-6, "encode": 2**-8}),
        compute=ComputeTier(seconds_per_byte={"encode": 2**-5, "decode": 2**-7}),
    )
    packing = 8 * (2**-5 + 2**-6) + 100 * (2**-8 + 2**-7)
    expected = 1 + 0.125 + 0.125 + 0.25 + packing
    model = LatencyModel(profile, there)
    assert model.request_s.tolist() == [expected, expected + 1, 2.0]
    assert model.paper_s.tolist() == [1.125, 2.125, 2.0]
    assert choose("loadpart", profile, there, ONE).cut == 0
    assert choose("inference", profile, there, ONE).cut == 2
    idle = replace(there, storage=StorageTier(), compute=ComputeTier())
    assert choose("inference", profile, idle, ONE).cut == 0


@every_policy
@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_keeps_the_contract(name: str, profile: Profile, cluster: Cluster, workload: Workload) -> None:
    found = REQUEST_POLICIES[name](profile, cluster, workload)
    assert found == REQUEST_POLICIES[name](profile, cluster, workload)
    assert (found.policy, found.unit) == (name, "request")
    start, stop = profile.unsplit, len(profile.stages)
    assert [row.cut for row in found.table] == list(range(start, stop + 1))
    (route,) = found.routes
    assert [segment.tier for segment in route.segments] == [Tier.COMPUTE, Tier.STORAGE]
    assert [(s.start, s.stop) for s in route.segments] == [(start, found.cut), (found.cut, stop)]
    rows = {row.cut: row for row in found.table}
    fitting = [row for row in found.table if row.feasible]
    assert all(bool(row.why_not) != row.feasible for row in found.table)
    if found.feasible:
        assert found.predicted == rows[found.cut].cost
        assert found.predicted.epoch_s == min(row.cost.epoch_s for row in fitting)
        assert all(row.cost.epoch_s > found.predicted.epoch_s for row in fitting if row.cut > found.cut)
    else:
        assert not fitting and found.predicted is None
    document = to_dict(found)
    assert document["cut"] == found.cut and document["shares"] == {str(found.cut): 1.0}
    assert all(s["start"] < s["stop"] for s in document["routes"][0]["segments"])
    assert str(found).startswith(" ") or "cut" in str(found)


@every_policy
def test_what_does_not_fit_is_not_taken(name: str) -> None:
    profile, there = slow_device(bandwidth=1e12)
    small = replace(there, storage=StorageTier(memory_bytes=1e6 + 2 * ALEXNET_BYTES[-1]))
    assert choose(name, profile, small, ONE).cut == 20
    none = replace(small, compute=ComputeTier(memory_bytes=1e6))
    with pytest.raises(NoFeasibleCut, match=r"compute memory is short by \d+ bytes"):
        choose(name, profile, none, ONE)


@every_policy
def test_a_stage_without_seconds_is_named(name: str) -> None:
    profile = alexnet()
    half = replace(profile.stages[20], seconds={"storage": (0.0, 1.0)})
    with pytest.raises(ConfigError, match=r"stages\[stage21\].seconds.compute is missing"):
        choose(name, replace(profile, stages=(*profile.stages[:20], half)), link(1e6), ONE)


def test_requests_are_no_policy_of_training() -> None:
    assert not set(REQUEST_POLICIES) & set(POLICIES)
    with pytest.raises(ConfigError, match=r"one of nosplit, .*, loadpart, inference, got 'best'"):
        choose("best", alexnet(), link(1e6), ONE)


def test_sums_of_unequal_lengths_are_refused() -> None:
    two, three = np.zeros(2), np.zeros(3)
    with pytest.raises(ConfigError, match=r"a number for each cut, got \[2, 3\]"):
        LatencySums(device_s=two, server_s=two, sent_bytes=three, handling_s=two)
