"""Test the cost model against definitions, against a simulated pipeline, and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.planning import alexnet, cluster, clusters, profiles, stage, workloads
from upriver.control.route_dealing import deal
from upriver.cost import CostModel, candidates, evaluate, route_at, two_resource_epoch_s
from upriver.errors import ConfigError
from upriver.types import (
    Cluster,
    ComputeTier,
    InputProfile,
    Link,
    Profile,
    Route,
    StageProfile,
    StorageTier,
    TailProfile,
    Tier,
    Workload,
)


def chain(
    *, storage: float, out_bytes: float, compute: float, tail: tuple[float, float] = (0.0, 0.0)
) -> Profile:
    """Make two frozen stages: the first costs ``storage`` there, the second ``compute`` here."""
    return Profile(
        model="two",
        freeze=2,
        input=InputProfile(stored_bytes=5000, tensor_bytes=6000),
        stages=(stage("a", out_bytes, storage=storage), stage("b", 7, compute=compute)),
        tail=TailProfile(seconds=tail),
    )


def simulate(routes: Sequence[Route], profile: Profile, cluster: Cluster, workload: Workload) -> float:
    """Return the seconds until the last training step ends.

    Micro-batches follow the routes that they are dealt, and keep their order on storage, link, the compute
    tier's CPUs and its main processor.
    """
    model, size = CostModel(profile, cluster, workload), cluster.storage.micro_batch
    phases = {route.cut: model.phases(route.cut) for route in routes}
    fixed, each = profile.tail.seconds
    storage_free = link_free = cpus_free = compute_free = 0.0
    hands = deal(routes, workload.num_samples // size, start=profile.unsplit)
    for number, hand in enumerate(hands, start=1):
        phase = phases[hand.cut]
        storage_free += size * (phase.storage_forward + phase.storage_parallel)
        link_free = max(link_free, storage_free) + size * phase.network
        arrived = link_free + cluster.link.rtt_s
        cpus_free = max(cpus_free, arrived) + size * phase.compute_cpu
        compute_free = max(compute_free, cpus_free) + size * (phase.compute_receive + phase.compute_forward)
        if number * size % workload.batch_size == 0:
            compute_free += fixed + each * workload.batch_size
    return compute_free


per_sample = st.floats(0, 0.02, allow_subnormal=False)


@given(
    storage=per_sample,
    network=per_sample,
    compute=per_sample,
    tail=st.tuples(per_sample, per_sample),
    rtt=per_sample,
    size=st.integers(1, 6),
    per_batch=st.integers(1, 5),
    batches=st.integers(1, 6),
)
def test_micro_batch_epoch_is_what_a_simulated_pipeline_takes(
    storage: float,
    network: float,
    compute: float,
    tail: tuple[float, float],
    rtt: float,
    size: int,
    per_batch: int,
    batches: int,
) -> None:
    profile = chain(storage=storage, out_bytes=network * 1e6, compute=compute, tail=tail)
    machines = Cluster(
        link=Link(bandwidth_bytes_per_s=1e6, rtt_s=rtt),
        storage=StorageTier(micro_batch=size),
        compute=ComputeTier(micro_batch=size),
    )
    workload = Workload(batch_size=size * per_batch, num_samples=size * per_batch * batches)
    predicted = evaluate(1, profile, machines, workload).epoch_s
    assert predicted == pytest.approx(
        simulate([route_at(profile, 1)], profile, machines, workload), rel=1e-9, abs=1e-12
    )


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    """Draw an input stage on the CPUs, and one to three frozen stages on the main processors."""
    pairs = st.tuples(st.just(0.0), per_sample)
    sizes = st.integers(0, 20_000).map(float)
    decode = stage("decode", draw(sizes), seconds={"storage.cpu": draw(pairs), "compute.cpu": draw(pairs)})
    model = [
        stage(f"s{k}", draw(sizes), storage=draw(per_sample), compute=draw(per_sample))
        for k in range(draw(st.integers(1, 3)))
    ]
    return Profile(
        model="chain",
        freeze=len(model),
        input=InputProfile(stored_bytes=draw(sizes), tensor_bytes=6000),
        input_stages=(decode,),
        stages=tuple(model),
        tail=TailProfile(seconds=(draw(per_sample), draw(per_sample))),
    )


@st.composite
def mixes(draw: st.DrawFn, profile: Profile) -> list[Route]:
    """Draw one to three cuts with shares of the samples."""
    cuts = draw(st.lists(st.sampled_from(candidates(profile)), min_size=1, max_size=3, unique=True))
    weights = [draw(st.integers(1, 20)) for _ in cuts]
    return [
        route_at(profile, cut, share=weight / sum(weights)) for cut, weight in zip(cuts, weights, strict=True)
    ]


@given(
    profile=chains(),
    rtt=per_sample,
    size=st.integers(1, 4),
    per_batch=st.integers(1, 4),
    batches=st.integers(1, 30),
    data=st.data(),
)
def test_a_mix_takes_what_a_simulated_pipeline_takes_within_fill_and_drain(
    profile: Profile, rtt: float, size: int, per_batch: int, batches: int, data: st.DataObject
) -> None:
    """Check that on each resource the dealt micro-batches are always within a few of their shares.

    Only those few, one more of each phase to fill and drain, and the steps at both ends can lie between the
    pipeline and its busiest resource.
    """
    routes = data.draw(mixes(profile))
    machines = Cluster(
        link=Link(bandwidth_bytes_per_s=1e6, rtt_s=rtt),
        storage=StorageTier(micro_batch=size),
        compute=ComputeTier(micro_batch=size),
    )
    question = (
        profile,
        machines,
        Workload(batch_size=size * per_batch, num_samples=size * per_batch * batches),
    )
    phases = [CostModel(*question).phases(route.cut) for route in routes]
    longest = [
        size * max(each)
        for each in (
            [phase.storage_forward + phase.storage_parallel for phase in phases],
            [phase.network for phase in phases],
            [phase.compute_cpu for phase in phases],
            [phase.compute_receive + phase.compute_forward for phase in phases],
        )
    ]
    fixed, each = profile.tail.seconds
    step = fixed + each * size * per_batch
    off_their_shares = len(routes) * max(1, len(routes) - 1) / 2
    bound = rtt + 4 * step + (1 + 2 * off_their_shares) * sum(longest)
    assert abs(evaluate(routes, *question).epoch_s - simulate(routes, *question)) <= bound * (1 + 1e-9)


@given(
    forward=per_sample,
    others=per_sample,
    size=st.integers(1, 4),
    at_once=st.integers(1, 5),
    count=st.integers(1, 60),
)
def test_several_requests_at_once_keep_storage_busy_no_longer_than_predicted(
    forward: float, others: float, size: int, at_once: int, count: int
) -> None:
    """Many readers share one processor: forward passes take turns, and a request reads before it runs.

    The prediction lets no request read while another one runs, so it may be up to twice as long.
    """
    profile = chain(storage=forward, out_bytes=0, compute=0)
    read, samples = {"read": others / profile.input.stored_bytes}, size * count
    storage = StorageTier(micro_batch=size, concurrency=at_once, seconds_per_byte=read)
    machines = Cluster(link=Link(bandwidth_bytes_per_s=1), storage=storage)
    predicted = evaluate(1, profile, machines, Workload(batch_size=samples, num_samples=samples)).storage_s
    ends: list[float] = []
    for number in range(count):
        ready = (ends[number - at_once] if number >= at_once else 0.0) + size * others
        ends.append(max(ends[-1] if ends else 0.0, ready) + size * forward)
    last_wave = size * (others + at_once * forward)
    assert ends[-1] <= predicted + last_wave + 1e-9
    assert predicted <= 2 * ends[-1] + 1e-9


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_an_epoch_is_never_shorter_than_any_resource_is_busy(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    for cut in candidates(profile):
        cost = evaluate(cut, profile, cluster, workload)
        assert cost.epoch_s >= max(cost.storage_s, cost.network_s, cost.compute_s) * (1 - 1e-12)
        assert cost.bytes == workload.num_samples * profile.cut_bytes(cut)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_disk_counts_as_a_storage_tier_without_a_link(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    one_at_a_time = replace(cluster, stream="micro_batch", storage=replace(cluster.storage, concurrency=1))
    model = CostModel(profile, one_at_a_time, workload)
    nothing = np.zeros(len(model.cuts))
    near = replace(model.all_phases, network=nothing, model_load=nothing, round_trip=nothing)
    spent = near.storage_parallel + near.storage_forward
    local = replace(near, storage_parallel=nothing, storage_forward=nothing, disk=spent)
    ours, theirs = model.epochs_of(local, nothing), model.epochs_of(near, nothing)
    assert ours.epoch_s == pytest.approx(theirs.epoch_s)
    assert ours.busy[-1] == pytest.approx(theirs.storage_s) and not ours.storage_s.any()


@pytest.mark.parametrize("stream", ["request", "synchronous"])
def test_disk_adds_to_the_client_where_it_overlaps_with_nothing(stream: str) -> None:
    model = CostModel(alexnet(), replace(cluster(), stream=stream), Workload(batch_size=8, num_samples=80))
    phases = model.all_phases
    read = model.epochs_of(replace(phases, disk=np.full(len(model.cuts), 10.0)), np.zeros(len(model.cuts)))
    assert read.compute_s == pytest.approx(model.epochs.compute_s + 800.0)
    assert read.epoch_s[-1] > 800.0


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(profile=profiles(), cluster=clusters(), workload=workloads)
@pytest.mark.full
def test_streaming_micro_batches_never_busies_storage_for_longer(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    """The work is the same, whole training batches: only the overlap differs."""
    assume(workload.num_samples % workload.batch_size == 0)
    storage = replace(cluster.storage, concurrency=1, request_samples=1)
    streamed = replace(cluster, storage=storage, stream="micro_batch")
    for cut in candidates(profile):
        ours, theirs = (
            evaluate(cut, profile, replace(streamed, stream=stream), workload)
            for stream in ("micro_batch", "request")
        )
        assert ours.storage_s == pytest.approx(theirs.storage_s)
        # The compute tier's CPUs and its main processor: in turn there, at once here.
        cpus = workload.num_samples * CostModel(profile, streamed, workload).phases(cut).compute_cpu
        assert ours.compute_s == pytest.approx(max(theirs.compute_s - cpus, cpus))


def compute_rows(cut: int, profile: Profile, cluster: Cluster, workload: Workload) -> tuple[float, ...]:
    """Return the seconds of an epoch that the compute tier's main processor is busy, and its CPUs."""
    phases = CostModel(profile, cluster, workload).phases(cut)
    samples, (fixed, each) = workload.num_samples, profile.tail.seconds
    tails = fixed * math.ceil(samples / workload.batch_size) + each * samples
    main = samples * (phases.compute_receive + phases.compute_forward) + tails
    return main, samples * phases.compute_cpu


