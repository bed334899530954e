"""Check resuming in another process after any batch: the same batches in the same order."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.dataloader.toy_datasets import Broken, Buckets, Noisy, Plain, same
from tests.examples import examples, some
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.errors import ConfigError
from upriver.rpc.local_server import EmbeddedServer

COUNT = 30


class Whimsical(Sampler[int]):
    """Draw from Python's and NumPy's generators, as a user's own sampler may."""

    def __iter__(self) -> Iterator[int]:
        order = list(np.random.permutation(COUNT))
        random.shuffle(order)
        return iter([int(each) for each in order])

    def __len__(self) -> int:
        return COUNT


def own(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KINDS: dict[str, Any] = {
    "in order": lambda: {},
    "shuffled": lambda: {"shuffle": True},
    "shuffled by its own": lambda: {"shuffle": True, "generator": own(4)},
    "again and again": lambda: {"sampler": RandomSampler(range(COUNT), replacement=True, num_samples=50)},
    "by weight": lambda: {"sampler": WeightedRandomSampler([1.0] * COUNT, 40, generator=own(5))},
    "a subset": lambda: {"sampler": SubsetRandomSampler(range(20))},
    "whimsical": lambda: {"sampler": Whimsical()},
    "by a batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(COUNT)), batch_size=4, drop_last=True)
    },
    "one by one": lambda: {"batch_size": None, "sampler": SubsetRandomSampler(range(20))},
}


def loader_of(kind: str, **more: Any) -> DataLoader:
    arguments: dict[str, Any] = {"batch_size": 4, "seed": 3, **KINDS[kind](), **more}
    if "batch_sampler" in arguments:
        del arguments["batch_size"]
    return DataLoader(Noisy(COUNT), **arguments)


def set_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def drawn() -> tuple[Any, ...]:
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


@pytest.mark.parametrize("kind", some(4, KINDS))
@settings(max_examples=examples(12))
@given(stop=st.integers(0, 20), again=st.integers(0, 5), seed=st.integers(0, 99))
def test_what_is_left_comes_as_it_would_have(kind: str, stop: int, again: int, seed: int) -> None:
    """This holds for a second interruption, and for any other draws in between."""
    set_all(seed)
    here = loader_of(kind)
    batches, after = list(here), drawn()
    follow = list(here)
    set_all(seed)
    there = loader_of(kind)
    iterator = iter(there)
    found = [batch for _, batch in zip(range(stop), iterator, strict=False)]
    for part in (again, 99):
        state, rest = json.loads(json.dumps(there.state_dict())), (torch.get_rng_state(), random.getstate())
        numpy = np.random.get_state()
        set_all(seed + 1)
        there = loader_of(kind)
        torch.set_rng_state(rest[0])
        random.setstate(rest[1])
        np.random.set_state(numpy)
        there.load_state_dict(state)
        assert there.state_dict() == state
        iterator = iter(there)
        found += [batch for _, batch in zip(range(part), iterator, strict=False)]
        if len(found) >= len(batches):
            list(iterator)
            break
    assert same(found[: len(batches)], batches)
    if stop < len(batches):
        assert drawn() == after
        assert same(list(there), follow) and there.epoch == 2


