"""Check that a job reuses the measurements of an earlier one: in another process, on the same machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from upriver.dataloader import AutoOffload, DataLoader, dataset
from upriver.dataloader.autotune.offload_tuner import TimedPath
from upriver.errors import ConfigError
from upriver.rpc.local_server import EmbeddedServer

MINE = AutoOffload(model="mine")


def slow(count: int) -> Any:
    return dataset("tests.dataloader.toy_datasets:Slow", count=count)


JOB = """
import json, sys
import torch, upriver

def main():
    url, model, batch_size, whole = sys.argv[1:]
    data = upriver.dataset("tests.dataloader.toy_datasets:Slow", count=1200)
    offload = upriver.AutoOffload(model=model or None)
    loader = upriver.DataLoader(data, batch_size=int(batch_size), workers=[url], seed=1, offload=offload)
    batches = iter(loader)
    next(batches)
    decided_at_once = loader.decided
    total = 1 + sum(1 for _ in batches) if int(whole) else None
    print(json.dumps({"at_once": decided_at_once, "why": loader.why, "batches": total}))

main()
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start_worker(["tests.dataloader"], workers=1) as worker:
        yield worker


def job(
    worker: EmbeddedServer, cache: Path, model: str = "mine", batch_size: int = 2, *, whole: bool = False
) -> dict[str, Any]:
    """Return the findings of a process of its own, over all batches or at the first one."""
    done = subprocess.run(
        [sys.executable, "-c", JOB, worker.url, model, str(batch_size), str(int(whole))],
        env={**os.environ, "UPRIVER_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["batches"] == (1200 // batch_size if whole else None)
    return found


@pytest.mark.slow
@pytest.mark.full
def test_a_second_job_measures_nothing(worker: EmbeddedServer, tmp_path: Path) -> None:
    first = job(worker, tmp_path, whole=True)
    assert not first["at_once"] and "MB/s" in first["why"]
    assert job(worker, tmp_path)["at_once"]


@pytest.mark.full
@pytest.mark.parametrize("other", [{"batch_size": 3}, {"model": ""}, {"model": "another"}])
def test_another_job_measures_again(worker: EmbeddedServer, tmp_path: Path, other: dict[str, Any]) -> None:
    job(worker, tmp_path, whole=True)
    assert not job(worker, tmp_path, **other)["at_once"]


def kept(cache: Path) -> list[set[str]]:
    """Return the names of the figures in each file."""
    return [set(json.loads(file.read_bytes())["figures"]) for file in (cache / "metrics").glob("*.json")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nobody listens", "a wrong path", "not allowed"])
@pytest.mark.full
def test_where_no_worker_could_be_used_that_is_said_and_nothing_of_it_is_kept(
    fault: str, worker: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    with ExitStack() as others:
        match fault:
            case "nobody listens":
                url, said = "http://127.0.0.1:9", "refused"
            case "a wrong path":
                url, said = f"{worker.url}/wrong", "Not Found"
            case _:
                other = others.enter_context(EmbeddedServer.start_worker(["json"], workers=1))
                url, said = other.url, "is not allowed here"
        loader = DataLoader(slow(600), batch_size=2, workers=[url], seed=1, offload=MINE)
        assert len(list(loader)) == 300
    assert loader.why.startswith("nothing is offloaded, as no worker could be used") and loader.decided
    assert url in loader.why and said in loader.why and "MB/s" not in loader.why
    assert loader.offloading is None and loader.report.made == {"here": 600}
    assert kept(tmp_path) and not any("rthp" in figures for figures in kept(tmp_path))


@pytest.mark.slow
@pytest.mark.full
def test_what_is_measured_beside_a_worker_that_is_not_there_is_of_the_other_one(
    worker: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    gone = "http://127.0.0.1:9"
    loader = DataLoader(slow(1000), batch_size=2, workers=[gone, worker.url], seed=1, offload=MINE)
    assert len(list(loader)) == 500
    assert set(loader._measured.rthp) == set(loader._hired.candidates)  # type: ignore[union-attr]
    assert all(timed.exact for timed in loader._measured.timed.values())
    assert gone in loader.report.why_not and gone not in loader.report.made
    assert not any("rthp" in figures for figures in kept(tmp_path)), "it is no news of these two workers"


@pytest.mark.full
def test_what_was_made_here_in_part_is_not_kept(
    worker: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    loader = DataLoader(slow(8), batch_size=2, workers=[worker.url], offload=MINE)
    measured, recall = loader._measured, loader._recall
    assert recall is not None
    recall.begin()
    measured.rthp, measured.ocycles = {"p2": 5.0, "p3": 4.0}, {"p2": 0.5, "p3": 0.4}
    measured.timed = {"p2": TimedPath(), "p3": TimedPath(returned=0.1)}
    recall.keep()
    again = DataLoader(slow(8), batch_size=2, workers=[worker.url], offload=MINE)
    assert again._recall is not None
    again._recall.begin()
    assert again._measured.rthp == {"p2": 5.0}


def test_what_a_model_is_called_or_is(worker: EmbeddedServer) -> None:
    data = dataset("tests.dataloader.toy_datasets:Plain", count=8)
    for model in (3, "", "x" * 201):
        with pytest.raises(ConfigError, match="model"):
            DataLoader(data, workers=[worker.url], offload=AutoOffload(model=model))  # type: ignore[arg-type]
    module = AutoOffload(model=torch.nn.Linear(1, 1))
    assert DataLoader(data, workers=[worker.url], offload=module)._recall is not None
    assert DataLoader(data, offload=AutoOffload(model="alone"))._recall is None
