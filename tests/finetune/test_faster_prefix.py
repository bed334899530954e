"""Check jobs with a faster prefix: the stated error is the real one, and servers give what is made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upriver
from tests.examples import some
from tests.finetune.conftest import Reference
from tests.finetune.training import BATCH, MICRO, grouped, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from upriver.errors import ConfigError, NotExact
from upriver.finetune.calibration.faster_prefix import error_of
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program
from upriver.program.rewrite.faster import PREFIXES
from upriver.program.split.resized import resized
from upriver.rpc.tolerance import INT8, tolerance_of

OPTIONS: dict[str, Any] = {"batch_size": MICRO, "micro_batch": MICRO, "seed": 7}

QUICK_KINDS = [
    pytest.param(kind, marks=pytest.mark.full) if kind == "compiled" else kind for kind in PREFIXES
]
"""Kinds of prefixes, the one that waits for a compiler in the full tests only."""


class Tokens(nn.Module):
    """Patches, two encoder layers, head; input (n, 3, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.BatchNorm2d(16)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.patches(x)).flatten(2).transpose(1, 2)
        return self.head(self.layers(x).mean(1))


def frozen_tokens() -> Tokens:
    """Return `Tokens` with moving statistics, frozen but for its head."""
    torch.manual_seed(0)
    model = Tokens().train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 16, 16))
    for part in (model.patches, model.norm, model.layers):
        part.requires_grad_(False)
    return model


def ran(near: Any, data: Dataset, **options: Any) -> tuple[list[torch.Tensor], nn.Module, Any]:
    """Train `Tokens` for an epoch; return losses, model and the closed job."""
    model = frozen_tokens()
    with near.finetune(model, data, **{**OPTIONS, "batch_size": BATCH, **grouped(**options)}) as job:
        losses = train(job, model, optimizer_of(model))
    return losses, model, job


