"""Check kept features under faults: killed trainers, a disk that is full or gone, small budgets."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import upriver
from tests.finetune.test_kept_features import COUNT, proofs, reference, shards, still_photos
from tests.finetune.training import BATCH, MICRO, optimizer_of, run, same, train
from tests.program.nets import frozen_small
from upriver.pipeline import Dataset

__all__ = ["proofs"]  # a fixture of this module, too

OPTIONS: dict[str, Any] = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, "policy": "nosplit"}


def on_disk(folder: Path) -> int:
    """Return the bytes that a folder takes, in blocks of the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def losses_of(data: Dataset, keep: upriver.Keep, *, epochs: int, after_step: Any) -> Any:
    model = frozen_small()
    with upriver.connect().finetune(model, data, keep=keep, **OPTIONS) as job:
        look = partial(after_step, job=job)
        losses = train(job, model, optimizer_of(model), epochs=epochs, after_step=look)
    return (losses, model), job


def test_memory_stays_within_its_budget_and_losses_are_equal(tmp_path: Path) -> None:
    data = still_photos(tmp_path / "store")
    most = 150_000

    def look(step: int, job: Any) -> None:
        assert job.feed.kept.memory.used_bytes <= most

    got, job = losses_of(data, upriver.Keep(memory=most, disk=0), epochs=3, after_step=look)
    assert same(got, reference(data))
    assert 0 < job.report.samples["kept"] < 2 * COUNT
    assert sum(job.report.samples.values()) == 3 * COUNT


def test_disk_stays_within_its_budget_and_losses_are_equal(tmp_path: Path) -> None:
    data, folder = still_photos(tmp_path / "store"), tmp_path / "kept"
    most = 200_000

    def look(step: int, job: Any) -> None:
        assert on_disk(folder) <= most

    keep = upriver.Keep(memory=0, disk=most, folder=folder)
    got, _ = losses_of(data, keep, epochs=3, after_step=look)
    assert same(got, reference(data))
    assert 0 < on_disk(folder) <= most


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Provide a file system of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k,mode=0700", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_said_once_and_changes_no_bit(
    tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = still_photos(tmp_path / "store")
    (small_disk / "other").write_bytes(bytes(150_000))
    keep = upriver.Keep(memory=0, disk="64 MB", folder=small_disk / "kept")
    with caplog.at_level(logging.WARNING, logger="upriver"):
        got, job = losses_of(data, keep, epochs=3, after_step=lambda step, job: None)
    assert same(got, reference(data))
    assert sum(job.report.samples.values()) == 3 * COUNT
    assert len([record for record in caplog.records if "kept" in record.getMessage()]) <= 1


@pytest.mark.parametrize("how", ["removed", pytest.param("truncated", marks=pytest.mark.full)])
def test_disk_that_is_lost_in_mid_epoch_changes_no_bit(tmp_path: Path, how: str) -> None:
    data, folder = still_photos(tmp_path / "store"), tmp_path / "kept"
    keep = upriver.Keep(memory=0, disk="64 MB", folder=folder)
    run(upriver.connect(), data, epochs=1, keep=keep, policy="nosplit")

    def lose(step: int, job: Any) -> None:
        if step == 2:
            if how == "removed":
                shutil.rmtree(folder)
            for shard in shards(folder) if how == "truncated" else ():
                os.truncate(shard, shard.stat().st_size // 2)

    got, job = losses_of(data, keep, epochs=2, after_step=lose)
    assert same(got, reference(data, epochs=2))
    assert sum(job.report.samples.values()) == 2 * COUNT


SCRIPT = """
import pathlib, sys
import upriver
from tests.finetune.test_kept_faults import OPTIONS
from tests.finetune.training import optimizer_of, train
from tests.finetune.test_kept_features import STILL
from tests.program.nets import frozen_small
import torch
torch.set_num_threads(1)
store, folder = sys.argv[1:]
data = upriver.index(upriver.Store.open(pathlib.Path(store).as_uri()), "photos", stages=STILL)
model = frozen_small()
keep = upriver.Keep(memory="64 MB", disk="64 MB", folder=folder)
with upriver.connect().finetune(model, data, keep=keep, **OPTIONS) as job:
    print("ready", flush=True)
    train(job, model, optimizer_of(model), epochs=50)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_killed_trainer_leaves_only_rows_that_are_right(tmp_path: Path, seed: int) -> None:
    data, folder = still_photos(tmp_path / "store"), tmp_path / "kept"
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        until = time.monotonic() + 60
        while not folder.exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(random.Random(seed).uniform(0, 0.01))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    keep = upriver.Keep(memory="64 MB", disk="64 MB", folder=folder)
    losses, model, job = run(upriver.connect(), data, epochs=2, keep=keep, policy="nosplit")
    assert same((losses, model), reference(data, epochs=2))
    assert sum(job.report.samples.values()) == 2 * COUNT
    assert torch.equal(losses[0], reference(data, epochs=2)[0][0])
