"""Check when a training is too short for a preparation, and the priority that its length allows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import upriver
from tests.finetune.training import BATCH, MICRO, grouped
from tests.program.nets import frozen_small
from upriver.finetune import session
from upriver.finetune.preparation import horizon
from upriver.finetune.preparation.horizon import FORWARDS, HIGH, LOW, START_S, Horizon
from upriver.pipeline import Dataset

LENGTHS = st.floats(1e-3, 1e3), st.integers(1, 512), st.integers(1, 10_000)


@given(*LENGTHS, st.integers(1, 100))
def test_a_training_is_too_short_where_its_frozen_part_takes_no_longer_than_the_preparation(
    outline_s: float, micro_batch: int, micro_batches: int, epochs: int
) -> None:
    length = Horizon.of(outline_s, micro_batch=micro_batch, micro_batches=micro_batches, epochs=epochs)
    pace_s = length.epoch_s / micro_batches
    assert math.isclose(length.preparation_s, START_S + FORWARDS * pace_s)
    assert bool(length.too_short) == (epochs * length.epoch_s <= length.preparation_s)
    if micro_batches * epochs <= FORWARDS:
        assert length.too_short


@given(*LENGTHS)
def test_an_unknown_length_is_never_too_short_and_counts_as_one_epoch(
    outline_s: float, micro_batch: int, micro_batches: int
) -> None:
    unknown, one = (
        Horizon.of(outline_s, micro_batch=micro_batch, micro_batches=micro_batches, epochs=epochs)
        for epochs in (None, 1)
    )
    assert not unknown.too_short
    assert unknown.niceness == one.niceness


@given(*LENGTHS, st.integers(1, 99))
def test_a_longer_training_has_no_lower_priority(
    outline_s: float, micro_batch: int, micro_batches: int, epochs: int
) -> None:
    shorter, longer = (
        Horizon.of(outline_s, micro_batch=micro_batch, micro_batches=micro_batches, epochs=each)
        for each in (epochs, epochs + 1)
    )
    assert longer.niceness <= shorter.niceness
    assert {longer.niceness, shorter.niceness} <= {HIGH, LOW}
    if shorter.too_short:
        assert shorter.niceness == LOW


def test_a_job_of_few_epochs_is_left_alone_and_its_plan_says_so(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    monkeypatch.setattr(horizon, "START_S", 1e6)
    options = grouped(batch_size=BATCH, micro_batch=MICRO, epochs=1)
    with near.finetune(frozen_small(), data, **options) as job:
        assert not job.wait_until_split()
        assert job.plan.why.startswith("preparing takes about 10000")
        assert "the frozen part of 1 epoch about " in job.plan.why
        assert not job.servers
