"""Check jobs that begin with rows which others kept after an earlier freeze point: no bit differs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import upriver
from tests.finetune.test_kept_features import COUNT, proofs, shards, still_photos
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, png, run, same, train
from tests.program.nets import Small, frozen_small
from upriver.errors import ObjectChanged
from upriver.features import DiskFeatures
from upriver.features.listing import STRETCH_FILE
from upriver.finetune import earlier_rows, session
from upriver.finetune.prefetch.local_source import LocalSource
from upriver.pipeline import Dataset
from upriver.program.split.frozen_name import FrozenName

__all__ = ["proofs"]  # a fixture of this module, too

CHECKED = 14
"""Samples whose features are computed from themselves, before rows of others are used."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let jobs begin before they are captured, and provide the samples that they read from the store."""
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    begun, samples = LocalSource.begun, list[int]()

    def noted(self: LocalSource, ids: tuple[int, ...], stop: int, clock: Any) -> Any:
        samples.extend(ids)
        return begun(self, ids, stop, clock)

    monkeypatch.setattr(LocalSource, "begun", noted)
    return samples


def job_upto(
    upto: str,
    data: Dataset,
    folder: Path,
    *,
    model: Any = None,
    near: upriver.Near | None = None,
    **options: Any,
) -> Any:
    """Run a job whose model is frozen up to a block, and return its result and the closed job."""
    options = {"keep": upriver.Keep(memory="64 MB", disk="64 MB", folder=folder), "epochs": 1, **options}
    model = model or frozen_small(upto)
    with upriver.connect(server_threads=1) if near is None else contextlib.nullcontext(near) as servers:
        losses, model, job = run(servers, data, model=model, **options)
    return (losses, model), job


def plain(upto: str, data: Dataset, *, epochs: int = 1, **options: Any) -> tuple[list[torch.Tensor], Small]:
    losses, model, _ = run(
        upriver.connect(), data, epochs=epochs, model=frozen_small(upto), policy="nosplit", **options
    )
    return losses, model


def test_job_begins_with_the_rows_of_an_earlier_freeze_point(tmp_path: Path, read: list[int]) -> None:
    data = still_photos(tmp_path / "store")
    wanted = plain("block3", data, epochs=3)
    job_upto("block1", data, tmp_path / "kept")
    read.clear()
    got, job = job_upto("block3", data, tmp_path / "kept", epochs=3)
    assert same(got, wanted)
    assert job.report.samples == {"kept": 3 * COUNT}
    assert len(read) == CHECKED
    got, job = job_upto("block3", data, tmp_path / "kept", epochs=3)
    assert same(got, wanted)
    assert job.report.samples == {"kept": 3 * COUNT} and "another job" not in job.plan.why
    listed = DiskFeatures(tmp_path / "kept", budget_bytes=0).entries()
    assert {each.about for each in listed} == {"Small up to block1", "Small up to block3"}


