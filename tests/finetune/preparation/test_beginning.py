"""Check which models begin at once, and that what they do before they are captured changes no bit."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.moving import AtStep
from tests.finetune.training import BATCH, MICRO, grouped, optimizer_of, photos, run, same, train
from tests.program.nets import frozen_small
from tests.server.running import wait_for
from upriver.errors import ConfigError, FrozenChanged, NotExact
from upriver.finetune import session
from upriver.finetune.calibration import server_gate
from upriver.finetune.options import JobOptions
from upriver.finetune.preparation import background, snapshot
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program

NEVER = 10**6
"""More times than a job asks whether its preparation is done."""


class Net(nn.Module):
    """A network whose first two modules are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.b = self.second()
        self.head = nn.Linear(8, 5)
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def second(self) -> nn.Module:
        return nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Draws(Net):
    """Draws numbers before the frozen part ends, and reads them behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape[0], 8)
        return self.head(self.b(self.a(x)).mean((2, 3)) + 0.1 * noise)  # type: ignore[no-any-return]


class Counts(Net):
    """Counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.b(self.a(x)).mean((2, 3))) * (2 if self.calls > 5 else 1)  # type: ignore[no-any-return]


class Rolled(nn.Module):
    """Adds another sample of a micro-batch, of which two samples show nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + y.roll(4, 0)  # type: ignore[no-any-return]


class Mixes(Net):
    def second(self) -> nn.Module:
        return Rolled()


class Largest(nn.Module):
    """Branches on the data of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y / y.abs().max() if x.max() < 1.95 else y  # type: ignore[no-any-return]


class Branches(Net):
    def second(self) -> nn.Module:
        return Largest()


class Scaled(nn.Conv2d):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Attribute(Net):
    def second(self) -> nn.Module:
        return Scaled(8, 8, 3)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> type[AtStep]:
    monkeypatch.setattr(session, "Preparation", AtStep)
    return AtStep


def losses_of(
    near: upriver.Near, data: Dataset, made: Callable[[], nn.Module], **options: Any
) -> list[float]:
    """Return the losses of an epoch; the generator runs on from step to step."""
    model = made()
    optimizer, found = optimizer_of(model), []
    model.train()
    with near.finetune(model, data, **grouped(batch_size=BATCH, micro_batch=MICRO, **options)) as job:
        torch.manual_seed(1)
        for features, targets in job:
            loss = nn.functional.cross_entropy(job(features), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "made", [Draws, *(pytest.param(each, marks=pytest.mark.full) for each in (Counts, Branches))]
)
@pytest.mark.parametrize("asked_before", [2, pytest.param(NEVER, marks=pytest.mark.full)])
@pytest.mark.full
def test_what_a_model_does_before_its_frozen_part_ends_is_done_once_a_step(
    data: Dataset, near: upriver.Near, at_step: type[AtStep], made: Callable[[], nn.Module], asked_before: int
) -> None:
    at_step.asked_before = asked_before
    wanted = losses_of(near, data, made, policy="nosplit")
    assert losses_of(near, data, made, policy="freeze", in_background=True) == wanted


def test_a_frozen_part_that_turns_out_to_mix_samples_ends_the_job(
    data: Dataset, near: upriver.Near, at_step: type[AtStep]
) -> None:
    at_step.asked_before = 2
    with pytest.raises(NotExact, match="the losses so far are not those of the model: samples influence"):
        losses_of(near, data, Mixes, policy="freeze", in_background=True)
    wanted = losses_of(near, data, Mixes, policy="nosplit")
    assert losses_of(near, data, Mixes, policy="freeze", in_background=False) == wanted


