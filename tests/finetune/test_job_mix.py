"""Check that a job over several routes has the bits of the plain path, and the requested shares."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

import pytest
import torch

import upriver
from tests.finetune.conftest import Reference
from tests.finetune.test_job_near import start
from tests.finetune.training import BATCH, MICRO, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from upriver.errors import ConfigError, NoFeasibleCut
from upriver.pipeline import Dataset

MIXES = {
    "here and there": {-4: 0.4, 3: 0.6},
    "three cuts": {1: 0.25, 4: 0.25, 6: 0.5},
    "among the input stages": {-4: 0.2, -3: 0.3, 0: 0.2, 2: 0.3},
    "a single input cut": {-3: 1.0},
    "the model's input": {0: 1.0},
}
OFTEN = ("here and there",)
"""Mixes that `make test` runs."""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in MIXES]
)
def test_losses_and_weights_are_those_of_the_plain_way(
    data: Dataset, plain: Reference, near: upriver.Near, name: str
) -> None:
    shares = MIXES[name]
    losses, model, job = run(near, data, cut=shares)
    assert same((losses, model), plain)
    placed = Counter(-4 if each.source == "local" else each.cut for each in job.placed)
    each_epoch = -(-200 // MICRO)
    assert sum(placed.values()) == 2 * each_epoch
    for cut, share in shares.items():
        assert abs(placed[cut] - 2 * share * each_epoch) <= 2 * max(1, len(shares) - 1)
    assert placed.keys() <= shares.keys()


@pytest.mark.full
def test_samples_arrive_once_and_in_order(data: Dataset, near: upriver.Near) -> None:
    seen = []
    for options in ({"policy": "nosplit"}, {"cut": MIXES["among the input stages"]}):
        model = frozen_small()
        with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=3, **options) as job:
            seen.append([targets.tolist() for _, targets in job])
            assert sum(job.report.samples.values()) == 200
    assert seen[0] == seen[1]
    assert sorted(target for step in seen[0] for target in step) == sorted(data.targets.tolist())


@pytest.mark.full
def test_the_policy_of_mixes_runs_what_it_plans(data: Dataset, plain: Reference, near: upriver.Near) -> None:
    losses, model, job = run(near, data, policy="upriver", replanning=upriver.Replanning(enabled=False))
    assert same((losses, model), plain)
    planned = {route.cut for route in job.plan.routes}
    assert {-4 if each.source == "local" else each.cut for each in job.placed} <= planned
    assert job.plan.predicted is None or job.plan.predicted.epoch_s > 0


@pytest.mark.full
def test_a_job_that_goes_on_planning_runs_what_it_planned(
    data: Dataset, plain: Reference, near: upriver.Near
) -> None:
    losses, model, job = run(
        near, data, policy="upriver", replanning=upriver.Replanning(gain=0.0, patience=1)
    )
    assert same((losses, model), plain)
    assert len(job.placed) == 2 * -(-200 // MICRO)
    last = max((switch.epoch for switch in job.switches), default=-1)
    later = {-4 if p.source == "local" else p.cut for p in job.placed if p.epoch > last}
    assert later <= {route.cut for route in job.plan.routes}


@pytest.mark.full
def test_killing_the_server_in_mid_epoch_changes_no_bit(data: Dataset, plain: Reference) -> None:
    server = start(data, 0)
    with upriver.connect(server.url) as near:
        model = frozen_small()
        with near.finetune(
            model,
            data,
            batch_size=BATCH,
            micro_batch=MICRO,
            seed=7,
            cut={-4: 0.3, 2: 0.4, -2: 0.3},
            prefetch=upriver.Prefetch(window_bytes=1 << 16),
        ) as job:
            losses = train(
                job,
                model,
                optimizer_of(model),
                epochs=2,
                after_step=lambda step: os.kill(server.pid, signal.SIGKILL) if step == 5 else None,
            )
            report = job.report
    server.close()
    assert same((losses, model), plain)
    assert sum(report.samples.values()) == 400
    assert report.samples["local"] > 0.3 * 400


@pytest.mark.full
def test_resuming_deals_the_rest_as_before(data: Dataset, near: upriver.Near) -> None:
    shares = {-4: 0.3, 5: 0.7}
    whole, _, first = run(near, data, cut=shares, epochs=1)
    model = frozen_small()
    options = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "cut": shares}
    with near.finetune(model, data, **options) as job:
        optimizer = optimizer_of(model)
        steps = iter(job)
        losses = []
        for step in range(4):
            features, targets = next(steps)
            torch.manual_seed(step)
            loss = torch.nn.functional.cross_entropy(job(features), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        state = job.state_dict()
    with near.finetune(model, data, **options) as again:
        again.load_state_dict(state)
        losses += train(again, model, optimizer, first=4)
    assert len(losses) == len(whole) and all(map(torch.equal, losses, whole))
    routes = {each.index: (each.source == "local", each.cut) for each in first.placed}
    for each in again.placed:
        assert routes[each.index] == (each.source == "local", each.cut)


@pytest.mark.full
def test_a_mix_is_replayed_at_its_own_cuts(data: Dataset, near: upriver.Near) -> None:
    losses, _, first = run(near, data, cut={-4: 0.3, 2: 0.3, -2: 0.4}, epochs=1)
    again, _, second = run(near, data, splitting=upriver.Splitting(replay=first.placed), epochs=1)
    assert all(map(torch.equal, losses, again))
    assert [(p.index, p.cut, p.source == "local") for p in first.placed] == [
        (p.index, p.cut, p.source == "local") for p in second.placed
    ]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({1: 0.5}, r"cut must have shares that sum to 1, got \{1: 0.5\}"),
        ({}, "cut must have shares that sum to 1"),
        ({1: 0.5, 9: 0.5}, r"cut must lie in -4..6 \(-4 is unsplit\), got 9"),
        ({1: 1.5, 2: -0.5}, r"cut\[2\] must be a finite number > 0, got -0.5"),
        ({1: float("nan")}, r"cut\[1\] must be a finite number"),
        ({"1": 1.0}, "cut must be a whole number, a mapping"),
        ({True: 1.0}, "cut must be a whole number, a mapping"),
        pytest.param(-5, "cut must lie in -4..6", marks=pytest.mark.full),
        ("3", "cut must be a whole number, a mapping"),
    ],
)
def test_shares_that_are_none(data: Dataset, near: upriver.Near, cut: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, cut=cut)  # type: ignore[arg-type]


@pytest.mark.full
def test_a_memory_that_fits_no_cut_is_an_error_that_names_what_is_missing(
    data: Dataset, near: upriver.Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the missing bytes added one cut fits, and the job chooses this cut."""
    has = 1000

    def finetune() -> upriver.FinetuneJob:
        monkeypatch.setattr("upriver.profile.builder.available_bytes", lambda device: has)
        return near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO)

    with pytest.raises(NoFeasibleCut, match=r"does not fit: compute memory is short by \d+ bytes") as caught:
        finetune()
    said = str(caught.value)
    assert "micro-batches of 8 and a training batch of 12, has 1 kB" in said
    [(cut, short)] = re.findall(r"cut (-?\d+), .* short by (\d+) bytes", said)
    has += int(short)
    with finetune() as job:
        assert int(cut) in {row.cut for row in job.plan.table if row.feasible}
        assert all(row.feasible for row in job.plan.table if row.cut in {r.cut for r in job.plan.routes})
        assert not all(row.feasible for row in job.plan.table)
    has -= 1
    with pytest.raises(NoFeasibleCut, match="compute memory is short by 1 bytes"):
        finetune()
