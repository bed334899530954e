"""Check datasets that the training loop changes: no epoch mixes samples of two states.

The report gives the reason.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.examples import some
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.dataloader.datasets.digests import DatasetSnapshot
from upriver.errors import ConfigError
from upriver.rpc.local_server import EmbeddedServer

COUNT = 16
NAME = "tests.dataloader.datasets.test_digests"


class Blur:
    """A step of a pipeline."""

    def __init__(self) -> None:
        self.radius = 0


class Staged(torch.utils.data.Dataset[Any]):
    """Return samples that hold their number and their stage, wherever the dataset keeps the stage."""

    everywhere: ClassVar[int] = 0
    steps: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.stage = 0
        self.blur, self.pipeline = Blur(), [Blur(), Blur()]
        self.allowed, self.labels, self.weights = [0], np.zeros(COUNT, np.int64), torch.zeros(3)
        self.options: dict[str, Any] = {"stage": 0}
        self.shared = multiprocessing.Value("i", 0)
        self.raw = multiprocessing.RawArray(ctypes.c_int, 2)
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        self.note = self.told = lambda: 0

    def __len__(self) -> int:
        return COUNT

    def set_epoch(self, epoch: int) -> None:
        self.stage = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        stages = [self.stage, self.everywhere, len(self.steps), self.blur.radius, self.pipeline[1].radius]
        stages += [
            len(self.allowed) - 1,
            int(self.labels.sum()),
            int(self.weights.sum()),
            self.options["stage"],
        ]
        stages += [self.shared.value, self.raw[1], int(self.net.weight.sum()), self.told()]
        return torch.tensor([index, sum(stages)])


class Busy(Staged):
    """Change while making samples: open a file, cache samples, and count."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Any = None
        self.kept: dict[int, Any] = {}
        self.calls, self.lock = 0, None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file, self.lock = memoryview(b"x"), threading.Lock()
        self.calls += 1
        return self.kept.setdefault(index, super().__getitem__(index))


def grow(found: list[int], to: int) -> None:
    found += [0] * (to - len(found))


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "set_epoch": lambda data, stage: data.set_epoch(stage),
    "an attribute": lambda data, stage: setattr(data, "stage", stage),
    "one of the dataset within": lambda data, stage: setattr(data.dataset, "stage", stage),
    "of a part of it": lambda data, stage: setattr(data.blur, "radius", stage),
    "of one of several parts": lambda data, stage: setattr(data.pipeline[1], "radius", stage),
    "a list": lambda data, stage: grow(data.allowed, stage + 1),
    "an array": lambda data, stage: data.labels.__setitem__(3, stage),
    "a tensor": lambda data, stage: data.weights.__setitem__(1, stage),
    "a mapping": lambda data, stage: data.options.update(stage=stage),
    "a shared number": lambda data, stage: setattr(data.shared, "value", stage),
    "shared numbers": lambda data, stage: data.raw.__setitem__(1, stage),
    "a module's weight": lambda data, stage: torch.nn.init.constant_(data.net.weight, stage),
    "a function": lambda data, stage: setattr(data, "told", lambda: stage),
    "an attribute of the class": lambda data, stage: setattr(type(data.dataset), "everywhere", stage),
    "a list of the class": lambda data, stage: grow(type(data.dataset).steps, stage),
}


@pytest.fixture(autouse=True)
def classes() -> Iterator[None]:
    yield
    Staged.everywhere = 0
    Staged.steps.clear()


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start_worker(["tests.dataloader"], workers=1)
    yield started
    started.close()


def loader(data: Any, worker: EmbeddedServer | None = None, **more: Any) -> DataLoader:
    if worker is not None:
        more |= {"workers": [worker.url], "offload": Offloading(candidate="p2", ratio=0.5)}
    return DataLoader(data, batch_size=4, seed=3, **more)


def stages(of: DataLoader) -> list[int]:
    return sorted(set(torch.cat(list(of))[:, 1].tolist()))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.full
