"""Check parts of an indexed dataset, states of other datasets, and code that makes a plain loader of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, SequentialSampler, Subset, random_split
from torch.utils.data import DataLoader as TorchLoader

from tests.dataloader.toy_datasets import Broken, Plain, same
from tests.pipeline.making import encoded, pixels, write
from tests.store.s3_server import S3Server
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.errors import ConfigError, StoreError
from upriver.pipeline import Dataset, Decode, Normalize, RandomResizedCrop, index
from upriver.rpc.local_server import EmbeddedServer
from upriver.store import Store

COUNT = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return indexed(tmp_path_factory.mktemp("parts"), COUNT)


def indexed(folder: Path, count: int, classes: str = "ab") -> Dataset:
    files = {
        f"{classes[each % len(classes)]}/{each:02}.jpg": encoded(pixels(12 + each, 20, each))
        for each in range(count)
    }
    return index(write(folder, files), stages=(Decode(), RandomResizedCrop(8), Normalize()))


PARTS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "a subset": (lambda data: Subset(data, [5, 3, 8]), [5, 3, 8]),
    "of a tensor": (lambda data: Subset(data, torch.tensor([4, 1])), [4, 1]),  # type: ignore[arg-type]
    "of a subset": (lambda data: Subset(Subset(data, range(2, 9)), [6, 0]), [8, 2]),
    "two subsets": (lambda data: ConcatDataset([Subset(data, [1, 2]), Subset(data, [9])]), [1, 2, 9]),
    "twice": (lambda data: ConcatDataset([data, data]), [*range(COUNT), *range(COUNT)]),
    "a subset of two": (lambda data: Subset(ConcatDataset([Subset(data, [7, 6]), data]), [0, 3]), [7, 1]),
    "nothing": (lambda data: Subset(data, []), []),
}


@pytest.mark.parametrize(
    ("name", "num_workers"), [*((name, 0) for name in PARTS), ("of a subset", 1), ("twice", 1)]
)
def test_part_of_an_indexed_dataset_has_the_samples_of_the_whole(
    data: Dataset, name: str, num_workers: int
) -> None:
    make, rows = PARTS[name]
    loader = DataLoader(make(data), batch_size=2, seed=3, num_workers=num_workers)
    whole = {row: batch for row, batch in enumerate(DataLoader(data, seed=3))}
    found = [
        (image, target) for images, targets in loader for image, target in zip(images, targets, strict=True)
    ]
    assert len(found) == len(rows)
    for row, (image, target) in zip(rows, found, strict=True):
        assert torch.equal(image, whole[row][0][0]) and target == whole[row][1][0]


def test_random_split_of_an_indexed_dataset_shuffles_and_goes_on(data: Dataset) -> None:
    def part() -> DataLoader:
        train, _ = random_split(data, [9, 3], generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(2)
        return DataLoader(train, batch_size=2, shuffle=True, seed=3, generator=generator)

    whole = list(part())
    here = part()
    begun = [batch for _, batch in zip(range(2), here, strict=False)]
    there = part()
    there.load_state_dict(here.state_dict())
    assert len(whole) == 5 and same([*begun, *there], whole)


def test_part_of_an_indexed_dataset_is_made_by_servers(data: Dataset) -> None:
    data.publish()
    part = Subset(data, [5, 3, 8, 1, 0])  # type: ignore[arg-type]
    with EmbeddedServer.start({"default": data.store.uri}, workers=1, threads=1) as server:
        more: dict[str, Any] = {"workers": [server.url], "offload": Offloading(candidate="p3")}
        loader = DataLoader(part, batch_size=2, seed=3, **more)
        assert same(list(loader), list(DataLoader(part, batch_size=2, seed=3)))
        assert loader.report.made == {server.url: 5}


class Moved(Subset[Any]):
    """A dataset with its own samples."""

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_part_with_samples_of_its_own_is_refused(data: Dataset) -> None:
    for part in (Moved(data, [1]), Subset(Moved(data, [1]), [0])):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Moved is a Subset with samples of its own"):
            DataLoader(part)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_index_from_the_end_is_the_row_it_stands_for(data: Dataset, num_workers: int) -> None:
    part = Subset(data, [5, -1, 3])  # type: ignore[arg-type, var-annotated]
    for dataset_of, indices, rows in ((data, [-1, -12, 4], [11, 0, 4]), (part, [-2, -3, 1], [11, 5, 11])):
        found = list(DataLoader(dataset_of, sampler=indices, seed=3, num_workers=num_workers))
        assert same(found, list(DataLoader(data, sampler=rows, seed=3)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_index_that_a_part_lacks_takes_its_batchs_place_alone(data: Dataset, num_workers: int) -> None:
    """A mask is no list of indices either: PyTorch would use it as samples 0 and 1."""
    part = Subset(data, [5, 8, 3])  # type: ignore[arg-type, var-annotated]
    batches = iter(DataLoader(part, sampler=[0, 7, 2], seed=3, num_workers=num_workers))
    first = next(batches)
    with pytest.raises(IndexError, match="7 of a Subset of 3"):
        next(batches)
    assert same([first, *batches], list(DataLoader(data, sampler=[5, 3], seed=3)))
    with pytest.raises(IndexError, match="0 of a Subset of 12"):
        list(DataLoader(Subset(data, torch.ones(COUNT, dtype=torch.bool)), num_workers=num_workers))  # type: ignore[arg-type]


def test_state_of_a_part_whose_indices_have_changed_says_so() -> None:
    here = DataLoader(Subset(Plain(9), [1, 2, 3]), seed=3)
    list(here)
    here.dataset.indices[1] = 7
    state = here.state_dict()
    with pytest.raises(ConfigError, match="its dataset is Subset"):
        DataLoader(Subset(Plain(9), [1, 2, 3]), seed=3).load_state_dict(state)
    DataLoader(Subset(Plain(9), np.array([1, 7, 3])), seed=3).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", ["another", "a list"])
def test_parts_of_several_datasets_are_refused(data: Dataset, tmp_path: Path, other: str) -> None:
    more: Any = indexed(tmp_path, 3) if other == "another" else [1, 2]
    with pytest.raises(ConfigError, match="index the samples of all as one dataset"):
        DataLoader(ConcatDataset([data, more]))  # type: ignore[list-item]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pytorchs_own_loader_has_the_samples_of_ours_in_its_first_epoch(
    data: Dataset, num_workers: int
) -> None:
    """Loader processes are forked from this one, which has used stores."""
    for part in (data, *random_split(data, [9, 3], generator=torch.Generator().manual_seed(1))):
        wanted = list(DataLoader(part, batch_size=2, seed=0))
        context = "fork" if num_workers else None
        plain = TorchLoader(part, batch_size=2, num_workers=num_workers, multiprocessing_context=context)
        assert same(list(plain), wanted)


@pytest.mark.full
def test_pytorchs_own_loader_reads_a_far_store_in_processes_that_it_spawns(data: Dataset) -> None:
    with S3Server() as server:
        keys = {"access_key_id": "KEY", "secret_access_key": "SECRET"}
        store = Store.open("s3://bucket/parts", options={"endpoint": server.url, **keys})
        for ref in data.locate(range(COUNT)):
            store.put(ref.object, data.store.get(ref.object))
        far = index(store, stages=data.chain.stages)
        wanted = list(DataLoader(data, batch_size=4, seed=0))
        spawned = TorchLoader(far, batch_size=4, num_workers=2, multiprocessing_context="spawn")
        assert same(list(spawned), wanted)
        forked = TorchLoader(far, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(StoreError, match="start processes by spawn or forkserver"):
            next(iter(forked))


def test_loader_given_to_accelerate_says_how_it_is_used_there() -> None:
    """`Accelerator.prepare_data_loader` asks this first."""
    with pytest.raises(ConfigError, match="Prepare model and optimizer alone"):
        getattr(DataLoader([1, 2]), "_is_accelerate_prepared", False)


class Other(Plain):
    """A dataset as long as another one."""


STATES: dict[
    str, tuple[Callable[[Dataset, Path], DataLoader], Callable[[Dataset, Path], DataLoader], str]
] = {
    "an index of other classes": (
        lambda data, folder: DataLoader(data, seed=3),
        lambda data, folder: DataLoader(indexed(folder, COUNT, "abc"), seed=3),
        "dataset",
    ),
    "other stages": (
        lambda data, folder: DataLoader(data, seed=3),
        lambda data, folder: DataLoader(data.with_stages((Decode(), RandomResizedCrop(9))), seed=3),
        "dataset",
    ),
    "another class": (
        lambda data, folder: DataLoader(Plain(5), seed=3),
        lambda data, folder: DataLoader(Other(5), seed=3),
        "its dataset is Plain, and here Other",
    ),
    "another name": (
        lambda data, folder: DataLoader(dataset("tests.dataloader.toy_datasets:Plain", count=5), seed=3),
        lambda data, folder: DataLoader(dataset("tests.dataloader.toy_datasets:Noisy", count=5), seed=3),
        "its dataset is tests.dataloader.toy_datasets:Plain, and here tests.dataloader.toy_datasets:Noisy",
    ),
    "another part": (
        lambda data, folder: DataLoader(Subset(Plain(5), [0, 1, 2]), seed=3),
        lambda data, folder: DataLoader(Subset(Plain(5), [0, 1, 3]), seed=3),
        "its dataset is Subset",
    ),
    "a part of another one": (
        lambda data, folder: DataLoader(Subset(Plain(5), [0, 1]), seed=3),
        lambda data, folder: DataLoader(Subset(Broken(5, ()), [0, 1]), seed=3),
        "its dataset is Subset",
    ),
    "others in a row": (
        lambda data, folder: DataLoader(ConcatDataset([Plain(2), Other(3)]), seed=3),
        lambda data, folder: DataLoader(ConcatDataset([Other(2), Plain(3)]), seed=3),
        "its dataset is ConcatDataset of Plain, Other",
    ),
    "another order": (
        lambda data, folder: DataLoader(Plain(5), seed=3, shuffle=True),
        lambda data, folder: DataLoader(Plain(5), seed=3),
        "its sampler is RandomSampler, and here SequentialSampler",
    ),
    "a list of batches": (
        lambda data, folder: DataLoader(Plain(4), seed=3, batch_sampler=[[0, 1], [2, 3]]),
        lambda data, folder: DataLoader(
            Plain(4), seed=3, batch_size=None, sampler=SequentialSampler(Plain(4))
        ),
        "its sampler is list, and here SequentialSampler",
    ),
}


@pytest.mark.parametrize("batches", [0, 1, None])
@pytest.mark.parametrize("name", STATES)
def test_state_of_another_dataset_or_sampler_is_refused(
    data: Dataset, tmp_path: Path, name: str, batches: int | None
) -> None:
    """This holds before the first batch and between epochs, too."""
    mine, other, said = STATES[name]
    here, there = mine(data, tmp_path), other(data, tmp_path)
    if batches is None:
        list(here)
    else:
        begun = iter(here)
        for _ in range(batches):
            next(begun)
    before = there.state_dict()
    with pytest.raises(ConfigError, match=said):
        there.load_state_dict(here.state_dict())
    assert there.state_dict() == before
    mine(data, tmp_path).load_state_dict(here.state_dict())
