"""Check that both tiers measure stages at two sizes where that pays, and that a job may choose its size."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upriver
from tests.finetune.training import MICRO, run, same
from tests.program.nets import frozen_small
from upriver.errors import (
    Busy,
    CaptureError,
    ConfigError,
    Forbidden,
    Overloaded,
    ProgramError,
    ProtocolError,
    QuotaExceeded,
    UpriverError,
)
from upriver.finetune import session
from upriver.finetune.calibration import measurement, second_size, time_budget
from upriver.finetune.calibration.measurement import Measurement
from upriver.finetune.calibration.server_gate import ServerGate
from upriver.pipeline import Dataset
from upriver.profile.builder import has_lines
from upriver.profile.memory import estimator
from upriver.program.split.split import Split, split
from upriver.protocol import Load, StageCosts
from upriver.rpc.client import ServerClient
from upriver.rpc.load_report import busy_s, waiting
from upriver.types import Tier, Timings


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Allow unlimited measuring time; epochs of one second would allow 30 ms."""
    monkeypatch.setattr(time_budget, "SHARE", 1e9)
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurement, "slowdown", lambda *args, **kwargs: 1.0)
    monkeypatch.setattr(session, "split", split_once)


MODEL = frozen_small()
"""Never trained, so that its splits serve all tests that only measure."""

SPLITS: dict[int, Split] = {}
"""Splits of `MODEL` by samples in a micro-batch. To make and prove one takes most of such a job's time."""


def split_once(model: nn.Module, example: torch.Tensor, **options: Any) -> Split:
    if model is not MODEL:
        return split(model, example, **options)
    if len(example) not in SPLITS:
        SPLITS[len(example)] = split(model, example, **options)
    return SPLITS[len(example)]


def measured_by(near: upriver.Near, data: Dataset, **options: Any) -> tuple[Measurement, upriver.FinetuneJob]:
    options = {"batch_size": 12, "micro_batch": MICRO, "policy": "hapi", **options}
    with near.finetune(MODEL, data, **options) as job:
        assert near.measured is not None
        return near.measured, job


