"""Check when the replanner leaves a plan, and that a new plan changes no bit of a job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, run, train
from tests.planning import alexnet, cluster
from tests.program.nets import frozen_small
from upriver.control.plan_switching import PROOF_REST_S, PlanSwitcher
from upriver.errors import ConfigError, NotExact
from upriver.finetune import replanner as replan
from upriver.finetune.calibration import measurement, time_budget
from upriver.finetune.replanner import Replanner, Replanning, StepClock
from upriver.pipeline import Dataset
from upriver.policies import POLICIES
from upriver.profile import profile_from_json, profile_to_json
from upriver.profile.live_profile import LiveProfile
from upriver.rpc.link_meter import LinkMeter
from upriver.types import Cost, Plan, Workload


def test_canaries_run_in_a_thread_and_their_end_is_heeded(caplog: pytest.LogCaptureFixture) -> None:
    """The job goes from a fast link to a slow one, where the plan of a policy has another cut."""
    told, machines = threading.Event(), cluster(bandwidth=25e6, micro_batch=16)
    profile = alexnet(storage_s=2.4e-4, compute_s=1.2e-4, stored_bytes=110_000)
    work = Workload(batch_size=128, num_samples=12_800)
    asked: list[Sequence[int]] = []

    def prove(cuts: Sequence[int]) -> None:
        asked.append(cuts)
        assert told.wait(60)
        raise NotExact("other bits")

    plan, live = POLICIES["exhaustive"](profile, machines, work), LiveProfile(profile, machines, samples=16)
    switcher = PlanSwitcher("exhaustive", plan, live, work, gain=0.1, patience=3)
    replanner = Replanner(switcher, live, prove=prove, bandwidth=lambda: 2.5e6)
    assert all(replanner.consider() is None for _ in range(20))
    told.set()
    replanner.close()
    assert all(replanner.consider() is None for _ in range(20))
    [cuts] = asked
    assert switcher.plan is plan and switcher.refused == set(cuts)
    assert not replanner.opened(cuts[0])
    assert "servers do not pass there: other bits" in caplog.text


class Event:
    """A place in the queue of an accelerator that has one clock, in milliseconds, and waits for no one."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms, self.waited = 0.0, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, ended: Event) -> float:
        assert ended.waited, "times are known once the device has come so far"
        return ended.at_ms - self.at_ms


class Stream:
    def record_event(self, event: Event) -> Event:
        event.at_ms = Event.now_ms
        return event


def test_steps_on_an_accelerator_take_as_long_as_there_and_are_known_one_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop hands over steps of 2 s and more at once, as one that reads no loss does."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    clock, known = StepClock(torch.device("cuda")), list[Any]()
    for number in range(3):
        Event.now_ms += 500.0  # the prefix of the next batch
        clock.begin()
        Event.now_ms += 2000.0 + 100 * number
        known.append(clock.end(16 + number))
    assert known == [None, (pytest.approx(2.0), 16), (pytest.approx(2.1), 17)]


def test_a_step_on_a_cpu_is_known_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.5, 7.0, 7.25])
    monkeypatch.setattr(replan, "moment", lambda device: next(moments))
    clock, known = StepClock(torch.device("cpu")), list[Any]()
    for samples in (16, 8):
        clock.begin()
        known.append(clock.end(samples))
    assert known == [(0.5, 16), (0.25, 8)]


def test_canaries_without_a_thread_are_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    machines = cluster(bandwidth=25e6, micro_batch=16)
    profile = alexnet(storage_s=2.4e-4, compute_s=1.2e-4, stored_bytes=110_000)
    work = Workload(batch_size=128, num_samples=12_800)
    plan, live = POLICIES["exhaustive"](profile, machines, work), LiveProfile(profile, machines, samples=16)
    switcher = PlanSwitcher("exhaustive", plan, live, work, gain=0.1, patience=3)
    proved: list[Sequence[int]] = []
    replanner = Replanner(switcher, live, prove=proved.append, bandwidth=lambda: 2.5e6)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert all(replanner.consider() is None for _ in range(20))
    assert not proved
    now = time.monotonic() + 2 * PROOF_REST_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert all(replanner.consider() is None for _ in range(20)) or proved
    replanner.close()
    assert len(proved) == 1


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
@pytest.mark.full
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


@pytest.mark.full
def test_what_was_noted_at_the_start_stays_when_the_plan_changes(
    tmp_path_factory: pytest.TempPathFactory, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(replanner: Replanner, trained_s: float, samples: int) -> tuple[Plan, Cost, Cost] | None:
        plan = replace(replanner.switcher.plan, why="it is shorter")
        return None if plan.predicted is None else (plan, plan.predicted, plan.predicted)

    monkeypatch.setattr(Replanner, "after_step", fresh)
    data, model = photos(tmp_path_factory.mktemp("store"), 24), frozen_small()
    with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, exact="numeric") as job:
        train(job, model, optimizer_of(model), epochs=1)
        assert job.switches
        assert job.plan.why.startswith("it is shorter; ") and "features may differ: within" in job.plan.why
