"""Check the loader against PyTorch's: the same order and batches; random draws belong to the sample."""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

from tests.dataloader.toy_datasets import Broken, Buckets, Divided, Mute, Noisy, Plain, mute_rows, same
from tests.examples import some
from upriver.dataloader import DataLoader
from upriver.errors import ConfigError, DatasetError

ARGUMENTS: dict[str, dict[str, Any]] = {
    "by default": {},
    "batches": {"batch_size": 4},
    "shuffled": {"batch_size": 4, "shuffle": True},
    "whole batches": {"batch_size": 5, "shuffle": True, "drop_last": True},
    "a sampler": {"batch_size": 3, "sampler": range(20, 2, -3)},
    "with replacement": {"batch_size": 3, "sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 11)},
    "a batch sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(23)), 6, False)},
    "batches of several sizes": {"batch_sampler": [[3], [1, 2], [0, 5, 7, 22]]},
    "one by one": {"batch_size": None},
    "one by one, shuffled": {"batch_size": None, "sampler": RandomSampler(range(23))},
    "collated by the user": {"batch_size": 4, "collate_fn": list},
}
OFTEN = ("shuffled", "one by one, shuffled")
"""Those that `make test` tries with loader processes."""


class Drawing(Buckets):
    """Make the same samples, one by one."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(self.count).tolist())


def epochs(loader: Any, count: int = 2) -> list[list[Any]]:
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        *((name, 0) for name in ARGUMENTS),
        *((name, 2) for name in ARGUMENTS if name in OFTEN),
        *(pytest.param(name, 2, marks=pytest.mark.full) for name in ARGUMENTS if name not in OFTEN),
    ],
)
def test_the_batches_of_pytorchs_loader_in_its_order(name: str, num_workers: int) -> None:
    arguments = ARGUMENTS[name]
    torch.manual_seed(7)
    theirs = epochs(TorchLoader(Plain(), num_workers=num_workers, **arguments))
    after = torch.rand(1)
    torch.manual_seed(7)
    loader = DataLoader(Plain(), num_workers=num_workers, **arguments)
    ours = epochs(loader)
    assert same(ours, theirs)
    assert torch.equal(torch.rand(1), after)  # as many numbers were drawn
    assert isinstance(loader, TorchLoader) and len(loader) == len(theirs[0])


def test_a_generator_of_the_users_decides_as_in_pytorchs_loader() -> None:
    def shuffled(kind: Any) -> list[list[Any]]:
        generator = torch.Generator().manual_seed(3)
        return epochs(kind(Plain(), batch_size=4, shuffle=True, generator=generator))

    assert same(shuffled(DataLoader), shuffled(TorchLoader))


DRAWING = pytest.mark.parametrize(
    "dataset", [pytest.param(Noisy(), marks=pytest.mark.full), Divided()], ids=["one step", "divided"]
)


def drawn(dataset: Any, **arguments: Any) -> list[list[Any]]:
    torch.manual_seed(11)
    return epochs(DataLoader(dataset, batch_size=4, seed=5, shuffle=True, **arguments))


@DRAWING
@pytest.mark.parametrize(
    "arguments",
    some(
        1,
        [
            {"num_workers": 2},
            {"num_workers": 1},
            {"num_workers": 1, "multiprocessing_context": "spawn"},  # each imports PyTorch
            {"num_workers": 2, "prefetch_factor": 7},
        ],
    ),
    ids=str,
)
def test_what_is_drawn_belongs_to_the_sample(dataset: Any, arguments: dict[str, Any]) -> None:
    inline = drawn(dataset)
    assert same(drawn(dataset, **arguments), inline)
    assert not same(inline[0], inline[1])


@DRAWING
def test_persistent_processes_draw_as_new_ones_do_but_for_the_order_of_a_second_epoch(dataset: Any) -> None:
    inline = drawn(dataset)
    # PyTorch draws nothing for persistent processes: the order of the second epoch is another one.
    persistent = drawn(dataset, num_workers=2, persistent_workers=True)
    assert same(persistent[0], inline[0]) and not same(persistent[1], inline[1])


def samples(seed: int, *, epoch: int = 0, **arguments: Any) -> dict[int, Any]:
    loader = DataLoader(Noisy(), batch_size=None, seed=seed, **arguments)
    loader.epoch = epoch
    return {each["index"]: each for each in loader}


def test_a_sample_is_the_same_whatever_the_order_and_another_with_another_seed_or_epoch() -> None:
    straight = samples(1)
    assert same(samples(1, sampler=range(22, -1, -1)), dict(sorted(straight.items(), reverse=True)))
    for other in (samples(2), samples(1, epoch=1)):
        for index, sample in straight.items():
            for drawn in ("torch", "numpy", "python"):
                assert not same(sample[drawn], other[index][drawn])
    values = [float(sample["python"]) for sample in straight.values()]
    assert len(set(values)) == len(values)


def test_an_epoch_can_be_had_again() -> None:
    loader = DataLoader(Noisy(), batch_size=4, seed=1)
    first, second = epochs(loader)
    assert loader.epoch == 2
    loader.epoch = 1
    assert same(list(loader), second) and not same(first, second)


def test_the_seed_is_pytorchs_where_none_is_given() -> None:
    torch.manual_seed(123)
    assert DataLoader(Plain()).seed == 123
    assert DataLoader(Plain(), seed=4).seed == 4


def test_the_generators_of_the_training_process_go_on_as_if_nothing_had_been_drawn() -> None:
    def drawn(dataset: Any) -> tuple[float, float, float]:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        for _ in DataLoader(dataset, batch_size=4, seed=2):
            pass
        return float(torch.rand(1)), float(np.random.rand()), random.random()

    assert drawn(Noisy()) == drawn(Plain())


def chance_in_collating(rows: list[Any]) -> torch.Tensor:
    return torch.rand(2) + len(rows)


def test_what_collating_draws_belongs_to_the_batch() -> None:
    def made(num_workers: int) -> list[list[Any]]:
        return epochs(
            DataLoader(Plain(), batch_size=4, seed=5, num_workers=num_workers, collate_fn=chance_in_collating)
        )

    inline = made(0)
    assert same(made(2), inline)
    assert len({float(batch[0]) % 1 for epoch in inline for batch in epoch}) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_dataset_raises_takes_its_batchs_place(num_workers: int) -> None:
    loader = DataLoader(Broken(12, {5, 11}), batch_size=2, num_workers=num_workers)
    batches, raised = [], []
    iterator = iter(loader)
    for _ in range(6):
        try:
            batches.append(next(iterator)[1].tolist())
        except LookupError as error:
            raised.append(str(error))
    with pytest.raises(StopIteration):
        next(iterator)
    assert batches == [[0, 1], [2, 3], [6, 7], [8, 9]]
    assert ["sample 5 is gone" in raised[0], "sample 11 is gone" in raised[1]] == [True, True]
    assert len(raised) == 2


def told(error: BaseException) -> str:
    """Return the formatted traceback with all causes."""
    return "\n".join(traceback.format_exception(error))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_raised_carries_the_sample(num_workers: int) -> None:
    loader = DataLoader(Mute(12, {5, 9}), batch_size=4, sampler=range(11, -1, -1), num_workers=num_workers)
    loader.epoch = 1
    iterator = iter(loader)
    for number in (9, 5):
        with pytest.raises(ValueError, match="bad") as caught:
            next(iterator)
        assert f"raised for sample {number} of epoch 1" in told(caught.value)
    assert next(iterator)[1].tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_raised_where_a_batch_is_collated_carries_its_number(num_workers: int) -> None:
    loader = DataLoader(Plain(12), batch_size=4, collate_fn=mute_rows, num_workers=num_workers)
    iterator = iter(loader)
    for number in range(3):
        with pytest.raises(ValueError, match="bad") as caught:
            next(iterator)
        assert f"raised where batch {number} of epoch 0 was collated" in told(caught.value)


def test_an_error_that_is_raised_again_and_again_does_not_grow() -> None:
    class Same(Plain):
        error = ValueError("bad")

        def __getitem__(self, index: int) -> Any:
            raise self.error

    loader = DataLoader(Same(1))
    for epoch in (0, 0, 1):
        loader.epoch = epoch
        with pytest.raises(ValueError, match="bad"):
            list(loader)
    assert Same.error.__notes__ == ["raised for sample 0 of epoch 0", "raised for sample 0 of epoch 1"]


def test_keys_that_are_no_numbers_are_named() -> None:
    loader = DataLoader({"a": 1}, sampler=["a", "b" * 1000], batch_size=None)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError) as caught:
        next(iterator)
    (note,) = caught.value.__notes__
    assert note.startswith("raised for sample 'bbb") and len(note) < 130


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_epochs_side_by_side(num_workers: int) -> None:
    loader = DataLoader(Noisy(), batch_size=4, seed=1, num_workers=num_workers)
    whole = epochs(loader)
    loader.epoch = 0
    pairs = list(zip(loader, loader, strict=True))
    assert same([one for one, _ in pairs], whole[0]) and same([two for _, two in pairs], whole[1])


@pytest.mark.parametrize("persistent", some(1, [True, False]))
def test_an_epoch_that_is_left_early_does_not_show_in_the_next(persistent: bool) -> None:
    loader = DataLoader(Noisy(40), batch_size=4, seed=1, num_workers=2, persistent_workers=persistent)
    reference = epochs(DataLoader(Noisy(40), batch_size=4, seed=1))
    assert same(next(iter(loader)), reference[0][0])
    assert same(list(loader), reference[1])


def test_a_dataset_needs_no_length_where_a_sampler_says_what_there_is() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    assert [batch.tolist() for batch in DataLoader(Endless(), batch_size=2, sampler=[4, 1, 9])] == [
        [4, 1],
        [9],
    ]


def test_what_cannot_be_is_refused_by_name() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    for arguments, says in (
        ({"dataset": Stream()}, "IterableDataset"),
        ({"dataset": {1, 2}}, "set has no samples by index"),
        ({"dataset": Plain(), "timeout": 5}, "timeout is .* num_workers is 0; got 5"),
        ({"dataset": Plain(), "seed": -1}, "seed must be a whole number"),
        ({"dataset": Plain(), "seed": 1.5}, "got 1.5"),
        ({"dataset": Plain(), "seed": True}, "got True"),
        ({"dataset": Plain(), "seed": 2**63}, "seed must be"),
    ):
        with pytest.raises(ConfigError, match=says):
            DataLoader(**arguments)
    loader = DataLoader(Plain())
    loader.epoch = -1
    with pytest.raises(ConfigError, match=r"epoch must be .* got -1"):
        iter(loader)
    with pytest.raises(ValueError, match="num_workers"):
        DataLoader(Plain(), num_workers=-1)


class Listed(Plain):
    """Make samples by lists of indices, and other samples by single indices."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [100 * index + torch.rand(2) for index in indices]


class Rowed(Plain):
    """Make a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices), torch.tensor(indices)


def as_it_is(rows: Any) -> Any:
    return rows


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dataset_that_is_asked_by_lists_gives_these_samples(num_workers: int) -> None:
    for data, rows in ((Listed(7), range(7)), (Subset(Listed(9), [5, 2, 8]), [5, 2, 8])):
        ours, again, torchs = (
            list(loader)
            for loader in (
                DataLoader(data, 3, seed=2, num_workers=num_workers),
                DataLoader(data, 3, seed=2),
                TorchLoader(data, 3),
            )
        )
        assert same(ours, again)
        for found in (ours, torchs):
            assert (torch.cat(found) // 100).tolist() == [[row, row] for row in rows]
    single = [DataLoader(Listed(7), None), TorchLoader(Listed(7), None)]
    assert same(*map(list, single))  # by single indices where there are no batches


def test_dataset_that_makes_whole_batches_is_refused_by_name() -> None:
    assert len(list(TorchLoader(Rowed(4), 2, collate_fn=as_it_is))) == 2
    with pytest.raises(
        DatasetError, match=r"Rowed\.__getitems__ must return a list with one sample for each index"
    ):
        list(DataLoader(Rowed(4), 2, collate_fn=as_it_is))


class Own(DataLoader):
    """Define its own batches, as PyTorch's loader allows."""

    @property
    def _index_sampler(self) -> Any:
        return [[0], [2, 1]]


def test_loader_derived_from_ours_may_say_what_its_batches_are() -> None:
    batches = iter(Own([10, 11, 12], batch_size=3))
    assert len(batches) == 2  # type: ignore[arg-type]
    assert [batch.tolist() for batch in batches] == [[10], [12, 11]]


def test_timeout_that_is_set_without_processes_is_refused() -> None:
    loader = DataLoader([1, 2, 3])
    loader.timeout = 5
    with pytest.raises(ConfigError, match="timeout is how long loader processes may take"):
        iter(loader)


def test_loader_whose_collate_fn_is_set_afterwards_refuses_it() -> None:
    """An earlier version accepted it silently, and batches came as before."""
    loader = DataLoader(range(4), batch_size=2)
    with pytest.raises(ConfigError, match=r"collate_fn=…"):
        loader.collate_fn = tuple
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_has_the_order_of_pytorchs_loader_where_processes_persist(num_workers: int) -> None:
    """PyTorch draws no number for running processes, so the sampler draws another one."""

    def orders(kind: Any) -> list[list[int]]:
        torch.manual_seed(11)
        loader = kind(
            Plain(20),
            batch_size=3,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=list,
        )
        return [[repr(each) for batch in loader for each in batch] for _ in range(3)]

    assert orders(DataLoader) == orders(TorchLoader)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.full
def test_the_order_of_pytorchs_loader_where_a_sampler_draws_as_soon_as_it_is_begun(
    num_workers: int, persistent: bool, single: bool
) -> None:
    """The sampler draws before PyTorch draws a number for processes, and again after it where these start."""

    def orders(kind: Any) -> tuple[list[list[Any]], float]:
        torch.manual_seed(11)
        batches: dict[str, Any] = {"batch_sampler": Buckets(20)}
        if single:
            batches = {"batch_size": None, "sampler": Drawing(20)}
        loader = kind(Plain(20), num_workers=num_workers, persistent_workers=persistent, **batches)
        return [[batch[1] for batch in loader] for _ in range(3)], float(torch.rand(1))

    assert same(orders(DataLoader), orders(TorchLoader))


class OwnPinning(dict[str, Any]):
    """A batch of the user's own, which pins itself."""

    pins: tuple[str, ...] = ()

    def pin_memory(self) -> OwnPinning:
        found = OwnPinning(self)
        found.pins = (*self.pins, threading.current_thread().name)
        return found


def own_pinning(rows: list[Any]) -> OwnPinning:
    return OwnPinning(rows=[row[1] for row in rows])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_pinned_where_there_is_an_accelerator(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    arguments: dict[str, Any] = {"batch_size": 4, "pin_memory": True, "collate_fn": own_pinning}
    found = list(DataLoader(Plain(), num_workers=num_workers, **arguments))
    assert same(found, list(TorchLoader(Plain(), num_workers=num_workers, **arguments)))
    assert len(found) == 6 and all(len(batch.pins) == 1 for batch in found)
    assert {batch.pins[0] == threading.current_thread().name for batch in found} == {not num_workers}


@pytest.mark.parametrize("accelerator", [None, "mps"])
def test_a_loader_that_cannot_pin_warns_as_pytorchs_does(
    accelerator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator or "cpu"))
    for kind in (DataLoader, TorchLoader):
        loader = kind(Plain(), batch_size=4, pin_memory=True, collate_fn=own_pinning)
        with pytest.warns(UserWarning, match=r"pin_memory.* set"):
            found = list(loader)
        assert not any(batch.pins for batch in found)
