"""Check evaluation on held-out data: the plain path's metric wherever the data lies, every byte counted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, images, optimizer_of, photos, root_of, train
from tests.program.nets import frozen_small
from upriver.errors import ConfigError
from upriver.finetune.job import FinetuneJob
from upriver.pipeline import Dataset, InputStage
from upriver.pipeline.dataset import dataset_paths

SHORT: Sequence[InputStage] = (upriver.Decode(), upriver.CenterCrop(16), upriver.Normalize())
LONG: Sequence[InputStage] = (
    upriver.Decode(),
    upriver.Resize(20),
    upriver.CenterCrop(16),
    upriver.Normalize(),
)
"""One more stage, so that position -3 is after another stage than in ``SHORT``."""

HELD_OUT = 80


@pytest.fixture(scope="module")
def few(data: Dataset) -> upriver.Store:
    """Return the store of ``data``, with other photos in ``few``: one server serves both."""
    return images(root_of(data), HELD_OUT, folder="few")


def outputs_of(job: FinetuneJob, held_out: Dataset) -> torch.Tensor:
    """Return the model's output on every sample, which is finer than any metric."""
    seen: list[torch.Tensor] = []

    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append(outputs.clone())
        return float(torch.nn.functional.cross_entropy(outputs, targets))

    mean_of_all = job.evaluate(held_out, mean)
    return torch.cat([*(rows.flatten() for rows in seen), torch.tensor([mean_of_all])])


def answers(
    near: upriver.Near, data: Dataset, held_out: Dataset, **options: Any
) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the outputs on held-out samples, and how many came from each source."""
    with near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, **options) as job:
        outputs = outputs_of(job, held_out)
        return outputs, dict(job.report.samples)


def plainly(data: Dataset, held_out: Dataset) -> torch.Tensor:
    outputs, samples = answers(upriver.connect(), data, held_out, policy="nosplit")
    assert samples == {"local": len(held_out)}
    return outputs


@pytest.mark.full
def test_held_out_data_in_another_store_is_read_from_here(
    data: Dataset, near: upriver.Near, tmp_path: Path
) -> None:
    held_out = photos(tmp_path, 30).with_stages(SHORT)
    outputs, samples = answers(near, data, held_out, policy="freeze")
    assert torch.equal(outputs, plainly(data, held_out))
    assert samples == {"local": 30}


@pytest.mark.full
def test_a_store_of_another_name_is_another_store(data: Dataset, near: upriver.Near) -> None:
    store = upriver.Store.open(data.store.uri, name="heldout")
    held_out = upriver.index(store, "photos", stages=SHORT)
    outputs, samples = answers(near, data, held_out, policy="freeze")
    assert torch.equal(outputs, plainly(data, held_out))
    assert samples == {"local": 200}


@pytest.mark.full
def test_a_store_that_cannot_be_written_is_read_from_here(near: upriver.Near, tmp_path: Path) -> None:
    store = images(tmp_path, 50)
    data = upriver.index(store, "photos", stages=SHORT)
    held_out = data.with_stages(LONG)
    index_path, _ = dataset_paths(held_out.prefix, held_out.digest)
    folder = (tmp_path / index_path).parent
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"a file where the dataset's folder would be")
    model = frozen_small()
    with near.finetune(model, data, batch_size=BATCH, micro_batch=MICRO, policy="freeze") as job:
        outputs = outputs_of(job, held_out)
        assert job.report.samples == {"local": 50}
        train(job, model, optimizer_of(model))
        assert sum(job.report.samples.values()) == 100
        assert job.report.samples["local"] == 50  # training still asks the server
    assert torch.equal(outputs, plainly(data, held_out))


@pytest.mark.parametrize(
    ("first", "second"), [(SHORT, LONG), pytest.param(LONG, SHORT, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_input_cuts_of_another_chain_are_made_here(
    near: upriver.Near,
    few: upriver.Store,
    first: Sequence[InputStage],
    second: Sequence[InputStage],
) -> None:
    data = upriver.index(few, "few", stages=first)
    held_out = data.with_stages(second)
    mix = {data.chain.start: 0.2, -2: 0.2, -1: 0.2, 0: 0.2, 3: 0.2}
    outputs, samples = answers(near, data, held_out, cut=mix)
    assert torch.equal(outputs, plainly(data, held_out))
    [server] = samples.keys() - {"local"}
    assert samples == {"local": 0.6 * HELD_OUT, server: 0.4 * HELD_OUT}


def test_the_same_chain_keeps_its_input_cuts(near: upriver.Near, few: upriver.Store) -> None:
    data = upriver.index(few, "few", stages=SHORT)
    outputs, samples = answers(near, data, data, cut={-3: 0.2, -2: 0.4, 3: 0.4})
    assert torch.equal(outputs, plainly(data, data))
    assert samples["local"] == 0.2 * HELD_OUT


@pytest.mark.full
def test_a_plan_that_pushes_nothing_down_asks_no_server_about_a_longer_chain(
    near: upriver.Near, few: upriver.Store
) -> None:
    data = upriver.index(few, "few", stages=SHORT)
    held_out = data.with_stages(LONG)
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO}
    with near.finetune(frozen_small(), data, **options, policy="nosplit") as job:
        plain = job.plan
    with near.finetune(frozen_small(), data, **options, policy="freeze") as job:
        job._plan = plain  # as a running job switches to it, with servers in reach
        assert torch.equal(outputs_of(job, held_out), plainly(data, held_out))
        assert job.report.samples == {"local": HELD_OUT}


def test_what_evaluating_reads_from_the_store_is_counted(data: Dataset, tmp_path: Path) -> None:
    held_out = photos(tmp_path, 30).with_stages(SHORT)
    stored = sum(path.stat().st_size for path in (tmp_path / "photos").rglob("*.png"))
    near = upriver.connect()
    with near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO, policy="nosplit") as job:
        before = near.meter.total_bytes
        outputs_of(job, held_out)
        assert near.meter.total_bytes - before == stored


@pytest.mark.full
@pytest.mark.parametrize(
    "absent",
    [
        pytest.param("class0", marks=pytest.mark.full),
        "class2",
        pytest.param("class4", marks=pytest.mark.full),
    ],
)
def test_held_out_data_without_a_class_keeps_the_targets_of_others(
    data: Dataset, near: upriver.Near, few: upriver.Store, absent: str
) -> None:
    root, part = root_of(data), f"without-{absent}"
    shutil.copytree(root / "few", root / part, ignore=shutil.ignore_patterns(absent))
    held_out = upriver.index(few, part, stages=SHORT)
    whole = upriver.index(few, "few", stages=SHORT)
    wanted = [int(t) for t in whole.targets if whole.classes[t] != absent]
    seen: list[torch.Tensor] = []

    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append(targets)
        return 0.0

    with near.finetune(frozen_small(), data, batch_size=BATCH, micro_batch=MICRO) as job:
        job.evaluate(held_out, mean)
        assert torch.cat(seen).tolist() == wanted
        (root / part / absent).mkdir()
        empty = upriver.index(few, part, stages=SHORT, on_left_out="report")
        job.evaluate(empty, mean)
        assert torch.cat(seen).tolist() == 2 * wanted
        (root / part / absent).rmdir()
        (root / part / "class1").rename(root / part / "class9")
        with pytest.raises(ConfigError, match="class 'class9' is none of the 5 classes"):
            job.evaluate(upriver.index(few, part, stages=SHORT), mean)