@pytest.mark.full
def test_a_program_with_other_bits_is_not_used_without_servers_either(
    data: Dataset, plain: Reference, at_step: type[AtStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary of the other process is unknown then, so the job computes it by the program."""
    run_program = Program.run

    class Wrong(at_step):  # type: ignore[misc, valid-type]
        def result(self) -> Any:
            def wrong(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
                return tuple(value + 1 for value in run_program(*args, **options))

            monkeypatch.setattr(Program, "run", wrong)
            return super().result()

    monkeypatch.setattr(session, "Preparation", Wrong)
    at_step.asked_before = 3
    with upriver.connect("http://127.0.0.1:9") as nowhere:
        losses, model, job = run(nowhere, data, **grouped(policy="freeze", in_background=True))
    assert same((losses, model), plain)
    assert "gives other bits than the model as it is written" in job.plan.why


@pytest.mark.full
def test_a_job_may_be_iterated_in_another_thread(
    data: Dataset, plain: Reference, near: upriver.Near, at_step: type[AtStep]
) -> None:
    at_step.asked_before = NEVER
    model, losses, steps = frozen_small(), [], queue.Queue(2)  # type: ignore[var-annotated]
    optimizer = optimizer_of(model)
    model.train()
    options = grouped(batch_size=BATCH, micro_batch=MICRO, seed=7, policy="freeze", in_background=True)
    with near.finetune(model, data, **options) as job:

        def fill() -> None:
            for _ in range(2):
                for step in job:
                    steps.put(step)
            steps.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        while (step := steps.get()) is not None:
            torch.manual_seed(len(losses))
            loss = nn.functional.cross_entropy(job(step[0]), step[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        thread.join()
    assert same((losses, model), plain)


@pytest.mark.full
def test_a_resumed_job_notices_a_changed_attribute(
    data: Dataset, near: upriver.Near, at_step: type[AtStep]
) -> None:
    at_step.asked_before = NEVER
    model = Attribute()
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=True)
    with near.finetune(model, data, **options) as job:
        job.load_state_dict({**job.state_dict(), "step": 1})

        def change(step: int) -> None:
            model.b.scale = 3.0  # type: ignore[assignment]

        with pytest.raises(FrozenChanged, match="'scale'"):
            train(job, model, optimizer_of(model), after_step=change)


@pytest.mark.full
def test_a_state_of_another_program_is_refused_when_the_program_is_known(
    data: Dataset, near: upriver.Near, at_step: type[AtStep]
) -> None:
    at_step.asked_before = 0
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=True)
    with near.finetune(Attribute(), data, **options) as job:
        assert job.wait_until_split()
        state = job.state_dict()
    other = Attribute()
    other.b.scale = 3.0  # type: ignore[assignment]
    with near.finetune(other, data, **options) as job:
        job.load_state_dict(state)
        with pytest.raises(ConfigError, match="its program is"):
            job.wait_until_split()


def test_ranks_do_not_decide_by_their_time(data: Dataset) -> None:
    def begins(**options: Any) -> bool:
        return JobOptions.checked(rows=range(64), batch_size=8, **grouped(**options)).may_begin

    assert begins()
    assert not begins(rank=0, num_ranks=2)
    assert begins(rank=0, num_ranks=2, in_background=True)


def test_one_server_beyond_the_tolerance_does_not_decide_for_it(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> None:
        raise NotExact("far away")

    monkeypatch.setattr(server_gate.ServerVerifier, "check_canary", never)
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=False)
    with near.finetune(frozen_small(), data, **options) as job:
        assert job.state_dict()["exact"] is None
        assert job.exactness == "bit for bit so far: no server took part"


def test_closing_a_job_does_not_wait_for_servers(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, closed = threading.Event(), threading.Event()

    def slowly(*args: object) -> list[str]:
        asked.set()
        closed.wait()
        return []

    monkeypatch.setattr(session, "Preparation", AtStep)
    monkeypatch.setattr(AtStep, "__init__", background.Preparation.__init__)
    monkeypatch.setattr(near, "_addresses", slowly)
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=True)
    job = near.finetune(frozen_small(), data, **options)
    try:
        assert asked.wait(60)
        job.close()
        assert not closed.is_set()
    finally:
        closed.set()


@pytest.mark.full
def test_a_model_is_prepared_first_where_there_is_no_shared_memory(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(snapshot.os, "memfd_create", none)
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=True)
    with near.finetune(frozen_small(), data, **options) as job:
        assert job.plan.cut == 6
        assert "there is no shared memory: Too many open files" in " ".join(str(job.plan).split())


@pytest.mark.slow
@pytest.mark.full
def test_a_fork_of_the_training_keeps_no_preparing_process(tmp_path: Path) -> None:
    photos(tmp_path, 60)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, time
            import psutil
            import torch
            import upriver

            store = upriver.Store.open({tmp_path.as_uri()!r})
            stages = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
            data = upriver.index(store, "photos", stages=stages)
            near = upriver.connect()
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 8), torch.nn.Linear(8, 5))
            model[1].requires_grad_(False)
            job = near.finetune(model, data, batch_size=20, splitting=upriver.Splitting(in_background=True))
            while not (children := psutil.Process().children()):
                time.sleep(0.01)
            fork = os.fork()
            if fork == 0:
                time.sleep(600)
                os._exit(0)
            print(children[0].pid, fork, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    preparing, fork = map(int, process.stdout.readline().split())
    process.stdout.close()
    process.wait()
    try:
        wait_for(lambda: not psutil.pid_exists(preparing))
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
