"""Check the profile that is built from the reports of both tiers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from upriver.errors import ConfigError
from upriver.finetune.planning.plan_builder import cores_for_inputs
from upriver.policies import POLICIES
from upriver.profile import build_profile, cluster_from
from upriver.profile.builder import has_lines, with_lines, with_peaks
from upriver.profile.serialization import profile_from_json, profile_to_json
from upriver.types import Profile, TailProfile, Tier, Timings, Workload


@dataclass(frozen=True)
class Captured:
    name: str
    out_bytes: float = 100.0
    kind: str = "Conv2d"
    param_bytes: int = 10
    flops: float = 5.0
    peak_bytes: float = 200.0


@dataclass(frozen=True)
class Input:
    name: str
    kind: str = "decode"


def timings(*micro_batches: dict[int, float], **phases: float) -> list[Timings]:
    return [Timings(phases=phases, stages=stages) for stages in micro_batches]


STEADY = {-1: 0.8, 0: 0.08, 1: 1.6, 2: 3.2}


def build(storage: list[Timings], compute: list[Timings], **more: object) -> Profile:
    arguments = {
        "model": "tiny",
        "freeze": 2,
        "stages": [Captured("conv"), Captured("pool", out_bytes=25.0)],
        "chain": [Input("decode"), Input("crop")],
        "stored_bytes": 40.0,
        "tensor_bytes": 60.0,
        "samples_per_timing": 16,
    }
    return build_profile(storage=storage, compute=compute, **{**arguments, **more})  # type: ignore[arg-type]


def test_seconds_are_medians_per_sample_without_the_warm_up() -> None:
    warm_up = dict.fromkeys(STEADY, 1000.0)
    noisy = {position: 50.0 for position in STEADY}
    doubled = {position: 2 * seconds for position, seconds in STEADY.items()}
    profile = build(timings(warm_up, noisy, STEADY, STEADY), timings(warm_up, doubled))
    assert profile.stage(1).seconds == {"storage": (0.0, 0.1), "compute": (0.0, 0.2)}
    assert profile.stage(2).seconds["storage"] == (0.0, pytest.approx(0.2))
    assert profile.stage(-1).seconds["storage"] == (0.0, pytest.approx(0.05))
    assert profile.stage(0).seconds["compute"] == (0.0, pytest.approx(0.01))


def test_input_stages_have_cores_of_their_own_where_there_are_some() -> None:
    profile = build(timings(STEADY), timings(STEADY), cpus_apart=True)
    assert profile.stage(-1).seconds == {"storage": (0.0, 0.05), "compute.cpu": (0.0, 0.05)}
    assert profile.stage(1).seconds == {"storage": (0.0, 0.1), "compute": (0.0, 0.1)}
    assert profile_from_json(profile_to_json(profile)) == profile


@pytest.mark.parametrize(
    ("device", "cores", "threads", "expected"),
    [
        ("cpu", 1, 1, (False, 1)),
        ("cpu", 8, 8, (False, 8)),
        ("cpu", 8, 16, (False, 8)),
        ("cpu", 8, 6, (True, 2)),
        ("cuda", 8, 8, (True, 8)),
    ],
)
def test_which_cores_input_stages_have(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, threads: int, expected: tuple[bool, int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert cores_for_inputs(torch.device(device)) == expected


def test_a_single_micro_batch_counts_although_it_is_warm_up() -> None:
    assert build(timings(STEADY), timings(STEADY)).stage(1).seconds["storage"] == (0.0, 0.1)


def test_sizes_and_names_come_from_the_stages() -> None:
    tail = TailProfile(seconds=(0.1, 0.2), param_bytes=7, peak_bytes=3)
    profile = build(timings(STEADY), timings(STEADY), tail=tail)
    assert (profile.unsplit, profile.freeze, profile.tail) == (-2, 2, tail)
    assert [profile.cut_bytes(cut) for cut in (-2, 0, 1, 2)] == [40.0, 60.0, 100.0, 25.0]
    assert [s.name for s in (*profile.input_stages, *profile.stages)] == ["decode", "crop", "conv", "pool"]
    pool = profile.stage(2)
    assert (pool.kind, pool.param_bytes, pool.flops, pool.peak_bytes) == ("Conv2d", 10, 5.0, 200.0)


def test_stages_past_the_freeze_point_need_no_measurement() -> None:
    profile = build(timings(STEADY), timings(STEADY), stages=[Captured("a"), Captured("b"), Captured("head")])
    assert profile.stage(3).seconds == {}
    workload = Workload(batch_size=16, num_samples=64)
    machines = cluster_from(
        bandwidth_bytes_per_s=1e6,
        rtt_s=0.01,
        micro_batch=16,
        stored_bytes=40,
        sent_bytes=25,
        samples_per_timing=16,
        storage=timings(STEADY),
    )
    assert POLICIES["hapi"](profile, machines, workload).feasible


@pytest.mark.parametrize(("tier", "missing"), [("storage", 2), ("compute", 0)])
def test_an_unmeasured_stage_is_named_with_its_tier(tier: str, missing: int) -> None:
    part = {position: seconds for position, seconds in STEADY.items() if position != missing}
    measured = {"storage": timings(STEADY, STEADY), "compute": timings(STEADY, STEADY)}
    measured[tier] = timings(part, part)
    name = {2: "pool", 0: "crop"}[missing]
    with pytest.raises(
        ConfigError, match=rf"stage '{name}' \(position {missing}\) was not measured on the {tier}"
    ):
        build(measured["storage"], measured["compute"])


def test_no_samples_in_a_timing_is_refused() -> None:
    with pytest.raises(ConfigError, match="samples_per_timing"):
        build(timings(STEADY), timings(STEADY), samples_per_timing=0)


def test_the_cluster_takes_its_rates_from_the_phases() -> None:
    storage = [*timings({}, read=9.0, encode=9.0), *timings({}, {}, read=0.32, encode=0.16)]
    cluster = cluster_from(
        bandwidth_bytes_per_s=2.5e6,
        rtt_s=0.02,
        micro_batch=8,
        stored_bytes=100,
        sent_bytes=50,
        samples_per_timing=16,
        storage=storage,
        compute=timings({}, decode=0.08),
        storage_memory_bytes=1e9,
        compute_memory_bytes=2e9,
        concurrency=3,
        load=1.5,
    )
    assert (cluster.link.bandwidth_bytes_per_s, cluster.link.rtt_s) == (2.5e6, 0.02)
    assert cluster.storage.seconds_per_byte == {"read": pytest.approx(2e-4), "encode": pytest.approx(2e-4)}
    assert cluster.compute.seconds_per_byte == {"decode": pytest.approx(1e-4)}
    assert (cluster.storage.memory_bytes, cluster.compute.memory_bytes) == (1e9, 2e9)
    assert (cluster.storage.concurrency, cluster.storage.load) == (3, 1.5)
    assert cluster.storage.micro_batch == cluster.compute.micro_batch == 8


def test_what_nobody_reports_is_free_or_asked_of_this_machine() -> None:
    cluster = cluster_from(
        bandwidth_bytes_per_s=1,
        rtt_s=0,
        micro_batch=16,
        stored_bytes=0,
        sent_bytes=0,
        samples_per_timing=16,
        storage=timings({}, {}),
    )
    assert cluster.storage.seconds_per_byte == {"read": 0.0, "encode": 0.0}
    assert cluster.storage.memory_bytes == float("inf")
    assert 1e6 < cluster.compute.memory_bytes < 1e15


def test_lines_take_the_place_of_seconds_at_one_size() -> None:
    stages = [Captured("conv"), Captured("pool"), Captured("late")]
    profile = build(timings(STEADY), timings(STEADY), stages=stages)
    assert not has_lines(profile)
    there = with_lines(profile, {Tier.STORAGE: [(1.0, 0.5), (0.0, 2.0)]})
    assert [stage.seconds.get("storage") for stage in there.stages] == [(1.0, 0.5), (0.0, 2.0), None]
    assert [stage.seconds.get("compute") for stage in there.stages] == [(0.0, 0.1), (0.0, 0.2), None]
    assert there.input_stages == profile.input_stages


@pytest.mark.parametrize("tier", [Tier.STORAGE, Tier.COMPUTE])
def test_lines_without_a_fixed_part_on_one_tier_are_lines(tier: Tier) -> None:
    free = [(0.0, 0.5), (0.0, 2.0)]
    profile = with_lines(build(timings(STEADY), timings(STEADY)), {Tier.STORAGE: free, Tier.COMPUTE: free})
    assert not has_lines(profile)
    assert has_lines(with_lines(profile, {tier: [(0.0, 0.5), (1.0, 0.0)]}))


def test_lines_of_other_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 stages were to be measured on storage, got 1"):
        with_lines(build(timings(STEADY), timings(STEADY)), {Tier.STORAGE: [(1.0, 0.5)]})


def test_peaks_are_those_of_the_stages_in_order() -> None:
    profile = build(timings(STEADY), timings(STEADY))
    found = with_peaks(profile, [7.0, 9.0])
    assert [stage.peak_bytes for stage in found.stages] == [7.0, 9.0]
    assert with_peaks(found, [stage.peak_bytes for stage in profile.stages]) == profile
    with pytest.raises(ConfigError, match="2 stages need as many peaks, got 1"):
        with_peaks(profile, [7.0])
