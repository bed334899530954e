"""Check the order of the epochs after a resume: the same as without an interruption."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.dataloader.toy_datasets import Noisy, same
from tests.examples import some
from upriver.dataloader import DataLoader
from upriver.dataloader.resumed_order import GeneratorState, OrderGenerators, TwisterState, set_generators
from upriver.errors import ConfigError
from upriver.pipeline.seeding import Generators

COUNT, EPOCHS = 12, 3
NAMES = ("python", "numpy", "torch")


class Late(Sampler[int]):
    """Draw each index at its request, from all of the shared generators."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(3 * COUNT):
            yield (random.randrange(99) + int(np.random.randint(99)) + int(torch.randint(99, ()))) % COUNT

    def __len__(self) -> int:
        return 3 * COUNT


class Early(Sampler[int]):
    """Draw a permutation by NumPy, which the script seeds."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class LateBatches(Late):
    """Make batches whose lengths are drawn at their request."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(12):
            yield [random.randrange(COUNT) for _ in range(1 + int(torch.randint(3, ())))]

    def __len__(self) -> int:
        return 12


SIZED = {"batch_size": 3}
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {**SIZED, "shuffle": True},
    "shuffled by its own": lambda: {
        **SIZED,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(4),
    },
    "by the shared one, given": lambda: {
        **SIZED,
        "sampler": RandomSampler(
            range(COUNT), replacement=True, num_samples=36, generator=torch.default_generator
        ),
    },
    "again and again": lambda: {
        **SIZED,
        "sampler": RandomSampler(range(COUNT), replacement=True, num_samples=36),
    },
    "more than there are": lambda: {**SIZED, "sampler": RandomSampler(range(COUNT), num_samples=19)},
    "by weight": lambda: {**SIZED, "sampler": WeightedRandomSampler([1.0, 2.0] * 6, 14)},
    "a subset": lambda: {**SIZED, "sampler": SubsetRandomSampler(range(2, 11))},
    "batched": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(COUNT)), 4, drop_last=True)},
    "late": lambda: {**SIZED, "sampler": Late()},
    "late batches": lambda: {"batch_sampler": LateBatches()},
    "early": lambda: {**SIZED, "sampler": Early()},
    "one by one": lambda: {"batch_size": None, "sampler": RandomSampler(range(COUNT))},
}
LATE = ("late", "late batches", "by the shared one, given")
OFTEN = {("shuffled", False), ("shuffled", True), ("by weight", True), ("late", False), ("early", False)}
"""Kinds of loaders, with a model that draws or without, that `make test` resumes at any step."""


def draw() -> None:
    """Draw as a model does: dropout, and the other generators."""
    torch.nn.functional.dropout(torch.ones(11), 0.5)
    torch.rand(3)
    random.random()
    np.random.rand(5)


def script(
    kind: str, *, seed: int = 0, state: Any = None, stop: Any = None, model: bool, more: Any = None
) -> Any:
    """Run a user's script: return the batches of each epoch, or the state where the script stops.

    Args:
        stop: Epoch, and the number of batches after which to stop; 0: the epoch has begun; None: it has not.
        model: Whether the trained model draws, too.
    """
    for each in (torch.manual_seed, np.random.seed, random.seed):
        each(seed)
    torch.nn.Linear(3, 3)
    loader = DataLoader(list(range(COUNT)), seed=3, **KINDS[kind](), **(more or {}))
    if state is not None:
        loader.load_state_dict(state)
    found: list[list[Any]] = []
    while loader.epoch < EPOCHS + 1:
        if stop == (loader.epoch, None):
            return found, json.loads(json.dumps(loader.state_dict()))
        batches, epoch = iter(loader), loader.epoch - 1
        found.append([])
        while True:
            if stop == (epoch, len(found[-1])):
                return found, json.loads(json.dumps(loader.state_dict()))
            batch = next(batches, None)
            if batch is None:
                break
            found[-1].append(torch.as_tensor(batch).tolist())
            if model:
                draw()
    return found, None