def test_job_that_is_prepared_first_begins_with_the_rows_of_an_earlier_freeze_point(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", float("inf"))
    data = still_photos(tmp_path / "store")
    with upriver.connect(server_threads=1) as near:
        options: dict[str, Any] = {"policy": "freeze", "near": near}
        job_upto("block1", data, tmp_path / "kept", **options)
        got, job = job_upto("block3", data, tmp_path / "kept", epochs=2, **options)
        assert same(got, plain("block3", data, epochs=2))
        assert job.report.samples == {"kept": 2 * COUNT}
        got, job = job_upto("block2", data, tmp_path / "kept", keep=None, **options)
        assert same(got, plain("block2", data)) and "kept" not in job.report.samples


def test_the_last_of_several_freeze_points_is_taken_and_the_others_fill_in(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = dict[str, int]()
    rest = earlier_rows.EarlierRows._from

    def noted(self: Any, boundary: str, ids: Any) -> Any:
        begun[boundary] = begun.get(boundary, 0) + len(ids)
        return rest(self, boundary, ids)

    monkeypatch.setattr(earlier_rows.EarlierRows, "_from", noted)
    some, most = still_photos(tmp_path / "store", COUNT - 20), still_photos(tmp_path / "store", COUNT)
    job_upto("block2", some, tmp_path / "kept")
    job_upto("block1", most, tmp_path / "kept")
    read.clear()
    grown = still_photos(tmp_path / "store", COUNT + 15)
    got, job = job_upto("block3", grown, tmp_path / "kept", epochs=2)
    assert same(got, plain("block3", grown, epochs=2))
    assert job.report.samples == {"local": 15, "kept": COUNT + COUNT + 15}
    assert begun == {"block2": COUNT - 20 + CHECKED, "block1": 20 + CHECKED}


def test_a_later_freeze_point_and_other_frozen_weights_are_not_taken(tmp_path: Path, read: list[int]) -> None:
    data = still_photos(tmp_path / "store")
    job_upto("block3", data, tmp_path / "kept")
    job_upto("block1", data, tmp_path / "kept", model=frozen_small("block1", seed=1))
    read.clear()
    got, job = job_upto("block2", data, tmp_path / "kept")
    assert job.report.samples == {"local": COUNT} and len(read) == COUNT
    assert same(got, plain("block2", data))


def test_views_begin_with_rows_of_the_same_draws(tmp_path: Path, read: list[int]) -> None:
    data, sampling = photos(tmp_path / "store", COUNT), upriver.Sampling(views=2)
    wanted = plain("block2", data, epochs=4, sampling=sampling)
    job_upto("block1", data, tmp_path / "kept", epochs=2, sampling=sampling)
    read.clear()
    got, job = job_upto("block2", data, tmp_path / "kept", epochs=4, sampling=sampling)
    assert same(got, wanted)
    assert job.report.samples == {"kept": 4 * COUNT}
    other, job = job_upto("block2", data, tmp_path / "kept", epochs=1, sampling=sampling, seed=8)
    assert job.report.samples == {"local": COUNT}
    assert same(other, plain("block2", data, sampling=sampling, seed=8))


def test_wrong_rows_of_another_freeze_point_are_not_used(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = still_photos(tmp_path / "store")
    job_upto("block1", data, tmp_path / "kept", model=frozen_small("block1", seed=1))
    [program] = {
        json.loads((path.parent / STRETCH_FILE).read_text())["stretch"]["program"]
        for path in shards(tmp_path / "kept")
    }
    wrong = FrozenName(digest=program, num_stages=1)
    monkeypatch.setattr(earlier_rows, "known_name", lambda digest: wrong)
    got, job = job_upto("block2", data, tmp_path / "kept", epochs=2)
    assert same(got, plain("block2", data, epochs=2))
    assert job.report.samples == {"local": COUNT, "kept": COUNT}
    assert "features kept after 'block1' give others than are computed now" in caplog.text


@pytest.mark.parametrize("damage", ["lost", "truncated"])
def test_rows_that_are_lost_meanwhile_are_computed(tmp_path: Path, read: list[int], damage: str) -> None:
    data = still_photos(tmp_path / "store")
    job_upto("block1", data, tmp_path / "kept")
    written, model = shards(tmp_path / "kept"), frozen_small("block2")

    def after_step(step: int) -> None:
        for path in written if step == 1 else ():
            path.unlink() if damage == "lost" else os.truncate(path, 5000)

    keep = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    with upriver.connect(server_threads=1) as near:
        job = near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, keep=keep)
        losses = train(job, model, optimizer_of(model), epochs=2, after_step=after_step)
    assert same((losses, model), plain("block2", data, epochs=2))
    if damage == "truncated":
        assert job.report.samples["local"] >= COUNT - BATCH - 1


def test_replaced_object_is_an_error_as_in_the_plain_job(tmp_path: Path, read: list[int]) -> None:
    data = still_photos(tmp_path / "store")
    job_upto("block1", data, tmp_path / "kept")
    (tmp_path / "store" / "photos" / "class0" / "000.png").write_bytes(png(77))
    with pytest.raises(ObjectChanged, match=r"000\.png"):
        job_upto("block2", data, tmp_path / "kept")


def test_the_plan_says_that_samples_begin_with_rows_of_another_job(tmp_path: Path, read: list[int]) -> None:
    data = still_photos(tmp_path / "store")
    job_upto("block1", data, tmp_path / "kept")
    model = frozen_small("block2")
    keep = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    with upriver.connect(server_threads=1) as near:
        job = near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, keep=keep)
        assert "another job" not in job.plan.why
        train(job, model, optimizer_of(model))
        assert f"{COUNT} samples began with features that another job kept after 'block1'" in job.plan.why


class Crossing(nn.Module):
    """Read the input and the first layer's result behind the second layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.ReLU(inplace=True))
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(first).relu_()
        third = self.third(second * first)
        return self.head(third + first + x.mean((1, 2, 3), keepdim=True).flatten(1))


def crossing(frozen: int) -> Any:
    torch.manual_seed(3)
    model = Crossing()
    for part in (model.first, model.second, model.third)[:frozen]:
        part.requires_grad_(False)
    return model


def test_several_tensors_and_the_input_may_cross_both_freeze_points(tmp_path: Path, read: list[int]) -> None:
    data = still_photos(tmp_path / "store")
    model = crossing(3)
    losses, _, _ = run(upriver.connect(), data, epochs=2, model=model, policy="nosplit")
    job_upto("", data, tmp_path / "kept", model=crossing(1))
    got, job = job_upto("", data, tmp_path / "kept", epochs=2, model=crossing(3))
    assert same(got, (losses, model))
    assert job.report.samples == {"kept": 2 * COUNT}