@given(profile=profiles(), cluster=clusters(), workload=workloads, share=st.floats(0.01, 0.99))
def test_a_mix_is_busy_for_the_shares_of_its_routes(
    profile: Profile, cluster: Cluster, workload: Workload, share: float
) -> None:
    question = (profile, cluster, workload)
    first, last = candidates(profile)[0], candidates(profile)[-1]
    mix = (route_at(profile, first, share=share), route_at(profile, last, share=1 - share))
    cost = evaluate(mix, *question)
    a, b = (evaluate(cut, *question) for cut in (first, last))

    def mixed(x: float, y: float) -> float:
        return share * x + (1 - share) * y

    for field in ("storage_s", "network_s", "bytes"):
        assert getattr(cost, field) == pytest.approx(mixed(getattr(a, field), getattr(b, field)))
    if cluster.stream == "micro_batch":
        rows = zip(compute_rows(first, *question), compute_rows(last, *question), strict=True)
        assert cost.compute_s == pytest.approx(max(mixed(x, y) for x, y in rows))
    else:
        assert cost.compute_s == pytest.approx(mixed(a.compute_s, b.compute_s))
    assert cost.compute_s <= mixed(a.compute_s, b.compute_s) * (1 + 1e-12)
    assert cost.epoch_s <= mixed(a.epoch_s, b.epoch_s) + max(a.epoch_s, b.epoch_s)
    assert cost.epoch_s >= max(cost.storage_s, cost.network_s, cost.compute_s) * (1 - 1e-12)


