"""Check that a job works with a window of any size, and that the window follows its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.training import BATCH, MICRO, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from upriver.control.delivery_table import PrefetchWindow
from upriver.pipeline import Dataset
from upriver.types import Cost, Plan, Tier, Timings


@pytest.mark.full
def test_a_window_of_a_single_byte_changes_no_bit(data: Dataset, plain: Reference, near: Any) -> None:
    losses, model, job = run(
        near, data, cut={-4: 0.3, 2: 0.3, 5: 0.4}, prefetch=upriver.Prefetch(window_bytes=1)
    )
    assert job.window == PrefetchWindow(micro_batches=1, num_bytes=1)
    assert same((losses, model), plain)
    assert sum(job.report.samples.values()) == 400


@pytest.mark.full
def test_the_window_follows_a_plan_that_changes(data: Dataset, plain: Reference, near: Any) -> None:
    model = frozen_small()
    with near.finetune(
        model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, cut={-4: 0.1, 2: 0.9}
    ) as job:
        wide = job.window
        job._replanner = scripted = Scripted(job.plan)
        losses = train(job, model, optimizer_of(model), epochs=2)
        assert job.window.micro_batches < wide.micro_batches == 20
        late = {each.cut for each in job.placed if each.epoch == 1}
        assert scripted.steps == 34 and len(job.switches) == 1
    assert late == {2}
    assert same((losses, model), plain)


class Scripted:
    """A replanner that leaves a mix for its last route, once."""

    def __init__(self, plan: Plan) -> None:
        cost = plan.predicted or Cost(epoch_s=1.0, storage_s=1.0, network_s=1.0, compute_s=1.0, bytes=1.0)
        alone = replace(plan, routes=(replace(plan.routes[-1], share=1.0),))
        self.found, self.steps = (alone, cost, cost), 0

    def saw(self, tier: Tier, timings: Timings) -> None:
        pass

    def after_step(self, trained_s: float, samples: int) -> tuple[Plan, Cost, Cost] | None:
        self.steps += 1
        return self.found if self.steps == 5 else None

    def close(self) -> None:
        pass