def first_features(data: Dataset, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return the features of a job's first micro-batch, made here, and the job."""
    model = frozen_tokens()
    with upriver.connect() as near, near.finetune(model, data, policy="nosplit", **OPTIONS, **options) as job:
        features, _ = next(iter(job))
        return features, job


@pytest.mark.parametrize("kind", some(1, QUICK_KINDS))
def test_a_faster_prefix_states_the_error_that_its_features_have(data: Dataset, kind: Any) -> None:
    written, _ = first_features(data)
    faster, job = first_features(data, prefix=kind)
    assert (faster.dtype, faster.stride()) == (written.dtype, written.stride())
    error = float((written - faster).abs().max() / written.abs().max())
    assert 0 < error <= tolerance_of(job.split.program).rtol
    assert job.report.prefix == kind
    assert job.report.prefix_error == pytest.approx(error, rel=1e-6)
    assert f"within {error:.2g} of the largest value of the model as it is written" in job.exactness
    assert f"within {error:.2g} of the largest" in job.plan.why
    assert job.report.exact == "numeric"


@pytest.mark.parametrize(
    "kind", [kind if kind == "int8" else pytest.param(kind, marks=pytest.mark.full) for kind in PREFIXES]
)
def test_servers_give_what_the_plain_way_gives_with_the_same_prefix(
    near: upriver.Near, data: Dataset, kind: Any
) -> None:
    here = ran(upriver.connect(), data, prefix=kind, policy="nosplit")
    for cut in (1, 3):
        there = ran(near, data, prefix=kind, cut=cut)
        assert "local" not in there[2].report.samples
        if kind == "compiled":
            torch.testing.assert_close(torch.stack(there[0]), torch.stack(here[0]), rtol=1e-4, atol=1e-5)
            assert "servers run it as it is" in there[2].plan.why
        else:
            assert same(there[:2], here[:2])


@pytest.mark.full
@pytest.mark.parametrize("kind", [each for each in PREFIXES if each != "int8"])
def test_a_faster_convolutional_prefix_trains_nearly_as_the_model_as_it_is_written(
    near: upriver.Near, data: Dataset, plain: Reference, kind: Any
) -> None:
    losses, _, job = run(near, data, prefix=kind, policy="freeze")
    assert len(job.report.samples) == 1 and "local" not in job.report.samples
    rtol = 1e-4 if kind == "compiled" else 2e-2
    torch.testing.assert_close(torch.stack(losses), torch.stack(plain[0]), rtol=rtol, atol=1e-3)


@pytest.mark.full
def test_features_in_bfloat16_take_half_the_bytes_of_the_link(near: upriver.Near, data: Dataset) -> None:
    jobs = [ran(near, data, prefix=kind, policy="freeze")[2] for kind in (None, "bf16")]
    wide, narrow = (job.report.epoch_bytes[0] for job in jobs)
    assert 0.4 < narrow / wide < 0.7


@pytest.mark.full
def test_the_plan_counts_features_as_they_cross(near: upriver.Near, data: Dataset) -> None:
    def crossing(kind: Any) -> float:
        with near.finetune(frozen_tokens(), data, **OPTIONS, prefix=kind) as job:
            return float(next(row.bytes_per_sample for row in job.plan.table if row.cut == job.split.freeze))

    assert crossing("bf16") == crossing(None) / 2


@pytest.mark.parametrize("kind", ["bf16", pytest.param("int8", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_resumed_job_gives_the_bits_of_one_that_was_not_interrupted(data: Dataset, kind: Any) -> None:
    whole = ran(upriver.connect(), data, prefix=kind, policy="nosplit")
    options = {**OPTIONS, "batch_size": BATCH, "policy": "nosplit", "prefix": kind}
    model = frozen_tokens()
    optimizer, losses = optimizer_of(model), []
    with upriver.connect() as near:
        with near.finetune(model, data, **options) as job:
            for features, targets in job:
                torch.manual_seed(len(losses))
                losses.append(nn.functional.cross_entropy(job(features), targets))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
                if len(losses) == 3:
                    break
            state = job.state_dict()
        assert state["prefix"] == kind
        with near.finetune(model, data, **options) as again:
            again.load_state_dict(state)
            losses += train(again, model, optimizer, first=3)
    assert same((losses, model), whole[:2])


def test_a_state_of_another_prefix_is_refused(data: Dataset) -> None:
    options = {**OPTIONS, "policy": "nosplit"}
    with upriver.connect() as near:
        with near.finetune(frozen_tokens(), data, **options) as job:
            older = {key: value for key, value in job.state_dict().items() if key != "prefix"}
            job.load_state_dict(older)  # of a version without prefixes
        with near.finetune(frozen_tokens(), data, **options, prefix="bf16") as job:
            with pytest.raises(ConfigError, match="its prefix is None, this job's 'bf16'"):
                job.load_state_dict({**older, "program": None, "exact": None})
            with pytest.raises(ConfigError, match="its prefix is 'int8', this job's 'bf16'"):
                job.load_state_dict({**job.state_dict(), "program": None, "prefix": "int8"})


@pytest.mark.full
def test_a_faster_prefix_is_prepared_before_the_first_batch(data: Dataset) -> None:
    options = {**OPTIONS, "prefix": "bf16", "splitting": upriver.Splitting(in_background=True)}
    with upriver.connect() as near, near.finetune(frozen_tokens(), data, **options) as job:
        assert isinstance(job.split.program, Program)
        assert job.wait_until_split(timeout_s=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"exact": "bitwise"}, "exact='bitwise' and prefix='bf16' .* give exact='auto' or 'numeric'"),
        ({"autocast": "bfloat16"}, "autocast='torch.bfloat16' and prefix='bf16' .* Give one of them"),
        ({"autocast": "float16", "prefix": "int8"}, "autocast='torch.float16' and prefix='int8'"),
        ({"prefix": "fp8"}, "prefix must be compiled, bf16, int8, got 'fp8'"),
    ],
)
def test_an_option_that_a_faster_prefix_excludes_is_refused(
    data: Dataset, given: dict[str, Any], words: str
) -> None:
    with upriver.connect() as near, pytest.raises(ConfigError, match=words):
        near.finetune(frozen_tokens(), data, **{**OPTIONS, "prefix": "bf16", **given})


def test_int8_for_convolutions_alone_is_refused(data: Dataset) -> None:
    with upriver.connect() as near, pytest.raises(ConfigError, match="'int8' would change nothing"):
        near.finetune(frozen_small(), data, **OPTIONS, prefix="int8", policy="nosplit")


class Shifted(nn.Module):
    """Add a large number and take it away again: few bits of the features are left in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=4)
        nn.init.constant_(self.first.bias, 1000.0)
        nn.init.constant_(self.second.weight, 1.0)
        nn.init.constant_(self.second.bias, -1000.0)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


def test_features_that_are_too_far_from_the_model_as_it_is_written_are_refused(data: Dataset) -> None:
    torch.manual_seed(0)
    model = Shifted()
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    words = r"with prefix='bf16', features .* are \d.* of the largest value .* at most 0.05 is accepted"
    with upriver.connect() as near, pytest.raises(NotExact, match=words):
        near.finetune(model, data, **OPTIONS, prefix="bf16", policy="nosplit")


def test_features_that_are_not_finite_on_one_side_are_infinitely_far() -> None:
    one, nothing = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert error_of([one], [nothing]) == float("inf")
    assert error_of([torch.arange(3)], [torch.arange(3) + 1]) == float("inf")
    assert error_of([torch.arange(3), 4 * one], [torch.arange(3), 3 * one]) == 0.25


class Centred(nn.Module):
    """Subtract the batch mean, so that samples influence each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(768, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.head(self.first(x - x.mean(0)))


def test_a_model_that_runs_unsplit_says_that_the_prefix_changes_nothing(data: Dataset) -> None:
    model = Centred()
    model.first.requires_grad_(False)
    with upriver.connect() as near, near.finetune(model, data, **OPTIONS, prefix="bf16") as job:
        assert job.why_unsplit
        assert "prefix='bf16' changes nothing, as the model runs unsplit" in job.plan.why
        assert job.report.prefix is None
        assert len(train(job, model, optimizer_of(model))) == len(job)


@pytest.mark.full
def test_the_prefix_at_another_size_is_as_fast_and_has_the_same_weights(data: Dataset) -> None:
    _, job = first_features(data, prefix="int8")
    other = resized(frozen_tokens(), job.split, torch.randn(2 * MICRO, 3, 16, 16))
    assert other.weights_digest == job.split.program.weights_digest
    assert tolerance_of(other) is INT8


@pytest.mark.full
def test_servers_run_several_micro_batches_at_once_with_a_faster_prefix(
    near: upriver.Near, data: Dataset
) -> None:
    here = ran(upriver.connect(), data, prefix="bf16", policy="nosplit", batch_size=2 * MICRO)
    losses, _, job = ran(
        near, data, prefix="bf16", policy="freeze", batch_size=2 * MICRO, adapt_batch=2 * MICRO
    )
    assert f"servers may run {2 * MICRO} samples at once" in job.plan.why
    torch.testing.assert_close(torch.stack(losses), torch.stack(here[0]), rtol=2e-2, atol=1e-3)


@pytest.mark.full
def test_stages_are_measured_at_two_sizes_as_they_run(
    near: upriver.Near, data: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))  # no profile of an earlier job
    budget = "upriver.finetune.calibration.measurement.affordable_repeats"
    monkeypatch.setattr(budget, lambda *args, **kwargs: 1)
    ran(near, data, prefix="bf16")
    assert near.measured is not None and "two sizes" in str(near.measured)
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "other"))
    ran(near, data, prefix="compiled")
    assert "one size" in str(near.measured)  # another one would have to be compiled


