"""Check that a job which begins the plain way and moves over changes no bit, whenever it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import upriver
from tests.examples import examples
from tests.finetune.conftest import Reference
from tests.finetune.moving import AtStep
from tests.finetune.training import BATCH, MICRO, grouped, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from upriver.finetune import session
from upriver.finetune.job import FinetuneJob
from upriver.pipeline import Dataset

EPOCHS, STEPS = 2, 17
"""Epochs of a run, and training steps of each."""

ASKED = EPOCHS * (STEPS + 1)
"""Times that a job of these epochs asks whether its preparation is done."""

FEW = settings(
    max_examples=examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Preparation", AtStep)


@pytest.fixture(scope="module")
def half(data: Dataset) -> Iterator[Reference]:
    """Losses and model of the plain way under autocast."""
    losses, model, _ = run(upriver.connect(), data, policy="nosplit", autocast="bfloat16")
    yield losses, model


def begun(near: upriver.Near, data: Dataset, at: int, **options: Any) -> tuple[Any, Any, FinetuneJob]:
    AtStep.asked_before = at
    return run(near, data, **grouped(in_background=True, **options))


@FEW
@given(at=st.integers(0, ASKED), options=st.sampled_from([{"policy": "freeze"}, {"cut": 2}, {"cut": -1}, {}]))
def test_losses_and_weights_are_those_of_the_plain_way_whenever_the_job_moves_over(
    data: Dataset, plain: Reference, near: upriver.Near, at: int, options: dict[str, Any]
) -> None:
    losses, model, job = begun(near, data, at, **options)
    assert same((losses, model), plain)
    [*local, last] = sorted(job.report.samples)
    if options and at == 0:
        assert last.startswith("http://")
        assert not local
    if at == ASKED:
        assert last == "local"
        assert "not captured yet" in job.plan.why


@pytest.mark.full
@pytest.mark.parametrize("at", range(ASKED))
def test_no_step_is_one_at_which_moving_over_changes_a_bit(
    data: Dataset, plain: Reference, near: upriver.Near, at: int
) -> None:
    losses, model, _ = begun(near, data, at, policy="freeze")
    assert same((losses, model), plain)


@pytest.mark.full
@FEW
@given(at=st.integers(0, ASKED))
def test_autocast_is_the_same_on_both_sides_of_the_move(
    data: Dataset, half: Reference, near: upriver.Near, at: int
) -> None:
    losses, model, _ = begun(near, data, at, policy="freeze", autocast="bfloat16")
    assert same((losses, model), half)


@pytest.mark.full
@FEW
@given(at=st.integers(0, STEPS + 1), left=st.integers(1, STEPS), again=st.integers(0, STEPS + 1))
def test_a_job_resumes_before_at_and_after_the_move(
    data: Dataset, plain: Reference, near: upriver.Near, at: int, left: int, again: int
) -> None:
    """The first job ends after some steps, moved over or not; the second one moves over when it likes."""
    model = frozen_small()
    optimizer = optimizer_of(model)
    options = grouped(batch_size=BATCH, micro_batch=MICRO, seed=7, policy="freeze", in_background=True)
    losses: list[torch.Tensor] = []

    AtStep.asked_before = at
    with near.finetune(model, data, **options) as job:
        model.train()
        for features, targets in job:
            torch.manual_seed(len(losses))
            loss = torch.nn.functional.cross_entropy(job(features), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == left:
                break
        state = copy.deepcopy(job.state_dict())
    AtStep.asked_before = again
    with near.finetune(model, data, **options) as job:
        job.load_state_dict(state)
        losses += train(job, model, optimizer, epochs=2 if left < STEPS else 1, first=left)
    assert same((losses, model), plain)


@pytest.mark.full
def test_a_replay_needs_its_servers_at_once_and_is_prepared_before_the_first_batch(
    data: Dataset, plain: Reference, near: upriver.Near
) -> None:
    losses, model, job = begun(near, data, 5, policy="freeze")
    again, twin, replayed = begun(near, data, ASKED, replay=job.placed)
    assert same((losses, model), plain)
    assert same((again, twin), plain)
    assert replayed.placed == job.placed


def test_a_program_with_other_bits_is_never_used(
    data: Dataset, plain: Reference, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference of the other process differs in one bit from what the job computed."""

    class Wrong(AtStep):
        def result(self) -> Any:
            assert self.reference is not None
            self.reference.tensors[0].view(-1)[0] += 1
            return super().result()

    monkeypatch.setattr(session, "Preparation", Wrong)
    losses, model, job = begun(near, data, 3, policy="freeze")
    assert same((losses, model), plain)
    assert set(job.report.samples) == {"local"}
    assert "gives other bits than the model as it is written" in job.plan.why


@pytest.mark.full
def test_settings_that_change_meanwhile_are_noticed(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    AtStep.asked_before = 2
    model, threads = frozen_small(), torch.get_num_threads()
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=True)
    try:
        with near.finetune(model, data, **options) as job:
            torch.set_num_threads(threads + 1)
            train(job, model, optimizer_of(model))
            assert set(job.report.samples) == {"local"}
            assert "settings that low bits depend on changed" in job.plan.why
    finally:
        torch.set_num_threads(threads)


@pytest.mark.full
def test_evaluation_before_and_after_the_move_gives_the_same(data: Dataset, near: upriver.Near) -> None:
    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(outputs, targets))

    AtStep.asked_before = 1
    options = grouped(batch_size=BATCH, micro_batch=MICRO, policy="freeze", in_background=True)
    with near.finetune(frozen_small(), data, **options) as job:
        before = job.evaluate(data, metric)
        assert job.wait_until_split()
        assert job.evaluate(data, metric) == before
        assert any(source.startswith("http://") for source in job.report.samples)
