"""Test the datasets of the benchmark of the input pipeline: real files, the same samples everywhere."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import upriver
from benchmarks.harness.object_server import ObjectServer
from benchmarks.input_pipeline.data import MAKERS, make_data, mean_bytes
from benchmarks.input_pipeline.workloads import CLASSES, DISK_VARIABLE, NAME, SPEECH_RATE, WORKLOADS, Samples
from tests.examples import often, some
from upriver.pipeline.mapstyle import Divided, MapStyle

COUNT, SAMPLES = 6, 24
SHAPES = {
    "R": (3, 224, 224),
    "G": (3, 64, 64),
    "L": (3, 300, 300),
    "T": (1, 193, 1379),
    "C": (1, 129, 2757),
    "S": (1, 8000),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    for kind in MAKERS:
        make_data(folder, kind, COUNT)
    return folder


@pytest.fixture
def disk(root: Path) -> Iterator[str]:
    with ObjectServer(root, bucket="store", host="127.0.0.1", port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{server.url}/store"
        server.shutdown()


def made(data: Samples, index: int, seed: int) -> torch.Tensor:
    random.seed(seed)
    return data[index][0]


@pytest.mark.parametrize("kind", often(MAKERS, "speech", "words"))
def test_files_are_the_same_when_they_are_made_again(root: Path, tmp_path: Path, kind: str) -> None:
    make_data(tmp_path, kind, COUNT)
    ours, theirs = (sorted((folder / kind).iterdir()) for folder in (root, tmp_path))
    assert [path.name for path in ours] == [path.name for path in theirs] and len(ours) == COUNT
    contents = [path.read_bytes() for path in ours]
    assert contents == [path.read_bytes() for path in theirs]
    assert len(set(contents)) == COUNT, "each is another one"
    assert mean_bytes(root, kind) == sum(map(len, contents)) / COUNT


def test_files_have_the_sizes_that_the_page_tells(root: Path) -> None:
    assert mean_bytes(root, "photographs") == pytest.approx(110_000, rel=0.05)
    sizes = [path.stat().st_size - 44 for path in (root / "speech").iterdir()]
    assert all(7.5 <= size / 2 / SPEECH_RATE <= 12.5 for size in sizes)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_samples_are_what_a_model_takes(root: Path, workload: str) -> None:
    data = Samples(str(root), workload, SAMPLES)
    assert len(data) == SAMPLES
    value, target = data[CLASSES + 1]
    assert value.dtype is torch.float32 and tuple(value.shape) == SHAPES[workload] and target == 1
    assert torch.isfinite(value).all() and value.std() > 0


@pytest.mark.parametrize("workload", some(2, WORKLOADS))
def test_what_is_drawn_is_of_the_generator_alone(root: Path, workload: str) -> None:
    data = Samples(str(root), workload, SAMPLES)
    values = [[made(data, index, seed) for seed in range(4)] for index in range(COUNT)]
    assert torch.equal(made(data, 0, 0), values[0][0])
    assert any(not torch.equal(found[0], other) for found in values for other in found[1:])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_reading_and_computing_are_apart(root: Path, workload: str) -> None:
    source = MapStyle(Samples(str(root), workload, SAMPLES), seed=5)
    assert isinstance(source.dataset, Divided)
    raw = source.make(7, epoch=1, sample=7, stop=-1)
    stored = sorted((root / WORKLOADS[workload].kind).iterdir())[7 % COUNT]
    assert bytes(raw[0].numpy()) == stored.read_bytes()
    whole, target = source.make(7, epoch=1, sample=7)
    assert torch.equal(source.make(raw, epoch=1, sample=7, start=-1)[0], whole) and target == 7


def test_another_disk_has_the_same_files(root: Path, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Samples(str(root), "S", SAMPLES)
    monkeypatch.setenv(DISK_VARIABLE, disk)
    there = Samples(str(root), "S", SAMPLES)
    for index in range(COUNT):
        assert torch.equal(here.read(index)[0], there.read(index)[0])


def test_it_is_had_by_its_name(root: Path) -> None:
    named = upriver.dataset(NAME, root=str(root), workload="G", samples=SAMPLES)
    assert isinstance(named.dataset, Samples) and len(named) == SAMPLES
