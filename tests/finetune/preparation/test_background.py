"""Check real preparing processes: what they prepare, what is left alone, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.training import BATCH, MICRO, grouped, optimizer_of, photos, same, train
from tests.program.nets import frozen_small
from tests.server.running import wait_for
from upriver._torchvision import ensure_torchvision
from upriver.errors import FrozenChanged
from upriver.finetune import session
from upriver.finetune.preparation import background
from upriver.pipeline import Dataset

OPTIONS = grouped(batch_size=BATCH, micro_batch=MICRO, seed=7, policy="freeze", in_background=True)


def preparing(parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the preparing processes of a process."""
    children = (parent or psutil.Process()).children()
    return [each for each in children if "upriver.finetune.preparation.child" in each.cmdline()]


def begun(parent: psutil.Process | None = None) -> psutil.Process:
    """Return the preparing process of a process, as soon as it runs."""
    wait_for(lambda: preparing(parent))
    [process] = preparing(parent)
    return process


@pytest.mark.slow
def test_another_process_prepares_a_job_and_leaves_the_model_and_all_generators_alone(
    data: Dataset, plain: Reference, near: upriver.Near
) -> None:
    model = frozen_small()
    model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]
    drawn = torch.get_rng_state()
    with near.finetune(model, data, **OPTIONS) as job:
        assert "being prepared" in str(job.plan)
        process = begun()
        wait_for(lambda: process.nice() == min(19, psutil.Process().nice() + 15))
        assert os.getsid(process.pid) == os.getsid(0), "a priority counts within a session alone"
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        assert job.wait_until_split(), job.plan.why
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert [parameter._version for parameter in model.parameters()] == versions
        assert not any(parameter.is_shared() for parameter in model.parameters())
        assert job.plan.cut == 6
        assert near.measured is not None
        losses = train(job, model, optimizer_of(model), epochs=2)
        [(source, count)] = job.report.samples.items()
        assert source.startswith("http://127.0.0.1:")
        assert count == 400
    assert same((losses, model), plain)
    process.wait(10)


@pytest.mark.slow
def test_a_job_whose_preparing_process_is_killed_goes_on_as_it_began(
    data: Dataset, plain: Reference, near: upriver.Near
) -> None:
    model = frozen_small()
    with near.finetune(model, data, **OPTIONS) as job:
        process = begun()
        process.kill()
        assert not job.wait_until_split()
        assert "the job goes on as it began: the preparing process ended" in job.plan.why
        losses = train(job, model, optimizer_of(model), epochs=2)
        assert set(job.report.samples) == {"local"}
    assert same((losses, model), plain)


@pytest.mark.slow
def test_closing_a_job_ends_its_preparing_process(data: Dataset, near: upriver.Near) -> None:
    job = near.finetune(frozen_small(), data, **OPTIONS)
    process = begun()
    job.close()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_frozen_weights_that_change_meanwhile_end_the_job(data: Dataset, near: upriver.Near) -> None:
    model = frozen_small()
    with near.finetune(model, data, **OPTIONS) as job:
        model.stem[0].weight.data.add_(1)
        with pytest.raises(FrozenChanged, match="stem"):
            train(job, model, optimizer_of(model))


@pytest.mark.full
def test_a_model_that_does_not_pickle_is_prepared_before_the_first_batch(
    data: Dataset, plain: Reference, near: upriver.Near
) -> None:
    model = frozen_small()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with near.finetune(model, data, **OPTIONS) as job:
        assert not preparing()
        assert (
            "prepared before the first batch, since the model cannot be copied: it does not" in job.plan.why
        )
        losses = train(job, model, optimizer_of(model), epochs=2)
    assert same((losses, model), plain)


@pytest.mark.full
def test_a_memory_store_and_an_emulated_link_are_prepared_before_the_first_batch(
    tmp_path: Path, data: Dataset
) -> None:
    meter = upriver.LinkMeter(1e9)
    with (
        upriver.connect(meter=meter, server_threads=1) as near,
        near.finetune(frozen_small(), data, **OPTIONS) as job,
    ):
        assert not preparing()
        assert job.plan.cut == 6


@pytest.mark.full
def test_a_small_model_is_prepared_before_the_first_batch_unless_it_is_asked_for(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    class Noted(background.Preparation):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(True)
            super().__init__(*args, **options)

    monkeypatch.setattr(session, "Preparation", Noted)
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", float("inf"))
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze")
    near.finetune(frozen_small(), data, **options).close()
    assert not made
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    near.finetune(frozen_small(), data, **options).close()
    assert made


@pytest.mark.slow
@pytest.mark.full
def test_a_model_of_the_users_script_is_prepared_in_another_process(tmp_path: Path) -> None:
    """Its class is in no module that the other process can import, and its top level must not run again."""
    photos(tmp_path, 60)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import torch
            import upriver
            from torch import nn

            print("once")

            class Mine(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = nn.Conv2d(3, 8, 3)
                    self.head = nn.Linear(8, 5)

                def forward(self, x):
                    return self.head(self.first(x).relu().mean((2, 3)))

            model = Mine()
            model.first.requires_grad_(False)
            store = upriver.Store.open({tmp_path.as_uri()!r})
            stages = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
            data = upriver.index(store, "photos", stages=stages)
            options = upriver.Splitting(in_background=True)
            with upriver.connect() as near:
                job = near.finetune(model, data, batch_size=20, splitting=options)
                assert "being prepared" in str(job.plan)
                print(job.wait_until_split(), job.plan.why)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "once"
    assert second.startswith("True "), second


@pytest.mark.slow
@pytest.mark.full
def test_a_model_of_torchvision_is_prepared_in_another_process(data: Dataset, near: upriver.Near) -> None:
    model = ensure_torchvision().models.resnet18(num_classes=5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("fc.")
    with near.finetune(model, data, **OPTIONS) as job:
        assert job.wait_until_split(), job.plan.why
        assert job.plan.cut > 0


@pytest.mark.full
@pytest.mark.slow
def test_a_preparing_process_ends_with_the_process_that_trains(tmp_path: Path) -> None:
    photos(tmp_path, 60)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path.cwd())!r})
            import upriver
            from tests.finetune.training import STAGES
            from tests.program.nets import frozen_small

            store = upriver.Store.open({tmp_path.as_uri()!r})
            data = upriver.index(store, "photos", stages=STAGES)
            options = upriver.Splitting(in_background=True)
            job = upriver.connect().finetune(frozen_small(), data, batch_size=20, splitting=options)
            print("begun", flush=True)
            time.sleep(600)
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "begun\n"
        process = begun(psutil.Process(training.pid))
        os.kill(training.pid, signal.SIGKILL)
    process.wait(30)
