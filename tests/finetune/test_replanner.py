"""Check when the replanner leaves a plan, and that a new plan changes no bit of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, run, train
from tests.planning import alexnet, cluster
from tests.program.nets import frozen_small
from upriver.errors import ConfigError, NotExact
from upriver.finetune import replanner as replan
from upriver.finetune.calibration import measurement, time_budget
from upriver.finetune.replanner import Replanner, Replanning
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.profile import profile_from_json, profile_to_json
from upriver.profile.live_profile import LiveProfile
from upriver.rpc.link_meter import LinkMeter
from upriver.types import Cluster, Cost, Plan, Profile, Workload

MBIT = 1e6 / 8
WORK = Workload(batch_size=128, num_samples=12_800)

ADAPTIVE = ["neurosurgeon", "hapi_bandwidth", "hapi", "exhaustive", "upriver"]


def machine() -> Profile:
    """Return a machine: compute takes 2 ms a sample and storage 4: no stage is free, none decides alone."""
    return alexnet(storage_s=2.4e-4, compute_s=1.2e-4, stored_bytes=110_000)


class Job:
    """A replanner and a link whose bandwidth a test sets."""

    def __init__(
        self,
        policy: str,
        bandwidth: float,
        *,
        prove: Callable[[Sequence[int]], None] = lambda cuts: None,
        replanning: Replanning | None = None,
    ) -> None:
        self.policy, self.bandwidth = policy, bandwidth
        self.first = self.fresh(bandwidth)
        self.replanner = Replanner(
            policy,
            self.first,
            LiveProfile(machine(), self.machines(bandwidth), samples=16),
            WORK,
            replanning=replanning or Replanning(),
            prove=prove,
            bandwidth=lambda: self.bandwidth,
        )

    @staticmethod
    def machines(bandwidth: float) -> Cluster:
        return cluster(bandwidth=bandwidth, micro_batch=16)

    def fresh(self, bandwidth: float) -> Plan:
        return POLICIES[self.policy](machine(), self.machines(bandwidth), WORK)

    def iterate(self, times: int) -> list[int]:
        """Run iterations; return those in which the replanner left the plan."""
        left = []
        for number in range(times):
            if self.replanner.consider() is not None:
                left.append(number)
            self.settle()
        return left

    @staticmethod
    def settle() -> None:
        """Wait for a running canary to end."""
        for thread in threading.enumerate():
            if thread.name == "upriver-replan":
                thread.join()


@pytest.mark.parametrize("policy", ADAPTIVE)
def test_ten_iterations_after_the_link_changed_the_plan_is_a_fresh_one(policy: str) -> None:
    job = Job(policy, 200 * MBIT)
    assert job.iterate(10) == []
    job.bandwidth = 20 * MBIT
    assert len(job.iterate(10)) <= 1
    wanted = job.fresh(20 * MBIT)
    assert job.replanner.plan.routes == wanted.routes
    assert (job.replanner.plan.routes != job.first.routes) == (policy != "neurosurgeon")


@pytest.mark.parametrize("policy", ADAPTIVE)
@pytest.mark.parametrize("mbit", [20, 60, 200])
def test_jitter_around_a_bandwidth_switches_nothing(policy: str, mbit: float) -> None:
    job = Job(policy, mbit * MBIT)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        job.bandwidth = mbit * MBIT * (0.8 + 0.4 * float(torch.rand((), generator=generator)))
        assert job.iterate(1) == []


def test_a_gain_must_last() -> None:
    job = Job("upriver", 200 * MBIT, replanning=Replanning(gain=0.1, patience=4))
    assert job.iterate(10) == []
    for _ in range(5):
        job.bandwidth = 130 * MBIT
        assert job.iterate(7) == []
        job.bandwidth = 200 * MBIT
        assert job.iterate(1) == []
    job.bandwidth = 130 * MBIT
    assert job.iterate(12)[0] >= 8


def test_a_link_that_is_clearly_another_one_is_heeded_as_soon_as_patience_allows() -> None:
    job = Job("upriver", 200 * MBIT, replanning=Replanning(gain=0.1, patience=4))
    assert job.iterate(10) == []
    for _ in range(5):
        job.bandwidth = 20 * MBIT
        assert job.iterate(3) == []
        job.bandwidth = 200 * MBIT
        assert job.iterate(1) == []
    job.bandwidth = 20 * MBIT
    assert job.iterate(10) == [3]
    assert job.replanner.plan.routes == job.fresh(20 * MBIT).routes


def test_a_plan_that_was_about_to_be_left_is_not_left_for_the_link_of_before() -> None:
    job = Job("upriver", 200 * MBIT)
    job.bandwidth = 130 * MBIT  # worth a change if it lasted
    assert job.iterate(7) == []
    job.bandwidth = 20 * MBIT
    assert job.iterate(10) == [2]
    assert job.replanner.plan.routes == job.fresh(20 * MBIT).routes


@pytest.mark.parametrize("policy", ["upriver", "exhaustive"])
@pytest.mark.parametrize(("before", "after"), [(200, 20), (20, 200)])
def test_what_a_meter_shows_while_a_link_changes_makes_no_plan(
    policy: str, before: float, after: float
) -> None:
    job, left = Job(policy, before * MBIT), 0
    assert job.iterate(10) == []
    for mbit in (0.6 * before + 0.4 * after, 0.4 * before + 0.6 * after, *[after] * 8):
        job.bandwidth = mbit * MBIT
        left += len(job.iterate(1))
    assert left <= 1
    assert job.replanner.plan.routes == job.fresh(after * MBIT).routes


@pytest.mark.parametrize("policy", ADAPTIVE)
@pytest.mark.parametrize("planned", [0.8, 1.2])
def test_jitter_is_no_other_link_even_where_the_plan_was_made_at_its_edge(
    policy: str, planned: float
) -> None:
    """Jitter may look like a slow link or a fast one for fewer than STEADY iterations."""
    job = Job(policy, planned * 200 * MBIT)
    for _ in range(20):
        job.bandwidth = (2 - planned) * 200 * MBIT
        assert job.iterate(5) == []
        job.bandwidth = planned * 200 * MBIT
        assert job.iterate(1) == []


def test_a_cut_that_servers_do_not_pass_is_never_used() -> None:
    asked: list[Sequence[int]] = []

    def prove(cuts: Sequence[int]) -> None:
        asked.append(cuts)
        raise NotExact("other bits")

    job = Job("exhaustive", 200 * MBIT, prove=prove)
    job.bandwidth = 20 * MBIT
    assert job.iterate(20) == []
    assert job.replanner.plan is job.first
    assert len(asked) == 1, "and asked for once"


def test_the_switch_waits_for_the_canary() -> None:
    passed = threading.Event()
    job = Job("exhaustive", 200 * MBIT, prove=lambda cuts: passed.wait() and None)
    job.bandwidth = 20 * MBIT
    assert all(job.replanner.consider() is None for _ in range(20))
    passed.set()
    assert job.iterate(3) != []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gain": -0.1}, "gain"),
        ({"gain": float("nan")}, "gain"),
        ({"patience": 0}, "patience"),
        ({"enabled": "yes"}, "enabled must be a bool"),
    ],
)
def test_fields_outside_what_is_allowed_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replanning(**options)


# ------------------------------------------------------------------------------------- in a real job


@pytest.fixture(scope="module")
def near() -> Iterator[upriver.Near]:
    # No bursts: a job that leaves the link idle between steps must still see a thin link.
    with upriver.connect(server_threads=1, meter=LinkMeter(25e6, burst_bytes=0)) as near:
        yield near


def keep_profile(
    near: upriver.Near, data: Dataset, cache: Path, *, storage_s: float, compute_s: float
) -> None:
    """Cache a profile for later jobs like this one: model stages that cost so many seconds a sample."""
    near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, seed=7).close()
    [path] = cache.glob("profiles/*.profile.json")
    kept = profile_from_json(path.read_text())
    seconds = {"storage": (0.0, storage_s), "compute": (0.0, compute_s)}
    stages = tuple(replace(stage, seconds=seconds) for stage in kept.stages)
    path.write_text(profile_to_json(replace(kept, stages=stages)))


def take_quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make jobs plan as if training took 1 ms a sample after each step, on any busy machine."""
    real = LiveProfile.trained
    monkeypatch.setattr(LiveProfile, "trained", lambda live, _, samples: real(live, 1e-3 * samples, samples))
    monkeypatch.setattr(replan, "PLANNING_SHARE", 1.0)