@pytest.mark.full
def test_a_job_may_choose_its_micro_batch_with_a_faster_prefix(near: upriver.Near, data: Dataset) -> None:
    options = {"batch_size": 32, "micro_batch": "auto", "prefix": "bf16"}
    with near.finetune(frozen_tokens(), data, **options) as job:
        assert job.split.program is not None
        assert job.split.program.micro_batch == job.state_dict()["micro_batch"]
        assert job.report.prefix_error > 0


@pytest.mark.full
def test_held_out_samples_are_judged_alike_on_servers_and_here(near: upriver.Near, data: Dataset) -> None:
    def judged(connection: Any, **options: Any) -> float:
        given = {**OPTIONS, "prefix": "bf16", **options}
        with connection.finetune(frozen_tokens(), data, **given) as job:
            return float(job.evaluate(data, nn.functional.cross_entropy))

    assert judged(near, policy="freeze") == judged(upriver.connect(), policy="nosplit")


@pytest.mark.full
def test_an_attribute_that_changes_without_effect_leaves_the_job_going(data: Dataset) -> None:
    model = frozen_tokens()
    options = {**OPTIONS, "policy": "nosplit", "prefix": "bf16"}
    with upriver.connect() as near, near.finetune(model, data, **options) as job:
        steps = iter(job)
        features, _ = next(steps)
        job(features)
        model.layers[0].norm_first = 0  # as false as before
        next(steps)
        job(features)


SCRIPT = """
import pathlib, sys
import upriver
from tests.finetune.test_faster_prefix import OPTIONS, frozen_tokens
from tests.finetune.training import optimizer_of, photos, train
data = photos(pathlib.Path(sys.argv[1]), 24)
model = frozen_tokens()
with upriver.connect() as near:
    with near.finetune(model, data, policy="nosplit", prefix="compiled", **OPTIONS) as job:
        print(len(train(job, model, optimizer_of(model))))
        print(job.exactness)
        print(" ".join(str(job.plan).split()))
"""


@pytest.mark.full
def test_without_a_compiler_the_job_says_so_and_goes_on_with_what_is_folded(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CXX": "/nowhere/g++",
        "PATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    steps, exactness, plan = done.stdout.splitlines()
    assert steps == "3"
    for text in (exactness, plan, " ".join(done.stderr.split())):
        assert "not compiled: No working C++ compiler found" in text