def test_a_mix_keeps_the_cpus_and_the_main_processor_busy_at_once() -> None:
    """Unsplit, CPUs decode for 10 s during 6 s of the model; at cut 0 the storage tier decodes."""
    decode = stage("decode", 6000, seconds={"storage.cpu": (0, 0.0), "compute.cpu": (0, 0.1)})
    profile = replace(
        chain(storage=0.0, out_bytes=0, compute=0.06),
        input_stages=(decode,),
        stages=(stage("a", 0, compute=0.0), stage("b", 0, compute=0.06)),
    )
    question = (profile, cluster(), Workload(batch_size=10, num_samples=100))
    assert [evaluate(cut, *question).compute_s for cut in (-1, 0)] == pytest.approx([10, 6])
    mix = (route_at(profile, -1, share=0.5), route_at(profile, 0, share=0.5))
    assert evaluate(mix, *question).compute_s == pytest.approx(6)


def test_by_hand() -> None:
    profile = chain(storage=0.01, out_bytes=2000, compute=0.002, tail=(0.5, 0.001))
    machines = Cluster(
        link=Link(bandwidth_bytes_per_s=1e6, rtt_s=0.25),
        storage=StorageTier(micro_batch=10, seconds_per_byte={"read": 1e-7, "encode": 1e-6}),
        compute=ComputeTier(micro_batch=10, seconds_per_byte={"decode": 5e-7}),
    )
    cost = evaluate(1, profile, machines, Workload(batch_size=100, num_samples=400))
    assert cost.storage_s == pytest.approx(400 * (0.01 + 5000 * 1e-7 + 2000 * 1e-6))  # 5.0
    assert cost.network_s == pytest.approx(400 * 0.002)
    assert cost.compute_s == pytest.approx(400 * (0.002 + 2000 * 5e-7) + 4 * 0.5 + 400 * 0.001)  # 3.6
    # Storage is the busiest; after its last micro-batch come its hop, its suffix and the last training step.
    hop, suffix, step = 10 * 0.002 + 0.25, 10 * 0.003, 0.5 + 0.1
    assert cost.epoch_s == pytest.approx(5.0 + hop + suffix + step)
    assert cost.bytes == 400 * 2000


