"""Check when a training is too short for a preparation, and the priority that its length allows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import upriver
from tests.examples import often
from tests.finetune.moving import AtStep
from tests.finetune.training import BATCH, MICRO, grouped, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from upriver.finetune import session
from upriver.finetune.job import PACED_STEPS
from upriver.finetune.preparation import horizon
from upriver.finetune.preparation.horizon import FORWARDS, HIGH, LOW, REPAID, START_S, Horizon
from upriver.pipeline import Dataset

LENGTHS = st.floats(1e-3, 1e3), st.integers(1, 512), st.integers(1, 10_000)


@given(*LENGTHS, st.integers(1, 100))
def test_a_training_is_too_short_where_its_frozen_part_takes_less_than_twice_the_preparation(
    outline_s: float, micro_batch: int, micro_batches: int, epochs: int
) -> None:
    length = Horizon.of(
        outline_s, compared=True, micro_batch=micro_batch, micro_batches=micro_batches, epochs=epochs
    )
    pace_s = length.epoch_s / micro_batches
    assert math.isclose(length.preparation_s, START_S + FORWARDS * pace_s)
    assert bool(length.too_short) == (epochs * length.epoch_s <= REPAID * length.preparation_s)
    if micro_batches * epochs <= REPAID * FORWARDS:
        assert length.too_short


@given(*LENGTHS)
def test_an_unknown_length_is_never_too_short_and_counts_as_one_epoch(
    outline_s: float, micro_batch: int, micro_batches: int
) -> None:
    unknown, one = (
        Horizon.of(
            outline_s, compared=True, micro_batch=micro_batch, micro_batches=micro_batches, epochs=epochs
        )
        for epochs in (None, 1)
    )
    assert not unknown.too_short
    assert unknown.niceness == one.niceness


@given(*LENGTHS, st.integers(1, 99))
def test_a_longer_training_has_no_lower_priority(
    outline_s: float, micro_batch: int, micro_batches: int, epochs: int
) -> None:
    shorter, longer = (
        Horizon.of(
            outline_s, compared=True, micro_batch=micro_batch, micro_batches=micro_batches, epochs=each
        )
        for each in (epochs, epochs + 1)
    )
    assert longer.niceness <= shorter.niceness
    assert {longer.niceness, shorter.niceness} <= {HIGH, LOW}
    if shorter.too_short:
        assert shorter.niceness == LOW


STILL = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())

SHORT: dict[str, dict[str, Any]] = {
    "few epochs": {"epochs": 1},
    "kept after one epoch": {"keep": upriver.Keep(memory="64 MB", disk=0)},
    "kept after two views": {"keep": upriver.Keep(memory="64 MB", disk=0), "views": 2},
}
LONG: dict[str, dict[str, Any]] = {
    "nothing is kept": {},
    "no room": {"keep": upriver.Keep(memory="64 kB", disk=0)},
    "new draws in each epoch": {"keep": upriver.Keep(memory="64 MB", disk=0)},
    "kept for others, too": {"keep": upriver.Keep(memory="64 MB", disk=0, store=True)},
}
"""Jobs whose frozen part is computed in few epochs, and in many or unknown ones."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a preparation take very long, by its estimate."""
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    monkeypatch.setattr(horizon, "START_S", 1e6)
    monkeypatch.setattr(session, "Preparation", AtStep)
    monkeypatch.setattr(AtStep, "asked_before", 0)


def begun(near: upriver.Near, data: Dataset, given: dict[str, Any]) -> Any:
    return near.finetune(frozen_small(), data, **grouped(batch_size=BATCH, micro_batch=MICRO, **given))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", often(SHORT, "kept after one epoch"))
@pytest.mark.full
def test_a_job_that_computes_in_few_epochs_is_prepared_only_if_asked(
    data: Dataset, near: upriver.Near, name: str
) -> None:
    data = data if name == "kept after two views" else data.with_stages(STILL)
    with begun(near, data, SHORT[name]) as job:
        assert job.plan.why.startswith("preparing takes about 10000")
        assert f"the {2 if 'two' in name else 1} epoch" in job.plan.why
        list(job)
        assert not job.servers
        assert job.wait_until_split()
        assert job.servers


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", often(LONG, "nothing is kept"))
def test_a_job_that_computes_in_many_epochs_is_prepared_at_once(
    data: Dataset, near: upriver.Near, name: str
) -> None:
    with begun(near, data if "new" in name else data.with_stages(STILL), LONG[name]) as job:
        assert "being prepared" in job.plan.why


@pytest.mark.usefixtures("slow")
@pytest.mark.full
def test_a_job_whose_epochs_take_long_is_prepared_once_its_pace_is_known(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float]()
    monkeypatch.setattr(Horizon, "repaid_by", lambda self, epoch_s: asked.append(epoch_s) or len(asked) > 1)
    model, servers = frozen_small(), list[int]()
    options = grouped(batch_size=BATCH, micro_batch=MICRO, seed=7, **SHORT["kept after one epoch"])
    still = data.with_stages(STILL)
    with near.finetune(model, still, **options) as job:
        losses = train(
            job, model, optimizer_of(model), after_step=lambda step: servers.append(len(job.servers))
        )
    assert servers[:PACED_STEPS] == [0] * PACED_STEPS
    assert servers[-1] == 1
    assert len(asked) == 2
    wanted, trained, _ = run(near, still, epochs=1, policy="nosplit")
    assert same((losses, model), (wanted, trained))


@pytest.mark.usefixtures("slow")
@pytest.mark.full
def test_a_job_whose_rows_are_all_kept_is_not_prepared_any_more(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AtStep, "asked_before", 1000)
    given = {**SHORT["kept after one epoch"], "in_background": True}
    with begun(near, data.with_stages(STILL), given) as job:
        list(job)
        assert "being prepared" in job.plan.why
        list(job)
        assert "the features of all samples are kept" in job.plan.why