@pytest.mark.slow
def test_a_link_that_becomes_thin_changes_the_plan_and_no_bit(
    tmp_path_factory: pytest.TempPathFactory, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the storage tier, which is free, runs all stages; then only the smallest value crosses in time.

    A sample is 2048 bytes after the freeze point, 768 as pixels after the crop: 14 ms and 5 ms.
    """
    data, cache = photos(tmp_path_factory.mktemp("store"), 200), tmp_path_factory.mktemp("cache")
    wanted, reference, _ = run(upriver.connect(), data, policy="nosplit", epochs=3)
    monkeypatch.setenv("UPRIVER_CACHE", str(cache))
    monkeypatch.setattr(time_budget, "SHARE", 0.0)  # otherwise stages may be measured at a second size
    monkeypatch.setattr(measurement, "slowdown", lambda *args, **kwargs: 1.0)
    keep_profile(near, data, cache, storage_s=1e-9, compute_s=1e-3)
    take_quick_steps(monkeypatch)
    model = frozen_small()
    targets: list[int] = []

    def thinner(step: int) -> None:
        if step == 4:
            near.meter.rate_bytes_per_s = 150_000.0

    try:
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            policy="exhaustive",
            prefetch=upriver.Prefetch(window_bytes=1 << 16),
        ) as job:
            first = job.plan.cut
            losses = train(job, model, optimizer_of(model), epochs=3, after_step=thinner)
            switches, placed, last = job.switches, job.placed, job.plan.cut
            targets.extend(job.report.samples.values())
    finally:
        near.meter.rate_bytes_per_s = 25e6
    taken = [route.cut for switch in switches for route in switch.routes]
    assert first == 6 and taken[0] in (-2, -1) and taken[-1] == last
    assert {6, taken[0]} <= {each.cut for each in placed}, "what was chosen is what was done"
    assert len(losses) == len(wanted) and all(map(torch.equal, losses, wanted))
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name])
    assert sum(targets) == 600
    indices = [(each.epoch, each.index) for each in placed]
    assert indices == sorted(set(indices)), "each micro-batch once and in order"
    for switch in switches:
        assert switch.after * 1.1 < switch.before


def test_what_was_noted_at_the_start_stays_when_the_plan_changes(
    tmp_path_factory: pytest.TempPathFactory, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(replanner: Replanner, trained_s: float, samples: int) -> tuple[Plan, Cost, Cost] | None:
        plan = replace(replanner.plan, why="it is shorter")
        return None if plan.predicted is None else (plan, plan.predicted, plan.predicted)

    monkeypatch.setattr(Replanner, "after_step", fresh)
    data, model = photos(tmp_path_factory.mktemp("store"), 24), frozen_small()
    with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, exact="numeric") as job:
        train(job, model, optimizer_of(model), epochs=1)
        assert job.switches
        assert job.plan.why.startswith("it is shorter; ") and "exact='numeric'" in job.plan.why