def test_an_epoch_that_is_over_is_not_begun_again() -> None:
    set_all(1)
    here = loader_of("shuffled")
    first = list(here)
    state = here.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    second = list(here)
    assert not same(first, second)
    set_all(1)
    torch.empty(()).random_()  # as the first epoch does: twice
    there = loader_of("shuffled")
    there.load_state_dict(state)
    assert there.epoch == 1


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("before", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("in order", marks=pytest.mark.full),
        "shuffled",
        pytest.param("shuffled by its own", marks=pytest.mark.full),
        pytest.param("by weight", marks=pytest.mark.full),
        pytest.param("one by one", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_the_state_at_the_end_of_an_epoch_goes_on_with_the_next(
    kind: str, num_workers: int, persistent: bool, before: int, over: bool
) -> None:
    """After the last batch nothing of the epoch remains; once the epoch is over the next one begins."""
    processes = {"num_workers": num_workers, "persistent_workers": persistent}
    set_all(7)
    here = loader_of(kind, **processes)
    for _ in range(before):
        list(here)
    iterator = iter(here)
    for _ in range(len(here)):
        next(iterator)
    if over:
        assert next(iterator, None) is None
    state = json.loads(json.dumps(here.state_dict()))
    assert (state["epoch"], state["batches"]) == ((before + 1, 0) if over else (before, len(here)))
    stood = torch.get_rng_state(), random.getstate(), np.random.get_state()
    assert next(iterator, None) is None
    follow = [list(here) for _ in range(2)]
    torch.set_rng_state(stood[0])
    random.setstate(stood[1])
    np.random.set_state(stood[2])
    there = loader_of(kind, **processes)
    there.load_state_dict(state)
    assert there.state_dict() == state and len(there) == len(here)
    if not over:
        assert list(there) == []
    assert there.epoch == before + 1
    assert same([list(there) for _ in range(2)], follow) and there.epoch == here.epoch


class Seeded(Sampler[int]):
    """Create its generator at the start of iteration."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(12, generator=self.generator).tolist())


@pytest.mark.parametrize("batches", [0, 2])
def test_a_sampler_that_makes_its_generator_itself_goes_on(batches: int) -> None:
    here = DataLoader(range(12), batch_size=3, sampler=Seeded())
    list(here)
    here.sampler.set_epoch(1)
    iterator = iter(here)
    begun = [next(iterator) for _ in range(batches)]
    if not batches:
        begun = list(iterator)
    state = json.loads(json.dumps(here.state_dict()))
    there = DataLoader(range(12), batch_size=3, sampler=Seeded())
    there.load_state_dict(state)
    there.sampler.set_epoch(1 if batches else 2)
    here.sampler.set_epoch(2)
    follow = list(iterator) if batches else list(here)
    assert begun and same(list(there), follow)


@pytest.mark.parametrize("first", ["told", "loaded"])
def test_a_new_sampler_that_is_told_of_the_next_epoch_goes_on_with_it(first: str) -> None:
    """The sampler may be told before the state is loaded or after."""

    def loader_with() -> DataLoader:
        sampler = DistributedSampler(range(COUNT), num_replicas=2, rank=0)  # type: ignore[arg-type]
        return DataLoader(Noisy(COUNT), batch_size=4, sampler=sampler, seed=3)

    here = loader_with()
    for number in range(2):
        here.sampler.set_epoch(number)  # type: ignore[attr-defined]
        list(here)
    state = here.state_dict()
    here.sampler.set_epoch(2)  # type: ignore[attr-defined]
    there = loader_with()
    if first == "told":
        there.sampler.set_epoch(2)  # type: ignore[attr-defined]
    there.load_state_dict(state)
    if first == "loaded":
        there.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert same(list(there), list(here))
    there.load_state_dict(state)  # back again, in a loader that has begun: as it was then
    assert there.sampler.epoch == 1  # type: ignore[attr-defined]


class Told:
    """Return samples that hold the seed of their process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.seed)


def tell(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.seed = info.seed % 2**31


def test_processes_that_begin_after_a_state_of_persistent_ones_have_a_seed() -> None:
    processes = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": tell}
    torch.manual_seed(7)
    here = DataLoader(Told(), batch_size=2, **processes)
    list(here)
    state = here.state_dict()
    torch.manual_seed(7)
    there = DataLoader(Told(), batch_size=2, **processes)
    there.load_state_dict(state)
    seeds = {seed for batch in there for seed in batch.tolist()}
    assert seeds and not seeds & {0, 1}


def test_a_generator_that_is_seeded_after_loading_a_state_is_left_so() -> None:
    here = loader_of("shuffled by its own")
    list(here)
    state = here.state_dict()
    here.generator.manual_seed(9)
    there = loader_of("shuffled by its own")
    there.load_state_dict(state)
    there.generator.manual_seed(9)
    assert same(list(there), list(here))


@pytest.mark.parametrize(
    "share", [pytest.param(0.0, marks=pytest.mark.full), 0.4, pytest.param(1.0, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_other_workers_and_another_share_go_on_with_the_same_order(share: float) -> None:
    data = dataset("tests.dataloader.toy_datasets:Divided", count=40)
    set_all(2)
    here = list(DataLoader(data, batch_size=3, shuffle=True, seed=3))
    with EmbeddedServer.start_worker(["tests.dataloader"], workers=1) as worker:
        set_all(2)
        loader = DataLoader(
            data,
            batch_size=3,
            shuffle=True,
            seed=3,
            workers=[worker.url],
            offload=Offloading(candidate="p2", ratio=0.7),
        )
        iterator = iter(loader)
        found = [next(iterator) for _ in range(5)]
        state = loader.state_dict()
        other = DataLoader(
            data,
            batch_size=3,
            shuffle=True,
            seed=3,
            num_workers=2,
            workers=[worker.url],
            offload=Offloading(candidate="p3", ratio=share),
        )
        other.load_state_dict(state)
        assert same(found + list(other), here)


@pytest.mark.full
def test_every_rank_has_its_part_and_goes_on_with_it() -> None:
    data = dataset("tests.dataloader.toy_datasets:Divided", count=41)

    def loader_of_rank(rank: int, **more: Any) -> DataLoader:
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=9)
        return DataLoader(data, batch_size=4, sampler=sampler, seed=3, **more)

    with EmbeddedServer.start_worker(["tests.dataloader"], workers=1) as worker:
        seen: list[int] = []
        for rank in range(2):
            here = loader_of_rank(rank)
            here.sampler.set_epoch(5)  # type: ignore[attr-defined]
            batches = list(here)
            seen += list(here.sampler)
            part = {"workers": [worker.url], "offload": Offloading(candidate="p2", ratio=(rank + 1) / 3)}
            loader = loader_of_rank(rank, **part)
            loader.sampler.set_epoch(5)  # type: ignore[attr-defined]
            iterator = iter(loader)
            found = [next(iterator) for _ in range(3)]
            other = loader_of_rank(rank)
            other.load_state_dict(loader.state_dict())
            assert other.sampler.epoch == 5  # type: ignore[attr-defined]
            assert same(found + list(other), batches)
            assert loader.report.made[worker.url] > 0
        assert len(seen) == 42 and set(seen) == set(range(41))


def test_what_a_sample_raises_counts_as_its_batch() -> None:
    loader = DataLoader(Broken(12, bad=[5]), batch_size=2)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(LookupError):
        next(iterator)
    other = DataLoader(Broken(12, bad=[5]), batch_size=2)
    other.load_state_dict(loader.state_dict())
    assert [batch[1].tolist() for batch in other] == [[6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "seed is 4, and here 3"),
        ({"samples": 31}, "samples is 31"),
        ({"batch_size": 5}, "batch_size is 5"),
        ({"drop_last": True}, "drop_last is True, and here False"),
        ({"sampler_epoch": 1}, "set_epoch"),
        ({"schema": "upriver.loader-state/2"}, "not a state"),
        ({"epoch": -1}, "not a state"),
        ({"batches": 1.5}, "not a state"),
        ({"colour": 1}, "not a state"),
        ({"drawn": {}}, "not a state"),
    ],
)
def test_the_state_of_another_loader_is_refused(change: dict[str, Any], said: str) -> None:
    loader = loader_of("shuffled")
    next(iter(loader))
    state = loader.state_dict()
    before = loader.state_dict()
    with pytest.raises(ConfigError, match=said):
        loader.load_state_dict({**state, **change})
    for drawn in (
        {**state["drawn"], "shared": "zz"},
        {**state["drawn"], "shared": ""},
        {**state["drawn"], "own": ["00"]},
        {**state["drawn"], "python": [3, [1, 2], None]},
    ):
        with pytest.raises(ConfigError, match=r"generators|damaged"):
            loader.load_state_dict({**state, "drawn": drawn})
    name, words, _, *rest = state["drawn"]["numpy"]
    for position in (625, -1):  # where NumPy would draw from other memory of the process
        with pytest.raises(ConfigError, match="not a state"):
            loader.load_state_dict(
                {**state, "drawn": {**state["drawn"], "numpy": [name, words, position, *rest]}}
            )
    assert loader.state_dict() == before
    for nothing in ({}, None, [], "state"):
        with pytest.raises(ConfigError, match="not a state"):
            loader.load_state_dict(nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("after", [0, 2])
def test_a_sampler_that_draws_as_soon_as_it_is_begun_goes_on_with_other_processes(
    before: int, after: int
) -> None:
    def loader_with(num_workers: int) -> DataLoader:
        return DataLoader(Noisy(COUNT), batch_sampler=Buckets(COUNT), seed=3, num_workers=num_workers)

    set_all(5)
    here = list(loader_with(before))
    set_all(5)
    loader = loader_with(before)
    iterator = iter(loader)
    found = [next(iterator) for _ in range(2)]
    set_all(6)
    other = loader_with(after)
    other.load_state_dict(loader.state_dict())
    assert same(found + list(other), here)


class Hidden(Sampler[int]):
    """Draw from a private generator that no state shows."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        yield from (int(each) for each in self.rng.permutation(COUNT))

    def __len__(self) -> int:
        return COUNT


class Stateful(Hidden):
    """Return the state of its generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


@pytest.mark.parametrize("batched", [False, True])
def test_a_sampler_whose_order_cannot_be_had_again_is_refused_unless_it_has_a_state(batched: bool) -> None:
    def loader_with(sampler: Sampler[int]) -> DataLoader:
        if batched:
            return DataLoader(Noisy(COUNT), batch_sampler=BatchSampler(sampler, 4, False), seed=3)
        return DataLoader(Noisy(COUNT), batch_size=4, sampler=sampler, seed=3)

    for kind in (Hidden, Stateful):
        loader = loader_with(kind())
        for _ in range(3):
            list(loader)
        between = json.loads(json.dumps(loader.state_dict()))
        iterator = iter(loader)
        found = [next(iterator) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        reference = found + list(iterator)
        other = loader_with(kind())
        other.load_state_dict(state)
        assert other.state_dict() == state
        if kind is Hidden:
            with pytest.raises(ConfigError, match="another order"):
                iter(other)
            continue
        assert same(found + list(other), reference)
        other.load_state_dict(between)
        assert same(list(other), reference)
        with pytest.raises(ConfigError, match="its sampler is Stateful, and here Hidden"):
            loader_with(Hidden()).load_state_dict(state)
        with pytest.raises(ConfigError, match="only its sampler has a state_dict"):
            loader_with(Hidden()).load_state_dict({**state, "order_by": None})


class Counting(DistributedSampler[int]):
    """Keep the number of given indices as its state, as torchdata's sampler; skip them once after a load."""

    def __init__(self) -> None:
        super().__init__(range(COUNT), num_replicas=1, rank=0, seed=5)  # type: ignore[arg-type]
        self.given, self.left_out = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.left_out = self.left_out, 0
        for index in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left_out = state["given"]


@pytest.mark.parametrize("num_workers", some(1, [0, 2]))
@pytest.mark.parametrize("stop", [pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(
    "before", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)]
)
def test_a_sampler_whose_state_is_how_far_it_is_goes_on_too(before: int, stop: int, num_workers: int) -> None:
    """This holds a second time, too, and in the epoch after."""

    def loader_with() -> DataLoader:
        return DataLoader(Noisy(COUNT), batch_size=4, sampler=Counting(), seed=3, num_workers=num_workers)

    def epoch(loader: DataLoader) -> list[Any]:
        loader.sampler.set_epoch(loader.epoch)  # type: ignore[attr-defined]
        return list(loader)

    here = loader_with()
    reference = [epoch(here) for _ in range(before + 2)]
    loader = loader_with()
    assert same([epoch(loader) for _ in range(before)], reference[:before])
    found = list[Any]()
    for part in (stop, 2, COUNT):
        if part:
            loader.sampler.set_epoch(before)  # type: ignore[attr-defined]
            found += itertools.islice(loader, part)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = loader_with()
        loader.load_state_dict(state)
    assert same(found, reference[before])
    assert same(epoch(loader), reference[before + 1])


def test_a_sampler_whose_state_json_cannot_say_is_named() -> None:
    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"rng": self.rng}

    loader = DataLoader(Noisy(COUNT), batch_size=4, sampler=Odd())
    assert len(list(loader)) == 8
    with pytest.raises(ConfigError, match="JSON cannot say"):
        loader.state_dict()


@pytest.mark.parametrize("batches", [0, 2])
def test_the_state_of_another_rank_or_of_other_ranks_is_refused(batches: int) -> None:
    def loader_of(ranks: int, rank: int) -> DataLoader:
        sampler = DistributedSampler(range(COUNT), num_replicas=ranks, rank=rank)  # type: ignore[arg-type]
        return DataLoader(Noisy(COUNT), batch_size=4, sampler=sampler, seed=3)

    loader = loader_of(2, 0)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="its rank is 0, and here 1"):
        loader_of(2, 1).load_state_dict(state)
    with pytest.raises(ConfigError, match="its num_replicas is 2, and here 3"):
        loader_of(3, 0).load_state_dict(state)
    loader_of(2, 0).load_state_dict(state)


def test_states_that_say_less_are_read() -> None:
    loader = loader_of("shuffled")
    iterator = iter(loader)
    found = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    for name in ("drop_last", "num_replicas", "rank", "digest", "sampler"):
        del state[name]
    del state["drawn"]["twice"]
    other = loader_of("shuffled")
    other.load_state_dict(state)
    assert same(found + list(other), found + list(iterator))


class Transform:
    """Draw from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.drawn_from = generator


@pytest.mark.parametrize(
    "make",
    [lambda: torch.Generator(), lambda: np.random.default_rng(1), lambda: random.Random(1), lambda: None],
)
def test_generator_of_the_datasets_own_is_named_where_a_loader_goes_on(
    caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    def loader() -> DataLoader:
        data = Plain(4)
        data.transforms = [len, Transform(make())]  # type: ignore[attr-defined]
        data.itself = data  # type: ignore[attr-defined]
        return DataLoader(Subset(data, [0, 1, 2]), seed=3)

    here = loader()
    loader().load_state_dict(here.state_dict())
    assert not caplog.records
    list(here)
    loader().load_state_dict(here.state_dict())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (make() is not None)
    assert all("(dataset.transforms.1.drawn_from)" in each for each in told)
