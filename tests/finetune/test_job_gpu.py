"""Check that a job on an accelerator equals the plain path on that accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, train
from tests.program.nets import frozen_small
from upriver.program.split.split import split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


def test_a_model_on_an_accelerator_is_cut_and_proved_there() -> None:
    model = frozen_small().cuda()
    parts = split(model, torch.randn(MICRO, 3, 16, 16, device="cuda"))
    assert parts.program is not None, parts.why_not
    assert parts.program.device.type == "cuda"


def test_training_straight_from_the_store_is_repeatable(tmp_path: Path) -> None:
    data = photos(tmp_path, 50)
    runs = []
    for _ in range(2):
        model = frozen_small().cuda()
        with upriver.connect().finetune(
            model, data, batch_size=BATCH, micro_batch=MICRO, seed=7, policy="nosplit"
        ) as job:
            features, targets = next(iter(job))
            assert features.device.type == targets.device.type == "cuda"
            runs.append(train(job, model, optimizer_of(model)))
    torch.testing.assert_close(torch.stack(runs[0]), torch.stack(runs[1]), rtol=1e-4, atol=1e-5)


def test_a_server_on_a_cpu_gives_a_numeric_job_and_no_bitwise_one(tmp_path: Path) -> None:
    data = photos(tmp_path, 50)
    with upriver.connect(server_threads=1) as near:
        for exact, sources in (("bitwise", "local"), ("numeric", "http")):
            model = frozen_small().cuda()
            with near.finetune(
                model, data, batch_size=BATCH, micro_batch=MICRO, policy="freeze", exact=exact
            ) as job:
                train(job, model, optimizer_of(model))
                assert all(source.startswith(sources) for source in job.report.samples)
