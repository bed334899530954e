"""Check the mix of routes against brute force over a fine grid, and against every single cut."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.examples import examples
from tests.planning import alexnet, cluster, clusters, profiles, stage, workloads
from upriver.cost import Array, CostModel, evaluate
from upriver.policies import POLICIES
from upriver.policies._simplex import NOTHING, MixProgram
from upriver.policies.upriver import MARGIN, SLACK
from upriver.types import Cluster, InputProfile, Link, Plan, Profile, StorageTier, TailProfile, Workload


def epoch_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.epoch_s


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_never_behind_a_single_cut_nor_behind_not_splitting(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    question = (profile, cluster, workload)
    plan = POLICIES["upriver"](*question)
    assume(plan.feasible)
    oracle = epoch_s(POLICIES["exhaustive"](*question))
    assert epoch_s(plan) <= 1.01 * oracle * (1 + 1e-12)
    for name in ("hapi", "hapi_bandwidth", "neurosurgeon", "min", "freeze"):
        other = POLICIES[name](*question)
        if other.feasible:
            assert oracle <= epoch_s(other) * (1 + 1e-12), name
    plain = POLICIES["nosplit"](*question)
    if plain.feasible:
        assert epoch_s(plan) <= epoch_s(plain)


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_a_mix_is_taken_only_for_a_gain_to_rely_on(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    plan = POLICIES["upriver"](profile, cluster, workload)
    if len(plan.routes) > 1:
        single = epoch_s(POLICIES["exhaustive"](profile, cluster, workload))
        assert epoch_s(plan) * (1 + MARGIN) <= (1 + SLACK) * single * (1 + 1e-12)


@pytest.mark.parametrize("unit_s", [1.0, 2.0**-19])
@pytest.mark.parametrize(("gain", "cuts"), [(0.02, [1]), (0.20, [0, 1])])
def test_a_mix_of_little_gain_is_left_for_the_single_cut(gain: float, cuts: list[int], unit_s: float) -> None:
    """Cut 1 keeps the storage tier busy; the compute tier could relieve it of ``gain`` of the samples."""
    busy_s = 1e-4 * unit_s
    stages = (stage("all", 1000, storage=busy_s, compute=busy_s * (1 - gain) / gain),)
    freed = InputProfile(stored_bytes=1000, tensor_bytes=1000)
    profile = Profile(model="one way", freeze=1, input=freed, stages=stages)
    machines = Cluster(link=Link(bandwidth_bytes_per_s=1e9 / unit_s), storage=StorageTier(micro_batch=16))
    plan = POLICIES["upriver"](profile, machines, Workload(batch_size=16, num_samples=16 * 5000))
    assert [route.cut for route in plan.routes] == cuts
    assert ("too little to rely on" in plan.why) == (len(cuts) == 1)


def test_a_cut_that_keeps_next_to_nothing_busy() -> None:
    """The other cuts' time, in units of that cut's time, would overflow a float."""
    freed = InputProfile(stored_bytes=0, tensor_bytes=0)
    decode = stage("decode", 602112.0, storage=0.0, compute=0.0)
    tail = TailProfile(seconds=(0.0, sys.float_info.min), param_bytes=0, peak_bytes=0)
    profile = Profile(
        model="all but free",
        freeze=0,
        input=freed,
        stages=(stage("model", 0.0),),
        input_stages=(decode,),
        tail=tail,
    )
    machines = Cluster(link=Link(bandwidth_bytes_per_s=1e4), storage=StorageTier(micro_batch=1))
    plan = POLICIES["upriver"](profile, machines, Workload(batch_size=1, num_samples=1))
    assert [route.cut for route in plan.routes] == [-1]  # the decode, of which nothing crosses


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_few_routes_and_whole_micro_batches(profile: Profile, cluster: Cluster, workload: Workload) -> None:
    plan = POLICIES["upriver"](profile, cluster, workload)
    units = math.ceil(workload.num_samples / cluster.storage.micro_batch)
    resources = np.count_nonzero(CostModel(profile, cluster, workload).epochs.busy.any(axis=1))
    # Where storage is no resource of its own, the epoch's length is one more bound while storage is spared.
    spared = cluster.stream != "micro_batch"
    assert len(plan.routes) <= max(1, resources + spared)
    for route in plan.routes:
        assert route.share > 0
        assert math.isclose(route.share * units, round(route.share * units), abs_tol=1e-6)
    cuts = [route.cut for route in plan.routes]
    assert cuts == sorted(set(cuts))


def grid(parts: int, steps: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to share ``steps`` among ``parts``."""
    if parts == 1:
        yield (steps,)
        return
    for first in range(steps + 1):
        for rest in grid(parts - 1, steps - first):
            yield (first, *rest)