def test_not_splitting_ships_what_is_stored_and_encodes_nothing() -> None:
    profile = chain(storage=0.01, out_bytes=2000, compute=0.002)
    machines = cluster(seconds_per_byte={"encode": 1.0, "move": 1.0, "read": 1e-6})
    cost = evaluate(0, profile, machines, Workload(batch_size=16, num_samples=32))
    assert cost.bytes == 32 * 5000
    assert cost.storage_s == pytest.approx(32 * 5000 * 1e-6), "only the store is read"
    assert cost.compute_s == pytest.approx(32 * (0.001 + 0.002))


def test_input_stages_run_on_storage_below_the_cut_and_on_compute_above_it() -> None:
    with_inputs = replace(
        chain(storage=0.01, out_bytes=2000, compute=0.002),
        input_stages=(stage("decode", 9000, storage=0.1, compute=0.3), stage("crop", 6000, compute=0.5)),
    )
    workload = Workload(batch_size=10, num_samples=10)
    at = {cut: evaluate(cut, with_inputs, cluster(), workload) for cut in (-2, -1, 0, 1, 2)}
    assert [at[cut].storage_s for cut in (-2, -1, 0, 1)] == pytest.approx([0, 1.0, 1.01, 1.11])
    assert [at[cut].compute_s for cut in (-2, -1, 0, 1)] == pytest.approx([8.03, 5.03, 0.03, 0.02])
    assert [at[cut].bytes for cut in (-2, -1, 0, 1, 2)] == [50_000, 90_000, 60_000, 20_000, 70]


def test_a_tiers_cpus_work_beside_its_accelerator() -> None:
    decode = stage("decode", 6000, seconds={"storage.cpu": (0, 0.4), "compute.cpu": (0, 0.3)})
    both = replace(chain(storage=0.1, out_bytes=2000, compute=0.2), input_stages=(decode,))
    workload = Workload(batch_size=10, num_samples=100)
    unsplit = evaluate(-1, both, cluster(), workload)
    assert unsplit.compute_s == pytest.approx(max(100 * 0.3, 100 * (0.001 + 0.2)))
    assert unsplit.epoch_s >= 30
    assert evaluate(1, both, cluster(concurrency=4), workload).storage_s == pytest.approx(
        100 * (0.1 + 0.4 / 4)
    )