def test_dataset_changed_between_epochs_is_made_here_with_the_reason(
    worker: EmbeddedServer, change: str
) -> None:
    data = dataset(f"{NAME}:Staged")
    here = loader(data, worker)
    assert stages(here) == [0] and here.report.made == {"here": COUNT // 2, worker.url: COUNT // 2}
    for stage in (1, 2):
        CHANGES[change](data, stage)
        assert stages(here) == [stage]
    assert here.report.made == {"here": COUNT * 2.5, worker.url: COUNT // 2}
    assert "was changed after it had been made" in here.report.why_not[worker.url]
    assert here.why == here.report.why_not[worker.url]


def test_dataset_changed_before_the_loader_is_made_here(worker: EmbeddedServer) -> None:
    data = dataset(f"{NAME}:Staged")
    data.set_epoch(3)
    here = loader(data, worker)
    assert stages(here) == [3] and here.report.made == {"here": COUNT}
    assert "(stage)" in here.report.why_not[worker.url]


def test_dataset_changed_back_is_made_by_workers_again(worker: EmbeddedServer) -> None:
    data = dataset(f"{NAME}:Staged")
    here = loader(data, worker)
    for stage in (0, 1, 0):
        data.set_epoch(stage)
        assert stages(here) == [stage]
    assert here.report.made == {"here": COUNT * 2, worker.url: COUNT} and not here.report.why_not


@pytest.mark.parametrize("looked", [False, True])
def test_dataset_that_making_samples_changes_is_made_by_workers(worker: EmbeddedServer, looked: bool) -> None:
    data = dataset(f"{NAME}:Busy")
    if looked:
        assert data[0].tolist() == [0, 0]
    here = loader(data, worker)
    for _ in range(3):
        assert stages(here) == [0]
    assert here.report.made[worker.url] == 3 * COUNT // 2 and not here.report.why_not
    data.stage = 1
    data.kept.clear()
    stages(here)
    assert "(stage)" in here.report.why_not[worker.url]


def test_changed_dataset_starts_no_workers() -> None:
    data = dataset(f"{NAME}:Staged")
    data.stage = 2
    here = loader(data, workers=1, offload="always")
    assert stages(here) == [2] and "(stage)" in here.report.why_not["workers"]


def test_sampler_told_of_the_epoch_changes_no_dataset(worker: EmbeddedServer) -> None:
    data = dataset(f"{NAME}:Staged")
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=1)
    here, plain = loader(data, worker, sampler=sampler), loader(data, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert torch.equal(torch.cat(list(here)), torch.cat(list(plain)))
    assert here.report.made[worker.url] > 0 and not here.report.why_not


@pytest.mark.parametrize("name", [True, False])
@pytest.mark.parametrize("change", some(1, ["set_epoch", "of a part of it", "a list"]))
def test_changed_dataset_reaches_processes_that_persist(change: str, name: bool) -> None:
    data = dataset(f"{NAME}:Staged")
    here = loader(data if name else data.dataset, num_workers=1, persistent_workers=True, shuffle=True)
    found = []
    for stage in range(3):
        CHANGES[change](data, stage)
        found.append(stages(here))
    assert found == [[0], [1], [2]]


def test_processes_that_persist_go_on_where_nothing_was_changed() -> None:
    here = loader(
        dataset("tests.dataloader.toy_datasets:OfProcess", count=8), num_workers=1, persistent_workers=True
    )
    assert len({int(each) for _ in range(3) for batch in here for each in batch}) == 1


def test_attributes_of_a_named_dataset_are_the_datasets_own() -> None:
    data = dataset(f"{NAME}:Staged")
    data.stage = 5
    assert data.dataset.stage == 5 and data.stage == 5 and data[0].tolist() == [0, 5]
    del data.stage
    assert not hasattr(data.dataset, "stage") and not hasattr(data, "stage")
    data.colour = "red"
    assert data.dataset.colour == "red"
    with pytest.raises(ConfigError, match="name is how workers make the dataset"):
        data.name = "other"
    with pytest.raises(AttributeError, match="nothing"):
        _ = data.nothing


@pytest.mark.parametrize("again", [copy.copy, lambda data: pickle.loads(pickle.dumps(data))])
def test_named_dataset_copied_is_a_named_dataset(again: Callable[[Any], Any]) -> None:
    data = dataset("tests.dataloader.toy_datasets:Noisy", count=4)
    data.count = 3
    other = again(data)
    assert len(other) == 3 and other.name == data.name and other.arguments == {"count": 4}


class Holding:
    """Hold values that pickle cannot represent, among others that it can."""

    def __init__(self) -> None:
        self.inner = Staged()
        self.inner.file = memoryview(b"x")  # type: ignore[attr-defined]
        self.inner.blur.lock = threading.Lock()  # type: ignore[attr-defined]
        self.inner.itself = self  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", CHANGES)
def test_contents_beside_what_pickle_cannot_say_are_compared(change: str) -> None:
    holding: Any = Holding()
    holding.inner.dataset = holding.inner
    contents = DatasetSnapshot(holding.inner)
    assert contents.changed() == []
    CHANGES[change](holding.inner, 2)
    assert contents.changed()