seconds = st.integers(0, 40).map(lambda n: n / 10)


def solved(busy: Array) -> tuple[MixProgram, float]:
    program = MixProgram(busy)
    return program, program.shortest()


@settings(max_examples=examples(60))
@given(busy=st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4))
def test_the_linear_program_against_a_fine_grid(busy: list[tuple[float, float, float]]) -> None:
    matrix = np.array(busy).T
    program, shortest = solved(matrix)
    shares = program.shares
    assert shares.sum() == pytest.approx(1)
    assert (matrix @ shares).max() == pytest.approx(shortest, abs=1e-9)
    assert np.count_nonzero(shares > NOTHING) <= len(matrix)
    steps = 40
    best = min((matrix @ (np.array(counts) / steps)).max() for counts in grid(len(busy), steps))
    assert shortest <= best + 1e-9
    # A grid point lies within half a step a cut of the optimum, and no resource changes by more than that.
    assert best <= shortest + len(busy) * matrix.max() / steps + 1e-9


@pytest.mark.full
@settings(max_examples=examples(60))
@given(busy=st.lists(st.tuples(seconds, seconds, seconds), min_size=2, max_size=4), slack=st.floats(0.0, 0.5))
def test_sparing_the_storage_tier_against_a_fine_grid(
    busy: list[tuple[float, float, float]], slack: float
) -> None:
    matrix = np.array(busy).T
    program, shortest = solved(matrix)
    most = (1 + slack) * shortest + 1e-6
    program.cheapest(matrix[0], most)
    assert (matrix @ program.shares).max() <= most + 1e-6
    steps = 40
    allowed = [
        matrix[0] @ weights
        for counts in grid(len(busy), steps)
        if (matrix @ (weights := np.array(counts) / steps)).max() <= most
    ]
    assert matrix[0] @ program.shares <= min(allowed, default=math.inf) + 1e-6