def test_input_stages_run_at_once_on_the_compute_tier_s_cores_and_forward_does_not() -> None:
    workload = Workload(batch_size=10, num_samples=100)
    for key, epoch_s in (("compute", 100 * (0.3 / 4 + 0.2)), ("compute.cpu", 100 * 0.2)):
        decode = stage("decode", 6000, seconds={"storage": (0, 0.4), key: (0, 0.3)})
        both = replace(chain(storage=0.1, out_bytes=2000, compute=0.2), input_stages=(decode,))
        four = replace(cluster(), compute=ComputeTier(concurrency=4))
        assert evaluate(-1, both, four, workload).compute_s == pytest.approx(epoch_s, rel=0.01)
        assert evaluate(0, both, four, workload).compute_s == pytest.approx(100 * 0.2, rel=0.01)


def test_forward_passes_take_turns_and_other_phases_run_at_once() -> None:
    profile = chain(storage=0.01, out_bytes=2000, compute=0.002)
    rates = {"read": 1e-6, "encode": 1e-6}
    workload = Workload(batch_size=512, num_samples=1024)
    alone, four = (
        evaluate(1, profile, cluster(concurrency=c, seconds_per_byte=rates), workload).storage_s
        for c in (1, 4)
    )
    assert alone == pytest.approx(1024 * (0.01 + 0.007))
    assert four == pytest.approx(1024 * (0.01 + 0.007 / 4))


def test_load_slows_the_storage_tiers_processor_alone() -> None:
    profile = chain(storage=0.01, out_bytes=2000, compute=0.002)
    workload = Workload(batch_size=16, num_samples=16)
    rates = {"read": 1e-6}
    idle, busy = (
        evaluate(1, profile, cluster(load=load, seconds_per_byte=rates), workload) for load in (1.0, 3.0)
    )
    assert busy.storage_s == pytest.approx(16 * (0.03 + 0.005))
    assert (busy.network_s, busy.compute_s) == (idle.network_s, idle.compute_s)


def test_requests_beyond_the_concurrency_wait_for_the_wave_before() -> None:
    """Use eight requests of 128, four at a time: two waves, as in the paper's example."""
    profile = chain(storage=0.0, out_bytes=2000, compute=0.0)
    machines = cluster(bandwidth=1e15, concurrency=4, seconds_per_byte={"read": 1e-6})
    eight, four = (
        two_resource_epoch_s(1, profile, machines, Workload(batch_size=b, num_samples=b)) for b in (1024, 512)
    )
    assert four == pytest.approx(128 * 5000 * 1e-6)
    assert eight == pytest.approx(2 * four)


def test_a_model_that_is_not_kept_is_loaded_for_every_request() -> None:
    profile = replace(chain(storage=0.0, out_bytes=0, compute=0.0), model_load_s={"storage": 3.0})
    workload = Workload(batch_size=512, num_samples=512)
    for stream, waves_of_loads in (("request", 2), ("micro_batch", 2)):
        machines = replace(cluster(concurrency=2, reuse_model=False), stream=stream)
        assert evaluate(1, profile, machines, workload).storage_s == pytest.approx(3.0 * waves_of_loads)
        assert evaluate(0, profile, machines, workload).storage_s == 0
        kept = replace(machines, storage=replace(machines.storage, reuse_model=True))
        assert evaluate(1, profile, kept, workload).storage_s == 0


def test_a_fixed_cost_is_paid_once_a_call_of_a_micro_batch() -> None:
    profile = replace(
        chain(storage=0, out_bytes=0, compute=0),
        stages=(
            StageProfile(
                name="a", kind="t", out_bytes=0, seconds={"storage": (1.0, 0.0), "compute": (2.0, 0)}
            ),
        ),
        freeze=1,
    )
    workload = Workload(batch_size=64, num_samples=128)
    machines = cluster(micro_batch=16)
    assert evaluate(1, profile, machines, workload).storage_s == pytest.approx(8 * 1.0)
    assert evaluate(0, profile, machines, workload).compute_s == pytest.approx(2 * 2.0), (
        "a call a training batch"
    )
    small = replace(machines, compute=ComputeTier(micro_batch=32))
    assert evaluate(0, profile, small, workload).compute_s == pytest.approx(4 * 2.0)