def stops(kind: str) -> Iterator[tuple[int, int | None]]:
    whole, _ = script(kind, model=False)
    for epoch in (0, 1):
        yield epoch, None
        yield from ((epoch, at) for at in range(len(whole[epoch]) + 1))


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param(kind, model, marks=() if (kind, model) in OFTEN else pytest.mark.full)
        for model in (False, True)
        for kind in KINDS
        if not (model and kind in LATE)
    ],
)
@pytest.mark.full
def test_loader_resumed_at_any_step_gives_the_uninterrupted_order(kind: str, model: bool) -> None:
    """The script alone seeds everything again, and restores no generator.

    Every other step is tried with a model that draws, and the steps between without.
    """
    whole, _ = script(kind, model=model)
    assert len({str(each) for each in whole}) == len(whole)
    for stop in list(stops(kind))[model::2]:
        before, state = script(kind, model=model, stop=stop)
        after, _ = script(kind, model=model, state=state)
        if stop[1] is not None:
            after[0] = before[-1] + after[0]
        assert after == whole[stop[0] :], stop


@pytest.mark.parametrize("kind", ["late", *(pytest.param(kind, marks=pytest.mark.full) for kind in LATE[1:])])
def test_loader_resumed_with_draws_between_the_models_is_exact_or_refused(kind: str) -> None:
    """The sampler's draws depend on the model's, unless all were drawn ahead; a digest tells."""
    whole, _ = script(kind, model=True)
    refused = 0
    for stop in stops(kind):
        before, state = script(kind, model=True, stop=stop)
        try:
            after, _ = script(kind, model=True, state=state)
        except ConfigError as error:
            assert "another order" in str(error)
            refused += 1
        else:
            if stop[1] is not None:
                after[0] = before[-1] + after[0]
            assert after == whole[stop[0] :], stop
    assert refused


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("shuffled", marks=pytest.mark.full),
        "late",
        pytest.param("shuffled by its own", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("persistent", some(1, [True, False]))
def test_loader_resumed_with_processes_gives_the_uninterrupted_order(kind: str, persistent: bool) -> None:
    more = {"num_workers": 2, "persistent_workers": persistent}
    model = kind not in LATE
    whole, _ = script(kind, model=model, more=more)
    for stop in ((0, 2), (1, None)):
        before, state = script(kind, model=model, stop=stop, more=more)
        after, _ = script(kind, model=model, state=state, more=more)
        if stop[1] is not None:
            after[0] = before[-1] + after[0]
        assert after == whole[stop[0] :], stop


class Eager(Sampler[int]):
    """Draw at the start of iteration, which PyTorch does twice where processes start."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


PROCESSES: dict[str, dict[str, Any]] = {
    "none": {},
    "each epoch": {"num_workers": 1},
    "persistent": {"num_workers": 1, "persistent_workers": True},
}


def epochs_of(loader: DataLoader, count: int) -> list[Any]:
    return [batch for _ in range(count) for batch in loader]


@pytest.mark.parametrize("sampler", ["eager", pytest.param("shuffled", marks=pytest.mark.full)])
@pytest.mark.parametrize("before", ["none", pytest.param("each epoch", marks=pytest.mark.full), "persistent"])
@pytest.mark.full
def test_loader_resumed_with_other_processes_gives_the_uninterrupted_samples(
    before: str, sampler: str
) -> None:
    def loader(processes: str) -> DataLoader:
        torch.manual_seed(4)
        order: dict[str, Any] = {"sampler": Eager()} if sampler == "eager" else {"shuffle": True}
        return DataLoader(Noisy(COUNT), batch_size=5, seed=3, **order, **PROCESSES[processes])

    whole = epochs_of(loader(before), 4)
    states = [(here := loader(before)).state_dict()]
    for number in range(2):
        batches = iter(here)
        next(batches)
        states.append(here.state_dict())
        if number == 0:
            list(batches)
            states.append(here.state_dict())
    for after in PROCESSES.keys() - {before}:
        for at, state in zip((0, 1, 3, 4), states, strict=True):
            there = loader(after)
            there.load_state_dict(json.loads(json.dumps(state)))
            found = epochs_of(there, 1)
            told = there.state_dict()
            assert same(found + epochs_of(there, 4 - told["epoch"]), whole[at:]), (after, at)
            if at == 1:  # and from its own states
                last = loader(before)
                last.load_state_dict(told)
                assert same(epochs_of(last, 3), whole[3:]), (after, at)


@pytest.mark.parametrize("stop", [(0, None), (0, 2), (1, None), (1, 3)])
def test_loader_resumed_from_the_state_of_a_resumed_one_gives_the_uninterrupted_order(stop: Any) -> None:
    whole, _ = script("again and again", model=True)
    _, state = script("again and again", model=True, stop=(0, 1))
    _, state = script("again and again", model=True, state=state, stop=(0, 0))
    _, state = script("again and again", model=True, state=state, stop=(stop[0], None) if stop[0] else (0, 1))
    after, _ = script("again and again", model=True, state=state)
    assert after[-2:] == whole[-2:]


def loader(**more: Any) -> DataLoader:
    return DataLoader(list(range(COUNT)), batch_size=3, shuffle=True, seed=3, **more)


def order(of: DataLoader) -> list[Any]:
    return torch.cat(list(of)).tolist()


def test_loader_resumed_after_another_seed_goes_on_as_the_run_did() -> None:
    """The seed of the process before it loads the state does not matter."""
    torch.manual_seed(0)
    here = loader()
    order(here)
    state = here.state_dict()
    follow = [order(here) for _ in range(2)]
    torch.manual_seed(99)
    there = loader()
    there.load_state_dict(state)
    assert [order(there) for _ in range(2)] == follow


@pytest.mark.parametrize("stop", [None, 2])
def test_loader_resumed_where_each_epoch_is_seeded_by_its_number_obeys(stop: int | None) -> None:
    def epoch(of: DataLoader, number: int) -> list[Any]:
        torch.manual_seed(number)
        return order(of)

    here = loader()
    whole = [epoch(here, number) for number in range(4)]
    here = loader()
    epoch(here, 0)
    if stop is not None:
        torch.manual_seed(1)
        batches = iter(here)
        for _ in range(stop):
            next(batches)
    state = here.state_dict()
    torch.manual_seed(0)
    there = loader()
    there.load_state_dict(state)
    found = [epoch(there, number) for number in (1, 2, 3)]
    assert found == [whole[1][3 * (stop or 0) :], *whole[2:]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_loader_resumed_with_the_generators_of_the_checkpoint_draws_from_them(when: str) -> None:
    """Other draws from these generators stay the same, too."""
    torch.manual_seed(0)
    here = loader()
    batches = iter(here)
    next(batches)
    draw()
    state, stood = here.state_dict(), torch.get_rng_state()
    follow = [torch.cat(list(batches)).tolist(), torch.rand(2).tolist(), order(here), torch.rand(2).tolist()]
    torch.manual_seed(0)
    there = loader()
    if when == "before":
        torch.set_rng_state(stood)
    there.load_state_dict(state)
    if when == "after":
        torch.set_rng_state(stood)
    assert [order(there), torch.rand(2).tolist(), order(there), torch.rand(2).tolist()] == follow


@pytest.mark.parametrize("stop", [None, 2])
def test_loader_resumed_leaves_the_shared_generators_as_pytorchs_would(stop: int | None) -> None:
    """A resumed epoch draws nothing, and each further one draws as usual."""
    torch.manual_seed(0)
    here = loader()
    order(here)
    if stop is not None:
        batches = iter(here)
        for _ in range(stop):
            next(batches)
    state = here.state_dict()
    torch.manual_seed(0)
    there = loader()
    there.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    if stop is not None:
        order(there)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    order(there)
    after = torch.rand(3)
    torch.manual_seed(0)
    list(torch.utils.data.DataLoader(list(range(COUNT)), batch_size=3, shuffle=True))
    assert torch.equal(torch.rand(3), after)


def test_loader_resumed_goes_on_past_another_loader_that_draws_in_between() -> None:
    """One example is a validation loader, which draws a number per epoch."""

    def epochs(of: DataLoader, count: int) -> list[Any]:
        found = []
        for _ in range(count):
            found.append(order(of))
            list(torch.utils.data.DataLoader(list(range(4))))
        return found

    torch.manual_seed(0)
    here = loader()
    epochs(here, 1)
    batches = iter(here)
    begun = next(batches).tolist()
    state = here.state_dict()
    follow = [begun + torch.cat(list(batches)).tolist()]
    list(torch.utils.data.DataLoader(list(range(4))))
    follow += epochs(here, 2)
    torch.manual_seed(0)
    there = loader()
    there.load_state_dict(state)
    found = epochs(there, 3)
    found[0] = begun + found[0]
    assert found == follow


def test_loader_set_back_in_the_same_process_gives_the_same_epochs_again() -> None:
    torch.manual_seed(0)
    here = loader()
    batches = iter(here)
    begun = next(batches).tolist()
    state = here.state_dict()
    follow = [torch.cat(list(batches)).tolist(), order(here), order(here)]
    here.load_state_dict(state)
    assert begun and [order(here), order(here), order(here)] == follow


@pytest.mark.parametrize("count", [0, 1, 3, 623, 624, 625, 5000])
@pytest.mark.parametrize("before", [0, 1, 624])
def test_words_between_two_states_are_counted(count: int, before: int) -> None:
    """All three generators count; NumPy's legacy one and Python's draw a word at a time."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)

    def words(number: int) -> None:
        torch.empty(number, dtype=torch.int32).random_()
        np.random.randint(0, 2**32, number, dtype=np.uint32)
        for _ in range(number):
            random.getrandbits(32)

    words(before)
    begun = Generators.now()
    words(count)
    ended = Generators.now()
    for name in NAMES:
        one, other = (TwisterState.of(getattr(each, name)) for each in (begun, ended))
        assert one is not None and other is not None
        assert one.to(other) == count and one.ahead(count).same(other)
    set_generators(begun)
    words(count)
    following = torch.rand(2).tolist(), np.random.rand(), random.random()
    moved = [TwisterState.of(getattr(begun, name)).ahead(count).into(getattr(begun, name)) for name in NAMES]  # type: ignore[union-attr]
    set_generators(Generators(*moved))
    assert following == (torch.rand(2).tolist(), np.random.rand(), random.random())


def test_words_behind_are_not_found() -> None:
    torch.manual_seed(5)
    one = TwisterState.of(torch.get_rng_state())
    torch.manual_seed(6)
    other = TwisterState.of(torch.get_rng_state())
    assert one is not None and other is not None and one.to(other) is None
    random.seed(1)
    ours = TwisterState.of(random.getstate())
    random.seed(2)
    theirs = TwisterState.of(random.getstate())
    assert ours is not None and theirs is not None and ours.to(theirs) is None


@pytest.mark.parametrize(
    "change",
    [{"shared": "zz"}, {"shared": ""}, {"python": [3, [1, 2], None]}, {"numpy": ["MT19937", [1], 0, 0, 0.0]}],
)
def test_state_with_damaged_generators_is_refused(change: dict[str, Any]) -> None:
    here = loader()
    state = here.state_dict()
    with pytest.raises(ConfigError, match="damaged"):
        here.load_state_dict({**state, "stood": {**state["stood"], **change}})
    assert here.state_dict() == state


def test_nothing_is_set_where_no_state_was_loaded() -> None:
    onward, before = OrderGenerators(), torch.get_rng_state()
    with onward.drawing():
        torch.rand(1)
    assert not onward.apart and not torch.equal(torch.get_rng_state(), before)
    assert onward.stands() == GeneratorState.of(Generators.now())


class Hidden(Sampler[int]):
    """Draw from a private generator that is in no state."""

    def __init__(self) -> None:
        self.drawn_from = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.drawn_from.permutation(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class Turning(Sampler[int]):
    """Count its epochs."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter([(5 * each + self.begun) % COUNT for each in range(COUNT)])

    def __len__(self) -> int:
        return COUNT


def orders(loader: DataLoader) -> list[list[int]]:
    """Return the order of one epoch."""
    return [batch.tolist() for batch in loader]


class Backwards(BatchSampler):
    """Make batches from the end of the data."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


@pytest.mark.parametrize("sampler", some(1, [Hidden, Turning, lambda: BatchSampler(Hidden(), 5, False)]))
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("after", [1, pytest.param(2, marks=pytest.mark.full)])
def test_loader_resumed_between_epochs_goes_on_behind_what_its_sampler_hides(
    caplog: pytest.LogCaptureFixture, sampler: Callable[[], Any], num_workers: int, after: int
) -> None:
    """Before the first batch no other sign exists: the first epoch's order came again, silently."""

    def loader() -> DataLoader:
        made = sampler()
        order = {"batch_sampler": made} if isinstance(made, BatchSampler) else {"sampler": made, **SIZED}
        return DataLoader(list(range(COUNT)), seed=3, num_workers=num_workers, **order)

    here = loader()
    whole = [orders(here) for _ in range(3)]
    here = loader()
    epochs_of(here, after)
    state = json.loads(json.dumps(here.state_dict()))
    there = loader()
    there.load_state_dict(state)
    last = loader()
    last.load_state_dict(there.state_dict())
    for each in (there, last):
        assert [orders(each) for _ in range(3 - after)] == whole[after:]
    assert not caplog.records


def batches_of(sampler: Any) -> dict[str, Any]:
    return {"batch_sampler": sampler}


OTHERWISE: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]], str]] = {
    "weights": (
        lambda: {"sampler": WeightedRandomSampler([1.0] * COUNT, 9)},
        lambda: {"sampler": WeightedRandomSampler([9.0] + [1.0] * (COUNT - 1), 9)},
        "WeightedRandomSampler",
    ),
    "indices": (
        lambda: {"sampler": SubsetRandomSampler([1, 2, 3])},
        lambda: {"sampler": SubsetRandomSampler([1, 2, 4])},
        "SubsetRandomSampler",
    ),
    "a list": (lambda: {"sampler": [1, 2, 3]}, lambda: {"sampler": [1, 2, 3, 4]}, "list"),
    "a shorter list": (lambda: {"sampler": [1, 2, 3]}, lambda: {"sampler": [1, 2]}, "list"),
    "sizes": (
        lambda: batches_of([[0], [1, 2]]),
        lambda: batches_of([[0, 1], [2]]),
        "list",
    ),
    "a class of batches": (
        lambda: batches_of(BatchSampler(RandomSampler(range(COUNT)), 4, False)),
        lambda: batches_of(Backwards(RandomSampler(range(COUNT)), 4, False)),
        "RandomSampler",
    ),
    "a seed": (
        lambda: {"sampler": DistributedSampler(range(COUNT), 2, 0, seed=1)},
        lambda: {"sampler": DistributedSampler(range(COUNT), 2, 0, seed=2)},
        "DistributedSampler",
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_loader_resumed_between_epochs_with_another_order_warns_by_name(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    mine, other, said = OTHERWISE[name]

    def loader(order: dict[str, Any]) -> DataLoader:
        torch.manual_seed(4)
        return DataLoader(list(range(COUNT)), seed=3, **order)

    here = loader(mine())
    if hasattr(here.sampler, "set_epoch"):
        here.sampler.set_epoch(6)
    list(here)
    state = here.state_dict()
    there = loader(mine())
    there.load_state_dict(state)
    assert not caplog.records
    assert orders(there) == orders(here)
    loader(other()).load_state_dict(state)
    assert [record.getMessage().partition(" than")[0] for record in caplog.records] == [
        f"the sampler ({said}) gives another order for epoch 0"
    ]
