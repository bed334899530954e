"""Check each policy against its own rule, recomputed, and in limits where the answer is obvious."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given

from tests.planning import alexnet, cluster, clusters, profiles, stage, workloads
from upriver.cost import candidates, evaluate, two_resource_epoch_s
from upriver.policies import POLICIES
from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    StorageTier,
    Workload,
)

EPOCH = Workload(batch_size=1000, num_samples=10_000)


def naive_fits(cut: int, profile: Profile, cluster: Cluster, workload: Workload) -> bool:
    """Return whether memory fits by its definition, stage by stage."""
    positions = range(profile.unsplit + 1, profile.freeze + 1)
    pushed = [profile.stage(p) for p in positions if p <= cut]
    kept = [profile.stage(p) for p in positions if p > cut]
    at_once = cluster.compute.micro_batch or workload.batch_size
    storage = sum(s.param_bytes for s in pushed)
    storage += max((s.peak_bytes for s in pushed), default=0) * cluster.storage.micro_batch
    compute = sum(s.param_bytes for s in kept) + max((s.peak_bytes for s in kept), default=0) * at_once
    compute += profile.tail.param_bytes + profile.tail.peak_bytes * workload.batch_size
    return storage <= cluster.storage.memory_bytes and compute <= cluster.compute.memory_bytes


def naive_hapi_epoch_s(cut: int, profile: Profile, cluster: Cluster, workload: Workload) -> float:
    """Return HAPI's objective by its definition: requests in waves, forward passes in turn."""
    storage, link = cluster.storage, cluster.link
    batch = min(workload.batch_size, workload.num_samples)
    at_once = cluster.compute.micro_batch or workload.batch_size
    sent = profile.cut_bytes(cut)
    server_forward = server_cpus = client = 0.0
    for position in range(profile.unsplit + 1, profile.freeze + 1):
        seconds = profile.stage(position).seconds
        if position > cut:
            fixed, each = seconds["compute.cpu" if "compute.cpu" in seconds else "compute"]
            client += (fixed / at_once + each) / (cluster.compute.concurrency if position <= 0 else 1)
            continue
        on_cpus = "storage.cpu" in seconds
        fixed, each = seconds["storage.cpu" if on_cpus else "storage"]
        spent = storage.load * (fixed / storage.micro_batch + each)
        if on_cpus:
            server_cpus += spent
        else:
            server_forward += spent
    rates = {"read": 0.0, "move": 0.0, "encode": 0.0, **storage.seconds_per_byte}
    others = server_cpus + rates["read"] * profile.input.stored_bytes
    if cut != profile.unsplit:
        others += rates["encode"] * sent
    if cut > 0:
        others += rates["move"] * (profile.input.tensor_bytes + sent)
    client += cluster.compute.seconds_per_byte.get("decode", 0.0) * sent
    client += cluster.compute.seconds_per_byte.get("move", 0.0) * (
        sent if cut > 0 else profile.input.tensor_bytes
    )
    left, waves = batch, 0
    while left > 0:
        left -= storage.concurrency * storage.request_samples
        waves += 1
    load = profile.model_load_s["storage"] if cut > 0 and not storage.reuse_model else 0.0
    request = min(storage.request_samples, batch)
    server = batch * server_forward + waves * (request * others + load)
    network = batch * sent / link.bandwidth_bytes_per_s + link.rtt_s
    tail = profile.tail.seconds[0] + profile.tail.seconds[1] * batch
    return math.ceil(workload.num_samples / batch) * max(batch * client + tail, server + network)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_hapi_is_the_best_by_brute_force(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    question = (profile, cluster, workload)
    cuts = [profile.unsplit, *range(1, profile.freeze + 1)]
    fitting = [cut for cut in cuts if naive_fits(cut, *question)]
    plan = POLICIES["hapi"](*question)
    fits = any(naive_fits(cut, *question) for cut in candidates(profile))
    assert plan.feasible == fits, "never infeasible where some cut fits"
    if fitting:
        best = min(naive_hapi_epoch_s(cut, *question) for cut in fitting)
        assert naive_hapi_epoch_s(plan.cut, *question) == pytest.approx(best, rel=1e-9)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_neurosurgeon_is_the_least_sum_by_brute_force(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    question = (profile, cluster, workload)
    plan = POLICIES["neurosurgeon"](*question)
    fitting = [cut for cut in range(1, profile.freeze + 1) if naive_fits(cut, *question)]
    if not fitting:
        assert plan.feasible == any(naive_fits(cut, *question) for cut in candidates(profile))
        return
    as_requests = (profile, replace(cluster, stream="request"), workload)
    costs = {cut: evaluate(cut, *as_requests) for cut in fitting}
    sums = {cut: cost.storage_s + cost.network_s + cost.compute_s for cut, cost in costs.items()}
    assert plan.cut == min(sums, key=lambda cut: sums[cut])


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_hapi_bandwidth_follows_its_listing(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    question = (profile, cluster, workload)
    plan = POLICIES["hapi_bandwidth"](*question)
    fitting = [cut for cut in range(1, profile.freeze + 1) if naive_fits(cut, *question)]
    if not fitting:
        assert plan.feasible == any(naive_fits(cut, *question) for cut in candidates(profile))
        return
    winner = fitting[-1]
    for layer in reversed(fitting):
        size = profile.stage(layer).out_bytes
        small = size < profile.input.stored_bytes
        if small and size * workload.batch_size < cluster.link.bandwidth_bytes_per_s:
            winner = layer
    assert plan.cut == winner


@pytest.mark.parametrize(("batch", "cut"), [(3000, 13), (4000, 16)])
def test_hapi_bandwidth_on_the_papers_own_case(batch: int, cut: int) -> None:
    """AlexNet at 1 Gbit/s (HAPI 2022, section 5.6); ImageNet's images have 110 KB on average."""
    plan = POLICIES["hapi_bandwidth"](
        alexnet(stored_bytes=110_000), cluster(bandwidth=125e6), Workload(batch_size=batch, num_samples=batch)
    )
    assert plan.cut == cut


def test_hapi_bandwidth_pushes_less_down_over_a_faster_link() -> None:
    """A candidate is smaller than the stored sample; if the link carries none, the freeze point wins."""
    stored = alexnet(stored_bytes=150_000)
    cuts = [
        POLICIES["hapi_bandwidth"](
            stored, cluster(bandwidth=b), Workload(batch_size=1000, num_samples=1000)
        ).cut
        for b in (1e15, 50e6, 20e6, 10e6)
    ]
    assert cuts == [6, 13, 16, 17]


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_exhaustive_is_the_best_single_cut_by_brute_force(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    question = (profile, cluster, workload)
    plan = POLICIES["exhaustive"](*question)
    fitting = [cut for cut in candidates(profile) if naive_fits(cut, *question)]
    assert plan.feasible == bool(fitting)
    if fitting:
        assert plan.predicted is not None
        assert plan.predicted.epoch_s == min(evaluate(cut, *question).epoch_s for cut in fitting)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_only_the_static_policies_may_choose_what_does_not_fit(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    question = (profile, cluster, workload)
    fits = any(naive_fits(cut, *question) for cut in candidates(profile))
    for name in POLICIES.keys() - {"nosplit", "min", "freeze"}:
        assert POLICIES[name](*question).feasible == fits, name


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_every_row_says_what_the_definitions_say(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    question = (profile, cluster, workload)
    for row in POLICIES["nosplit"](*question).table:
        assert row.feasible == naive_fits(row.cut, *question)
        expected = naive_hapi_epoch_s(row.cut, *question)
        assert two_resource_epoch_s(row.cut, *question) == pytest.approx(expected, rel=1e-9)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_the_static_policies_follow_their_rules(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    cuts = {name: POLICIES[name](profile, cluster, workload).cut for name in ("nosplit", "freeze", "min")}
    assert cuts["nosplit"] == -len(profile.input_stages)
    if profile.freeze == 0:
        assert cuts["freeze"] == cuts["min"] == profile.unsplit
        return
    sizes = [s.out_bytes for s in profile.stages[: profile.freeze]]
    assert cuts["freeze"] == profile.freeze
    assert cuts["min"] == 1 + sizes.index(min(sizes))


def test_min_takes_the_earliest_of_equals_and_stays_before_the_freeze_point() -> None:
    # Stages 16..20 give 16384 bytes and stage 21 gives 4000, but the freeze point is 17.
    assert POLICIES["min"](alexnet(), cluster(), EPOCH).cut == 16


def test_min_never_answers_the_input_even_when_that_is_smaller() -> None:
    assert POLICIES["min"](alexnet(stored_bytes=10), cluster(), EPOCH).cut == 16


@pytest.mark.parametrize("name", ["freeze", "min", "neurosurgeon", "hapi_bandwidth", "hapi"])
def test_where_nothing_is_frozen_that_is_the_reason(name: str) -> None:
    decode = stage("decode", 100)
    nothing = replace(alexnet(), freeze=0, input_stages=(decode, replace(decode, name="resize")))
    plan = POLICIES[name](nothing, cluster(), EPOCH)
    assert plan.cut == nothing.unsplit == -2
    assert plan.why.startswith("cut -2, as no stage of the model is frozen. ")


@pytest.mark.parametrize("name", ["min", "neurosurgeon", "hapi_bandwidth", "hapi"])
def test_what_is_searched_is_said(name: str) -> None:
    """These policies never consider cut 0 and below, so the table may hold a better cut."""
    thin = alexnet(stored_bytes=1_000_000)
    assert "among cuts 1 to 17" in POLICIES[name](thin, cluster(), EPOCH).why


def test_a_plan_is_compared_with_not_splitting_its_neighbours_and_the_fastest() -> None:
    """The freeze point has one neighbour."""
    why = POLICIES["freeze"](alexnet(), cluster(), EPOCH).why
    assert why.endswith(
        "Beside it: cut 0 (not split) 48.6 s (13.88 x); cut 14 3.11 s (0.89 x); cut 16 3.32 s (0.95 x)."
    )


def test_hapi_bandwidth_says_both_conditions_when_it_falls_to_the_freeze_point() -> None:
    """A fast link carries every output within a second, but none is smaller than the stored sample."""
    plan = POLICIES["hapi_bandwidth"](alexnet(stored_bytes=1), cluster(bandwidth=1e15), EPOCH)
    says = "as no earlier one is smaller than what is stored and crosses within a second a batch"
    assert plan.why.startswith(f"cut 17, the freeze point, {says}. ")


@pytest.mark.parametrize("name", ["hapi", "exhaustive", "upriver"])
def test_ties_go_to_the_earliest_cut(name: str) -> None:
    free = Profile(
        model="tie",
        freeze=3,
        input=InputProfile(stored_bytes=1000, tensor_bytes=1000),
        stages=tuple(stage(f"s{k}", 1000, storage=0, compute=0) for k in range(3)),
    )
    assert POLICIES[name](free, cluster(), EPOCH).cut == 0


@pytest.mark.parametrize("name", ["hapi", "exhaustive", "upriver"])
def test_free_link_and_very_slow_storage_tier_gives_no_split(name: str) -> None:
    slow = alexnet(storage_s=1e4, compute_s=1e-5)
    plan = POLICIES[name](slow, cluster(bandwidth=1e15), EPOCH)
    assert [route.cut for route in plan.routes] == [0]


@pytest.mark.parametrize("name", ["hapi", "exhaustive", "upriver", "neurosurgeon"])
def test_almost_no_bandwidth_gives_the_smallest_cut(name: str) -> None:
    plan = POLICIES[name](alexnet(), cluster(bandwidth=1000.0), EPOCH)
    assert len(plan.routes) == 1
    smallest = POLICIES["min"](alexnet(), cluster(), EPOCH).cut
    assert smallest == 16
    assert alexnet().cut_bytes(plan.cut) == alexnet().cut_bytes(smallest)


def test_almost_no_bandwidth_and_small_stored_samples_gives_no_split() -> None:
    assert POLICIES["hapi"](alexnet(stored_bytes=5000), cluster(bandwidth=1000.0), EPOCH).cut == 0


@pytest.mark.parametrize("name", ["hapi", "exhaustive", "upriver"])
def test_equal_tiers_and_a_free_link_share_the_work(name: str) -> None:
    equal = Profile(
        model="equal",
        freeze=10,
        input=InputProfile(stored_bytes=1, tensor_bytes=1),
        stages=tuple(stage(f"s{k}", 1, storage=1e-3, compute=1e-3) for k in range(10)),
    )
    plan = POLICIES[name](equal, cluster(bandwidth=1e15), EPOCH)
    pushed = sum(route.share * route.cut for route in plan.routes)
    assert pushed == pytest.approx(5, abs=0.15)


def test_hapi_counts_the_overlap() -> None:
    """Cut 1 has the least sum of times, cut 2 the least maximum."""
    profile = Profile(
        model="overlap",
        freeze=2,
        input=InputProfile(stored_bytes=10_000_000, tensor_bytes=10_000_000),
        stages=(stage("a", 100, storage=0.1, compute=9.0), stage("b", 100, storage=5.0, compute=4.8)),
    )
    plan = POLICIES["hapi"](profile, cluster(), Workload(batch_size=10, num_samples=100))
    assert plan.cut == 1  # max(4.8, 0.1) < max(0, 5.1)
    slower_client = Profile(
        model="overlap",
        freeze=2,
        input=profile.input,
        stages=(stage("a", 100, storage=0.1, compute=9.0), stage("b", 100, storage=5.0, compute=5.2)),
    )
    plan = POLICIES["hapi"](slower_client, cluster(), Workload(batch_size=10, num_samples=100))
    assert plan.cut == 2  # max(5.2, 0.1) > max(0, 5.1)


def test_hapi_leaves_out_cuts_that_do_not_fit_the_client() -> None:
    question = (alexnet(storage_s=1e4), cluster(bandwidth=1e15), EPOCH)
    assert POLICIES["hapi"](*question).cut == 0
    small = Cluster(
        link=Link(bandwidth_bytes_per_s=1e15), storage=StorageTier(), compute=ComputeTier(memory_bytes=1e9)
    )
    plan = POLICIES["hapi"](question[0], small, EPOCH)
    fits = [row.cut for row in plan.table if row.feasible]
    assert plan.cut == fits[0] > 0
    assert "does not fit" in POLICIES["nosplit"](question[0], small, EPOCH).why


def test_hapi_moves_the_cut_with_the_bandwidth() -> None:
    """The less bandwidth, the fewer bytes the chosen cut may ship."""
    plans = [POLICIES["hapi"](alexnet(), cluster(bandwidth=b), EPOCH) for b in (1e11, 1e9, 1e8, 1e7, 1e5)]
    sizes = [next(r.bytes_per_sample for r in p.table if r.cut == p.cut) for p in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize("name", ["hapi", "exhaustive", "upriver"])
def test_a_thousand_stages_are_planned(name: str) -> None:
    long = Profile(
        model="long",
        freeze=1000,
        input=InputProfile(stored_bytes=1e6, tensor_bytes=1e6),
        stages=tuple(stage(f"s{k}", 1000 + k) for k in range(1000)),
    )
    plan = POLICIES[name](long, cluster(), EPOCH)
    assert len(plan.table) == 1001 and plan.feasible