def test_memory_is_judged_on_both_tiers_and_names_the_bytes() -> None:
    profile = replace(
        chain(storage=0, out_bytes=0, compute=0),
        stages=(
            stage("a", 1, param_bytes=100, peak_bytes=50),
            stage("b", 1, param_bytes=200, peak_bytes=70),
        ),
        tail=TailProfile(param_bytes=1000, peak_bytes=3),
    )
    workload = Workload(batch_size=100, num_samples=100)

    def model(storage: float, compute: float, micro_batch: int | None = None) -> CostModel:
        machines = Cluster(
            link=Link(bandwidth_bytes_per_s=1),
            storage=StorageTier(memory_bytes=storage, micro_batch=10),
            compute=ComputeTier(memory_bytes=compute, micro_batch=micro_batch),
        )
        return CostModel(profile, machines, workload)

    # Storage: parameters and the largest peak x 10. Compute: the same x 100, and 1000 + 3 x 100 for the tail.
    assert model(600, 8500).needs[Tier.STORAGE].tolist() == [0, 100 + 500, 300 + 700]
    assert model(600, 8500).needs[Tier.COMPUTE].tolist() == [300 + 7000 + 1300, 200 + 7000 + 1300, 1300]
    assert model(600, 8500).shortfalls(0) == {Tier.COMPUTE: 300 + 7000 + 1300 - 8500}
    assert model(599.5, 8500).shortfalls(1) == {Tier.STORAGE: 0.5}
    assert model(600, 1300).shortfalls(1) == {Tier.COMPUTE: 7200}
    assert model(1000, 1300).fits(2) and not model(999, 1300).fits(2)
    assert model(600, 2300, micro_batch=10).fits(0), "100 + 200 + 70 x 10 + 1300"
    assert not model(600, 2299, micro_batch=10).fits(0)
    why = model(999.5, 1299).why_not(2)
    assert "storage memory is short by 1 bytes (needs 1 kB at micro-batches of 10" in why
    assert "compute memory is short by 1 bytes (needs 1.3 kB at a training batch of 100" in why


def test_routes_say_who_runs_what() -> None:
    profile = replace(alexnet(), input_stages=(stage("decode", 602112),))
    assert [(s.tier, s.start, s.stop) for s in route_at(profile, 13).segments] == [
        (Tier.STORAGE, -1, 13),
        (Tier.COMPUTE, 13, 21),
    ]
    assert [(s.tier, s.start, s.stop) for s in route_at(profile, -1).segments] == [(Tier.COMPUTE, -1, 21)]
    assert route_at(profile, -1).cut == -1


@pytest.mark.parametrize("cut", [-1, 18, 21])
def test_a_cut_outside_the_chain_or_past_the_freeze_point_is_refused(cut: int) -> None:
    with pytest.raises(ConfigError, match=r"cut must lie in 0\.\.17 \(the freeze point\), got"):
        evaluate(cut, alexnet(), cluster(), Workload(batch_size=1, num_samples=1))


def test_shares_must_sum_to_one() -> None:
    profile = alexnet()
    with pytest.raises(ConfigError, match=r"shares must sum to 1, got \[0.5\]"):
        evaluate(
            (route_at(profile, 3, share=0.5),), profile, cluster(), Workload(batch_size=1, num_samples=1)
        )


def test_a_stage_that_was_not_measured_is_named() -> None:
    unmeasured = StageProfile(name="conv9", kind="conv", out_bytes=1, seconds={"compute": (0, 0)})
    profile = replace(alexnet(), stages=(unmeasured,), freeze=1)
    with pytest.raises(ConfigError, match=r"stages\[conv9\].seconds.storage is missing \(known: compute\)"):
        evaluate(0, profile, cluster(), Workload(batch_size=1, num_samples=1))


def test_unknown_memory_rules_nothing_out() -> None:
    assert math.isinf(StorageTier().memory_bytes)
    assert CostModel(alexnet(), cluster(), Workload(batch_size=4096, num_samples=4096)).fits(0)


def test_a_table_is_the_sequence_of_its_rows() -> None:
    model = CostModel(alexnet(), cluster(), Workload(batch_size=128, num_samples=1280))
    table, rows = model.table(), tuple(model.row(cut) for cut in model.cuts)
    assert len(table) == len(rows) and tuple(table) == rows
    assert (table[0], table[-1], table[1:3]) == (rows[0], rows[-1], rows[1:3])
    assert table == rows and table == model.table() and hash(table) == hash(rows)
    assert table != rows[:-1] and table != (*rows[:-1], rows[0]) and table != 1
    assert rows[0].name == "(not split)" and rows[-1].name == model.profile.stage(model.profile.freeze).name
