"""What one job has measured, the next one goes by: in another process, on the same machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from upriver.client.embedded import EmbeddedServer
from upriver.dataloader import DataLoader, dataset
from upriver.errors import ConfigError

JOB = """
import json, sys
import torch, upriver

def main():
    url, model, batch_size = sys.argv[1:]
    data = upriver.dataset("tests.dataloader.datasets:Slow", count=1200)
    loader = upriver.DataLoader(data, batch_size=int(batch_size), workers=[url], seed=1, model=model or None)
    made, before = [], 0
    batches = iter(loader)
    next(batches)
    there = loader.report.made.get(url, 0)
    decided_at_once = loader.decided
    total = 1 + sum(1 for _ in batches)
    print(json.dumps({"at_once": decided_at_once, "why": loader.why, "batches": total}))

main()
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start_worker(["tests.dataloader"], workers=1) as worker:
        yield worker


def job(worker: EmbeddedServer, cache: Path, model: str = "mine", batch_size: int = 2) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", JOB, worker.url, model, str(batch_size)],
        env={**os.environ, "UPRIVER_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["batches"] == 1200 // batch_size
    return found


@pytest.mark.slow
def test_a_second_job_measures_nothing(worker: EmbeddedServer, tmp_path: Path) -> None:
    first = job(worker, tmp_path)
    assert not first["at_once"] and "MB/s" in first["why"]
    again = job(worker, tmp_path)
    assert again["at_once"]
    for other in ({"model": "another"}, {"batch_size": 3}, {"model": ""}):
        assert not job(worker, tmp_path, **other)["at_once"], other


def test_what_a_model_is_called_or_is(worker: EmbeddedServer) -> None:
    data = dataset("tests.dataloader.datasets:Plain", count=8)
    for model in (3, "", "x" * 201):
        with pytest.raises(ConfigError, match="model"):
            DataLoader(data, workers=[worker.url], model=model)  # type: ignore[arg-type]
    assert DataLoader(data, workers=[worker.url], model=torch.nn.Linear(1, 1))._recall is not None
    assert DataLoader(data, model="alone")._recall is None