class Asked:
    """Record the measurements that servers were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.costs: list[StageCosts] = []
        real = ServerClient.profile

        def profile(client: ServerClient, programs: Any, **options: Any) -> StageCosts:
            self.calls.append((client.url, len(programs), options["stop"], options["repeats"]))
            if failure is not None:
                raise failure
            self.costs.append(real(client, programs, **options))
            return self.costs[-1]

        monkeypatch.setattr(ServerClient, "profile", profile)


def test_stages_are_measured_at_two_sizes_on_both_tiers(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    measured, job = measured_by(near, data)
    profile = measured.profile
    assert has_lines(profile)
    assert [call[1:] for call in asked.calls] == [(2, profile.freeze, 5)]
    [costs] = asked.costs
    assert costs.micro_batches == (MICRO, MICRO // 4)
    assert [stage.seconds["storage"] for stage in profile.stages] == [stage.seconds for stage in costs.stages]
    assert all(stage.seconds["storage"][0] == 0 for stage in profile.input_stages)
    assert set(measured.seconds) == {"canary", "stages", "link", "tail", "memory", "second size"}
    assert measured.total_s == pytest.approx(sum(measured.seconds.values()) - measured.seconds["canary"])
    assert not measured.kept
    assert job.plan.feasible


@pytest.mark.full
def test_measuring_leaves_no_trace(data: Dataset, near: upriver.Near) -> None:
    model = frozen_small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with near.finetune(model, data, batch_size=12, micro_batch=MICRO):
        assert near.measured is not None
        assert "second size" in near.measured.seconds
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.full
def test_a_profile_has_the_memory_of_stages_as_runs_without_data_show_it(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, ...]] = []

    def peaks(program: Any) -> tuple[float, ...]:
        seen.append(tuple(1000.0 + k for k in range(program.num_stages)))
        return seen[-1]

    monkeypatch.setattr(time_budget, "SHARE", 0.0)
    monkeypatch.setattr(estimator, "stage_peaks", peaks)
    for _ in range(2):  # measured, then cached
        measured, _ = measured_by(near, data)
        assert tuple(stage.peak_bytes for stage in measured.profile.stages) == seen[0]
    assert len(seen) == 1

    def fails(program: Any) -> tuple[float, ...]:
        raise ProgramError("no such kernel without data")

    monkeypatch.setattr(estimator, "stage_peaks", fails)
    captured, _ = measured_by(near, data, micro_batch=4)
    assert all(stage.peak_bytes > 0 for stage in captured.profile.stages)
    assert not {stage.peak_bytes for stage in captured.profile.stages} & set(seen[0])


@pytest.mark.full
def test_the_second_job_has_the_lines_of_the_first(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = measured_by(near, data)
    asked = Asked(monkeypatch)
    again, _ = measured_by(near, data)
    assert again.kept
    assert asked.calls == []
    assert "second size" not in again.seconds
    assert [stage.seconds for stage in again.profile.stages] == [s.seconds for s in first.profile.stages]


@pytest.mark.full
def test_a_batch_larger_than_the_epoch_takes_the_memory_of_the_epoch(
    data: Dataset, near: upriver.Near
) -> None:
    found = []
    for batch_size in (200, 10**12):
        measured, job = measured_by(near, data, batch_size=batch_size)
        assert len(job) == 1
        tail = measured.profile.tail
        found.append((tail.param_bytes, tail.peak_bytes, job.window.micro_batches))
    assert len(set(found)) == 1
    with near.finetune(frozen_small(), data, batch_size=10**12, micro_batch=MICRO, policy="freeze") as job:
        assert [len(targets) for _, targets in job] == [200]


@pytest.mark.full
def test_a_kept_profile_of_one_size_gets_its_lines_when_the_budget_allows(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "SHARE", 0.0)
    asked = Asked(monkeypatch)
    poor, _ = measured_by(near, data)
    assert not has_lines(poor.profile)
    assert asked.calls == []
    monkeypatch.setattr(time_budget, "SHARE", 1e9)
    assert has_lines(measured_by(near, data)[0].profile)
    assert measured_by(near, data)[0].kept
    assert len(asked.calls) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "failure",
    [
        Busy("another profile is being measured", retry_after_s=5),
        pytest.param(ProtocolError("HTTP 404 from an older one"), marks=pytest.mark.full),
    ],
)
def test_a_server_that_does_not_measure_leaves_one_size(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    asked = Asked(monkeypatch, failure)
    measured, job = measured_by(near, data)
    assert len(asked.calls) == 1
    assert not has_lines(measured.profile)
    assert str(failure) not in job.plan.why
    assert job.plan.feasible


@pytest.mark.full
def test_a_server_that_tells_of_other_stages_leaves_one_size(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ServerClient.profile

    def profile(client: ServerClient, programs: Any, **options: Any) -> StageCosts:
        costs = real(client, programs, **options)
        return type(costs)(
            **{**{f: getattr(costs, f) for f in costs.__struct_fields__}, "stages": costs.stages[1:]}
        )

    monkeypatch.setattr(ServerClient, "profile", profile)
    assert not has_lines(measured_by(near, data)[0].profile)


@pytest.mark.full
def test_a_model_that_cannot_be_captured_at_the_other_size_leaves_one(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError("only eight at a time")

    monkeypatch.setattr(second_size, "resized", fails)
    assert not has_lines(measured_by(near, data)[0].profile)


# ------------------------------------------------------------------------------------------- the load


def test_others_in_the_queue_share_the_servers() -> None:
    assert waiting([], 1.0, in_flight=4) == 1
    assert waiting([0.0, 0.0], 1.0, in_flight=4) == 1
    assert waiting([4.0, 4.0], 1.0, in_flight=4) == 2  # another job like this one
    assert waiting([0.0, 4.0, 4.0], 1.0, in_flight=4) == 2
    assert waiting([4.0], 0.0, in_flight=4) == 1


def test_a_worker_is_not_busy_with_what_still_comes_in_or_waits() -> None:
    phases = {"receive": 9.0, "queue": 9.0, "read": 1.0, "input": 2.0, "forward": 4.0}
    assert busy_s(Timings(phases=phases)) == 7.0


def loaded(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    def load(client: ServerClient) -> Load:
        return Load(
            window_s=60, utilisation=1, running=9, queue=8, expected_wait_s=wait_s, k=3.0, workers=(3.0,)
        )

    monkeypatch.setattr(ServerClient, "load", load)


@pytest.mark.full
def test_a_busy_server_is_planned_with_as_slower(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(monkeypatch, 0.0)
    idle, _ = measured_by(near, data)
    assert idle.cluster.storage.load == 1.0  # k is in the timings already
    loaded(monkeypatch, 1e6)
    busy, job = measured_by(near, data)
    assert busy.cluster.storage.load > 100
    assert "others' work makes micro-batches take" in job.plan.why
    ranks, _ = measured_by(near, data, sampling=upriver.Sampling(rank=0, num_ranks=2))
    assert ranks.cluster.storage.load == 2.0  # the waits are known already


@pytest.mark.full
def test_a_server_that_does_not_tell_its_load_counts_as_idle(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(client: ServerClient) -> Load:
        raise ProtocolError("no such path")

    monkeypatch.setattr(ServerClient, "load", load)
    assert measured_by(near, data)[0].cluster.storage.load == 1.0


# --------------------------------------------------------------------------- servers that refuse at first


def refusing(monkeypatch: pytest.MonkeyPatch, error: UpriverError, times: int) -> list[int]:
    """Make servers refuse the first ``times`` canaries; return the ``stop`` of each canary."""
    asked: list[int] = []
    real = ServerGate.measure

    def measure(gate: ServerGate, server: ServerClient, *, stop: int) -> Any:
        asked.append(stop)
        if len(asked) <= times:
            raise error
        return real(gate, server, stop=stop)

    monkeypatch.setattr(ServerGate, "measure", measure)
    return asked


@pytest.mark.full
@pytest.mark.parametrize("kind", [Overloaded, pytest.param(QuotaExceeded, marks=pytest.mark.full)])
def test_a_job_that_begins_waits_for_room(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch, kind: type[Overloaded]
) -> None:
    asked = refusing(monkeypatch, kind("full", retry_after_s=0.01), 2)
    told: list[str] = []
    _, job = measured_by(near, data, policy="freeze", on_progress=told.append)
    assert len(asked) > 2 and job.plan.cut >= 1
    assert sum(text.startswith("waiting for room at http://") for text in told) == 2
    assert "full" not in job.plan.why


@pytest.mark.full
def test_it_does_not_wait_for_ever(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "FULL_S", 0.0)
    asked = refusing(monkeypatch, Overloaded("full", retry_after_s=1.0), 10**6)
    with near.finetune(frozen_small(), data, batch_size=12, micro_batch=MICRO, policy="hapi") as job:
        assert re.search(r"no server could be used when the job started: http://\S+: full", job.plan.why)
        assert sum(len(targets) for _, targets in job) == len(data)
        assert job.report.samples == {"local": len(data)}
    assert len(asked) == 1


@pytest.mark.full
def test_a_job_that_may_not_ask_goes_on_plainly_and_says_why(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, Forbidden("this dataset is another tenant's"), 10**6)
    for policy in ("hapi", "freeze"):
        with near.finetune(frozen_small(), data, batch_size=12, micro_batch=MICRO, policy=policy) as job:
            assert "this dataset is another tenant's" in job.plan.why
            assert sum(len(targets) for _, targets in job) == len(data)
            assert job.report.samples == {"local": len(data)}
            reasons = {server.reason for server in job.servers}
            assert reasons <= {"", "this dataset is another tenant's"}


# ------------------------------------------------------------------------- a size that the job chooses


def lines(fixed: float) -> Callable[..., dict[Tier, list[tuple[float, float]]]]:
    """Measure stages that cost a set time per call."""

    def measure(self: Any, server: ServerClient, *, repeats: int) -> dict[Tier, list[tuple[float, float]]]:
        return {tier: [(fixed, 1e-4)] * self._parts.freeze for tier in (Tier.STORAGE, Tier.COMPUTE)}

    return measure


@pytest.fixture
def dear_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_size.SecondSize, "measure", lines(0.1))


@pytest.mark.usefixtures("dear_calls")
@pytest.mark.parametrize("options", [{"policy": "freeze"}, pytest.param({"cut": 4}, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_chosen_size_has_the_bits_of_that_size(
    data: Dataset, near: upriver.Near, options: dict[str, Any]
) -> None:
    options |= {"batch_size": 40}
    losses, model, job = run(near, data, micro_batch="auto", epochs=1, **options)
    assert job.state_dict()["micro_batch"] == 32
    assert job.plan.cut >= 1
    assert "low bits" not in job.plan.why and "one size" not in job.plan.why
    assert same((losses, model), run(near, data, micro_batch=32, epochs=1, **options)[:2])
    plain = run(upriver.connect(), data, micro_batch=32, epochs=1, batch_size=40, policy="nosplit")
    assert same((losses, model), plain[:2])


@pytest.mark.usefixtures("dear_calls")
def test_a_fixed_size_is_told_and_kept(data: Dataset, near: upriver.Near) -> None:
    _, job = measured_by(near, data, batch_size=64)
    assert job.state_dict()["micro_batch"] == MICRO
    assert "micro_batch=64 would be predicted" in job.plan.why
    assert "it changes low bits, so it is not done by itself" in job.plan.why


@pytest.mark.full
def test_where_nothing_is_known_of_calls_the_default_is_chosen(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "SHARE", 0.0)
    for asked in ({"policy": "hapi"}, {"cut": 4}):
        with near.finetune(MODEL, data, micro_batch="auto", batch_size=64, **asked) as job:
            assert job.state_dict()["micro_batch"] == 16
            stays = 'micro_batch="auto" stays at 16: stages were measured at one size only'
            assert job.plan.why.endswith(f"{stays}; bit for bit")
    _, fixed = measured_by(near, data, batch_size=64)
    assert "one size only" not in fixed.plan.why


@pytest.mark.usefixtures("dear_calls")
def test_without_a_server_the_default_is_chosen(data: Dataset, near: upriver.Near) -> None:
    with upriver.connect("http://127.0.0.1:9") as nobody:
        for connection, policy in ((nobody, "hapi"), (near, "nosplit")):
            with connection.finetune(MODEL, data, batch_size=64, micro_batch="auto", policy=policy) as job:
                assert job.state_dict()["micro_batch"] == 16
                assert connection.measured is None


@pytest.mark.full
@pytest.mark.usefixtures("dear_calls")
def test_a_model_that_does_not_split_at_the_chosen_size_stays_at_the_default(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session.split

    def at_sixteen(model: Any, example: torch.Tensor, **options: Any) -> Any:
        parts = real(model, example, **options)
        return parts if len(example) == 16 else replace(parts, program=None, why_not="too many")

    monkeypatch.setattr(session, "split", at_sixteen)
    measured, job = measured_by(near, data, micro_batch="auto", batch_size=64)
    assert job.state_dict()["micro_batch"] == 16
    assert not job.why_unsplit
    assert measured.cluster.storage.micro_batch == 16


@pytest.mark.usefixtures("dear_calls")
@pytest.mark.full
def test_a_state_is_taken_up_with_the_size_that_was_chosen(data: Dataset, near: upriver.Near) -> None:
    _, job = measured_by(near, data, micro_batch="auto", batch_size=64, policy="freeze")
    state = job.state_dict()
    with (
        near.finetune(MODEL, data, batch_size=64, policy="freeze") as other,
        pytest.raises(ConfigError, match="micro_batch is 64, this job's 16"),
    ):
        other.load_state_dict(state)
    options = {"batch_size": 64, "micro_batch": state["micro_batch"], "policy": "freeze"}
    with near.finetune(MODEL, data, **options) as same_size:
        same_size.load_state_dict(state)


def test_what_cannot_choose_says_so(data: Dataset, near: upriver.Near) -> None:
    def ask(**options: Any) -> None:
        near.finetune(frozen_small(), data, batch_size=8, micro_batch="auto", **options)

    with pytest.raises(ConfigError, match="must be a whole number with 2 ranks"):
        ask(sampling=upriver.Sampling(rank=0, num_ranks=2))
    placed = [{"epoch": 0, "index": 0, "source": "local", "cut": 0}]
    with pytest.raises(ConfigError, match="replay needs the micro_batch"):
        ask(splitting=upriver.Splitting(replay=placed))
    with pytest.raises(ConfigError, match=r'in 1\.\.65536 or "auto", got \'big\''):
        near.finetune(frozen_small(), data, batch_size=8, micro_batch="big")  # type: ignore[arg-type]
