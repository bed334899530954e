"""Check datasets whose methods are called read and transform, for offloading or for another purpose."""

from __future__ import annotations

import gc
import random
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from tests.dataloader.toy_datasets import same
from tests.examples import some
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.errors import ConfigError

NOBODY = ["http://127.0.0.1:9"]


class Birds(Dataset[Any]):
    """A common dataset: a helper that takes a path, and a transform that knows no label."""

    asked: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.items = [(f"{number}.jpg", number % 3) for number in range(12)]
        self.transform = str.upper

    def __len__(self) -> int:
        return len(self.items)

    def read(self, path: str) -> str:
        self.asked.append(path)
        return path.removesuffix(".jpg")

    def __getitem__(self, index: int) -> Any:
        path, label = self.items[index]
        return self.transform(self.read(path)), label


class Folded(Birds):
    """Read by a permuted index; index 0 stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, *range(11, 0, -1)]

    def read(self, path: Any) -> str:
        return str(path)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read(self.order[index]))


class Labelled(Folded):
    """Read by the index, and add a label."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read(index)), index % 3


class Trimmed(Folded):
    """Transform another value than the one that was read."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read(index) + "!")


class Tossed(Folded):
    """Draw a random number first."""

    def __getitem__(self, index: int) -> Any:
        random.random()
        return self.transform(self.read(index))


class Alone(Folded):
    """Have both methods, and use neither for its samples."""

    def __getitem__(self, index: int) -> Any:
        return str(index)


class Whole(Folded):
    """Read and transform as offloading expects."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read(index))


class Text(str):
    """A text type that arrives as another type at the other end."""


class Told(Whole):
    """Return the index as part of the read value."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = str

    def read(self, path: Any) -> Any:
        return path, "read"


class Opened(Whole):
    """Read a value that cannot be sent."""

    def read(self, path: Any) -> Text:
        return Text(path)


class Holding(Whole):
    """Close its file at its end, although a copy shares the file."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [True]

    def read(self, path: Any) -> str:
        if not self.open[0]:
            raise ValueError("I/O operation on closed file")
        return super().read(path)

    def __del__(self) -> None:
        self.open[0] = False


class Only(Whole):
    """Return itself as its copy."""

    def __copy__(self) -> Only:
        return self


class Remembered(Whole):
    """Remember the live datasets that have made a sample."""

    seen: ClassVar[WeakSet[Any]] = WeakSet()

    def __getitem__(self, index: int) -> Any:
        self.seen.add(self)
        return super().__getitem__(index)


class Absent(Whole):
    """Have no sample 0."""

    def read(self, path: Any) -> str:
        if path == 0:
            raise LookupError("no sample 0")
        return super().read(path)


OTHERWISE = {
    "Birds": "reads by something else than the index",
    "Folded": "reads by something else than the index",
    "Labelled": "gives something else than what transform does",
    "Trimmed": "transforms something else than what read gives",
    "Tossed": "draws by chance besides",
    "Alone": "calls neither of them",
    "Opened": "reads what no worker can be sent: the sample is a tests.dataloader.datasets.test_divided.Text",
}


def named(kind: str) -> Any:
    return dataset(f"tests.dataloader.datasets.test_divided:{kind}")


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 0) for kind in (Birds, Folded, Labelled, Trimmed, Alone, Whole)),
        *some(2, ((kind, 2) for kind in (Birds, Whole, Folded, Labelled, Trimmed, Alone))),
    ],
)
def test_samples_are_what_the_dataset_gives_by_its_index(kind: type[Birds], num_workers: int) -> None:
    theirs = list(TorchLoader(kind(), batch_size=5, num_workers=num_workers))
    assert same(list(DataLoader(kind(), batch_size=5, num_workers=num_workers)), theirs)


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_is_made_otherwise_is_not_divided(kind: str) -> None:
    Birds.asked.clear()
    loader = DataLoader(named(kind), batch_size=4, workers=NOBODY)
    assert loader._hired is not None and loader._hired.candidates == ("p2", "p3")
    assert set(Birds.asked) <= {"0.jpg"}, "nothing is read that the dataset does not read itself"
    with pytest.raises(ConfigError, match=f"{kind} cannot be read here.* and it {OTHERWISE[kind]}"):
        DataLoader(named(kind), batch_size=4, workers=NOBODY, offload=Offloading(candidate="p1"))
    whole = DataLoader(named(kind), batch_size=4, workers=NOBODY, offload=Offloading(candidate="p3"))
    assert same(list(whole), list(TorchLoader(globals()[kind](), batch_size=4)))


@pytest.mark.parametrize("kind", [Whole, Told])
def test_what_is_made_so_is(kind: type[Whole]) -> None:
    data = named(kind.__name__)
    loader = DataLoader(data, batch_size=4, workers=NOBODY, offload=Offloading(candidate="p1"))
    assert loader._hired is not None and loader._hired.candidates == ("p1", "p2", "p3")
    assert data.dataset.__dict__.keys() == kind().__dict__.keys(), "the user's own is left as it was"


def test_what_cannot_be_seen_is_done_where_the_user_says_so() -> None:
    loader = DataLoader(named("Absent"), workers=NOBODY, offload=Offloading(candidate="p1"))
    assert loader._hired is not None and "p1" not in loader._hired.candidates


def test_one_that_cannot_be_copied_is_left_as_it_was() -> None:
    data = named("Only")
    loader = DataLoader(data, batch_size=4, workers=NOBODY)
    assert loader._hired is not None and loader._hired.candidates == ("p2", "p3")
    assert data.dataset.__dict__.keys() == Whole().__dict__.keys()


def test_one_that_closes_its_files_where_it_ends_is_not_copied() -> None:
    data = named("Holding")
    loader = DataLoader(data, batch_size=4, workers=NOBODY)
    assert loader._hired is not None and loader._hired.candidates == ("p2", "p3")
    told = DataLoader(data, batch_size=4, workers=NOBODY, offload=Offloading(candidate="p1"))
    gc.collect()
    assert data.dataset.open == [True]
    assert same(list(told), list(TorchLoader(Whole(), batch_size=4))), "divided, as the user says"


def test_a_copy_ends_at_once() -> None:
    data = named("Remembered")
    gc.disable()
    try:
        loader = DataLoader(data, batch_size=4, workers=NOBODY)
        assert loader._hired is not None and "p1" in loader._hired.candidates
        assert not set(Remembered.seen) - {data.dataset}
    finally:
        gc.enable()


@pytest.mark.parametrize("transform", [None, "none"])
def test_a_transform_that_is_none_is_no_stage(transform: Any) -> None:
    data = named("Whole")
    data.dataset.transform = transform
    with pytest.raises(ConfigError, match="p1 is for a dataset that is read in one step"):
        DataLoader(data, workers=NOBODY, offload=Offloading(candidate="p1"))