@given(
    busy=st.integers(1, 5).flatmap(
        lambda rows: st.lists(st.tuples(*[seconds] * rows), min_size=1, max_size=60)
    ),
    slack=st.sampled_from([0.0, 0.01, 0.3]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_both_linear_programs_against_another_solver(
    busy: list[tuple[float, ...]], slack: float, scale: float
) -> None:
    """Equal entries and zeros are frequent here, so that vertices are degenerate."""
    matrix = scale * np.array(busy).T
    matrix[-1, 0] *= 1e3  # a cut far beyond the others
    rows, cuts = matrix.shape
    simplex = {"A_eq": np.ones((1, cuts)), "b_eq": [1.0]}
    program, shortest = solved(matrix / scale)
    time = linprog(
        np.append(np.zeros(cuts), 1.0),
        A_ub=np.column_stack((matrix / scale, -np.ones(rows))),
        b_ub=np.zeros(rows),
        A_eq=np.append(np.ones(cuts), 0.0)[np.newaxis],
        b_eq=[1.0],
    )
    assert shortest == pytest.approx(time.fun, abs=1e-7)
    most = (1 + slack) * shortest + 1e-6
    program.cheapest(matrix[0] / scale, most)
    cost = linprog(matrix[0] / scale, A_ub=matrix / scale, b_ub=np.full(rows, most), **simplex)
    assert cost.success and matrix[0] / scale @ program.shares == pytest.approx(cost.fun, abs=1e-5)
    assert (matrix / scale @ program.shares).max() <= most + 1e-6


def test_a_mix_beats_every_single_cut_where_cuts_are_coarse() -> None:
    """One cut leaves the storage tier idle, the other the compute tier: half of each keeps both busy."""
    profile = Profile(
        model="two ways",
        freeze=1,
        input=InputProfile(stored_bytes=1000, tensor_bytes=1000),
        stages=(stage("all", 1000, storage=0.01, compute=0.01),),
    )
    machines = Cluster(link=Link(bandwidth_bytes_per_s=1e9), storage=StorageTier(micro_batch=16))
    workload = Workload(batch_size=16, num_samples=16 * 1000)
    plan = POLICIES["upriver"](profile, machines, workload)
    assert {route.cut: route.share for route in plan.routes} == pytest.approx({0: 0.5, 1: 0.5}, abs=0.011)
    assert epoch_s(plan) < 0.52 * epoch_s(POLICIES["exhaustive"](profile, machines, workload))
    assert "over cut 0" in plan.why and "over cut 1" in plan.why


def test_a_third_cut_that_fills_the_pipeline_late_is_left_out() -> None:
    """With it all three resources finish together, but one of its micro-batches takes the link for 0.5 s."""
    profile = Profile(
        model="residual",
        freeze=2,
        input=InputProfile(stored_bytes=110_000, tensor_bytes=110_000),
        stages=(
            stage("wide", 500_000, storage=0.012, compute=0.014),
            stage("narrow", 100_000, storage=0.016, compute=0.013),
            stage("tail", 4000, storage=0.008, compute=0.007),
        ),
    )
    machines = Cluster(link=Link(bandwidth_bytes_per_s=16e6), storage=StorageTier(micro_batch=16))
    workload = Workload(batch_size=32, num_samples=384)
    model = CostModel(profile, machines, workload)
    busy = model.epochs.busy[model.epochs.busy.any(axis=1)]
    program, _ = solved(busy / busy.max(axis=0).min())
    assert np.count_nonzero(program.shares > NOTHING) == 3
    plan = POLICIES["upriver"](profile, machines, workload)
    assert [route.cut for route in plan.routes] == [0, 2]


@given(profile=profiles(), cluster=clusters(), workload=workloads)
def test_a_mix_of_more_is_never_behind_two_of_its_cuts(
    profile: Profile, cluster: Cluster, workload: Workload
) -> None:
    plan = POLICIES["upriver"](profile, cluster, workload)
    units = math.ceil(workload.num_samples / cluster.storage.micro_batch)
    for one, other in combinations(plan.routes, 2) if len(plan.routes) > 2 else ():
        for count in range(1, units, math.ceil(units / 24)):  # whole micro-batches, as plans have them
            shares = (replace(one, share=count / units), replace(other, share=1 - count / units))
            assert epoch_s(plan) <= 1.01 * evaluate(shares, profile, cluster, workload).epoch_s * (1 + 1e-9)


def test_what_is_within_the_slack_goes_to_the_cheapest_for_the_storage_tier() -> None:
    """Only the link decides: cuts 1 and 2 ship as much, and 1 is less work for the storage tier."""
    profile = Profile(
        model="spare",
        freeze=2,
        input=InputProfile(stored_bytes=10_000, tensor_bytes=10_000),
        stages=(
            stage("a", 1005, storage=1e-6, compute=1e-6),
            stage("b", 1000, storage=1e-6, compute=1e-6),
        ),
    )
    plan = POLICIES["upriver"](profile, cluster(bandwidth=1e6), Workload(batch_size=64, num_samples=6400))
    assert [route.cut for route in plan.routes] == [1]


def test_a_mix_fits_wherever_its_cuts_do() -> None:
    profile = alexnet()
    machines = Cluster(link=Link(bandwidth_bytes_per_s=1e8), storage=StorageTier(memory_bytes=40e6))
    plan = POLICIES["upriver"](profile, machines, Workload(batch_size=512, num_samples=5120))
    model = CostModel(profile, machines, Workload(batch_size=512, num_samples=5120))
    assert plan.feasible and all(model.fits(route.cut) for route in plan.routes)
    assert plan.predicted == evaluate(
        plan.routes, profile, machines, Workload(batch_size=512, num_samples=5120)
    )
