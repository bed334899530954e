"""Check that a job on an accelerator equals the plain path on that accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.training import BATCH, MICRO, optimizer_of, photos, train
from tests.program.nets import frozen_small
from tests.server.running import running
from upriver.errors import NotExact
from upriver.finetune import session
from upriver.finetune.replanner import StepClock
from upriver.pipeline import Dataset
from upriver.program.graph.devices import moment, seconds_between
from upriver.program.split.split import split
from upriver.rpc.tolerance import COARSER, FLOAT32

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


def trained(near: upriver.Near, data: Dataset, device: str, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return the losses of two epochs on a device, and the job."""
    model = frozen_small().to(device)
    given: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "policy": "freeze"}
    with near.finetune(model, data, **given | options) as job:
        return torch.stack(train(job, model, optimizer_of(model), epochs=2)).cpu(), job


def check_within_tf32(job: Any, losses: torch.Tensor, reference: torch.Tensor) -> None:
    """Check that a job between two devices used its server, and learned the same within its tolerance."""
    assert job.report.exact == "numeric"
    assert job.report.tolerance == COARSER[torch.float16], "an accelerator's convolutions use TF32"
    assert f"within {COARSER[torch.float16]}, since " in job.exactness and "accelerator" in job.exactness
    assert all(source.startswith("http") for source in job.report.samples)
    torch.testing.assert_close(losses, reference, rtol=1e-2, atol=1e-2)


def test_a_trainer_on_an_accelerator_uses_a_server_on_a_cpu(tmp_path: Path) -> None:
    data = photos(tmp_path, 50)
    with upriver.connect(server_threads=1) as near:
        reference, _ = trained(near, data, "cuda", policy="nosplit")
        losses, job = trained(near, data, "cuda")
        check_within_tf32(job, losses, reference)
        with pytest.raises(NotExact, match="accelerator"):
            trained(near, data, "cuda", exact="bitwise")


def test_a_trainer_on_a_cpu_uses_a_server_on_an_accelerator(tmp_path: Path) -> None:
    data = photos(tmp_path, 50)
    with running(tmp_path.as_uri(), device="cuda") as server:
        server.wait_ready()
        with upriver.connect(server.url) as near:
            reference, _ = trained(near, data, "cpu", policy="nosplit")
            losses, job = trained(near, data, "cpu")
            check_within_tf32(job, losses, reference)
            with pytest.raises(NotExact, match="accelerator"):
                trained(near, data, "cpu", exact="bitwise")


def test_convolutions_without_tf32_keep_the_tolerance_of_float32(tmp_path: Path) -> None:
    data, conv = photos(tmp_path, 50), torch.backends.cudnn.conv
    before, conv.fp32_precision = conv.fp32_precision, "ieee"
    rnn = torch.backends.cudnn.rnn
    before_rnn, rnn.fp32_precision = rnn.fp32_precision, "ieee"
    try:
        with upriver.connect(server_threads=1) as near:
            _, job = trained(near, data, "cuda")
            assert job.report.tolerance == FLOAT32
    finally:
        conv.fp32_precision, rnn.fp32_precision = before, before_rnn


def test_steps_of_a_loop_that_waits_for_nothing_count_as_long_as_the_accelerator_takes() -> None:
    clock, busy = StepClock(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    known = []
    for _ in range(3):
        clock.begin()
        began = moment(busy.device)
        for _ in range(50):
            busy = (busy @ busy).clamp(-1, 1)
        ended = moment(busy.device)
        known.append((clock.end(16), seconds_between(began, ended)))
    assert known[0][0] is None
    for (found, _), (_, wanted) in zip(known[1:], known[:-1], strict=True):
        assert found is not None and found[1] == 16
        assert found[0] >= wanted


def test_kept_features_come_back_to_the_accelerator_with_the_same_bits(tmp_path: Path) -> None:
    stages = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
    data = photos(tmp_path, 50).with_stages(stages)
    options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "policy": "nosplit"}
    still = upriver.Sampling(shuffle=False)
    room = upriver.Keep(memory="64 MB", disk=0)
    with upriver.connect().finetune(frozen_small().cuda(), data, sampling=still, keep=room, **options) as job:
        epochs = [[features for features, _ in job] for _ in range(2)]
        assert job.report.samples == {"local": 50, "kept": 50}
    for computed, read in zip(*epochs, strict=True):
        assert read.device.type == "cuda" and read.stride() == computed.stride()
        assert torch.equal(read, computed)


def test_rows_of_an_earlier_freeze_point_give_the_same_bits_on_the_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WORTH_A_PROCESS_S", 0.0)
    stages = (upriver.Decode(), upriver.Resize(16), upriver.CenterCrop(16), upriver.Normalize())
    data = photos(tmp_path / "store", 50).with_stages(stages)
    room = upriver.Keep(memory="64 MB", disk="64 MB", folder=tmp_path / "kept")
    found = []
    for upto, keep in (("block2", None), ("block1", room), ("block2", room)):
        options: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "keep": keep}
        with upriver.connect(server_threads=1).finetune(frozen_small(upto).cuda(), data, **options) as job:
            found.append([features for features, _ in job])
    assert job.report.samples == {"kept": 50}
    assert all(map(torch.equal, found[0], found[2]))
