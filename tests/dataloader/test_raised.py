"""Check that a sample's error is the original one, wherever raised, and never silently ends the epoch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from tests.examples import some
from upriver import errors
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.errors import BadSample, DatasetError, UpriverError
from upriver.rpc.local_server import EmbeddedServer

COUNT = 8
NAME = "tests.dataloader.test_raised"


def kinds(of: type[UpriverError]) -> Iterator[type[UpriverError]]:
    yield of
    for each in of.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from kinds(each)


OURS: dict[str, Callable[[], UpriverError]] = {
    each.__name__: lambda each=each: each("why") for each in kinds(UpriverError)
}  # type: ignore[misc]
OURS |= {
    "BadSample": lambda: BadSample(sample=3, object_name="a/3.jpg", reason="cut off"),
    "CodeFailed": lambda: errors.CodeFailed("failed", trace="line 3"),
    "CaptureError": lambda: errors.CaptureError("not captured", module="layer.3"),
    "Overloaded": lambda: errors.Overloaded("full", retry_after_s=3.0),
    "Busy": lambda: errors.Busy("at it", retry_after_s=2.0),
}


class Two(Exception):
    """Take two arguments."""

    def __init__(self, path: str, code: int) -> None:
        super().__init__(path, code)


class Named(Exception):
    """Take keywords, so that its args do not rebuild it."""

    def __init__(self, *, path: str) -> None:
        super().__init__(f"no {path}")
        self.path = path


class Counted(Exception):
    """Take a number, and no text."""

    def __init__(self, number: Any) -> None:
        super().__init__(int(number))


class WithMessage(Exception):
    """Have an attribute that PyTorch treats as a keyword."""

    message = "of the class"

    def __init__(self, text: str) -> None:
        super().__init__(text)


class Holding(Exception):
    """Hold a value that pickle cannot represent, and take two arguments."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__(one, other)
        self.held = lambda: one


def local() -> Exception:
    class Local(Exception):
        """A local class that no import finds."""

    return Local("gone")


THEIRS: dict[str, tuple[Callable[[], Exception], bool]] = {
    "LookupError": (lambda: LookupError("gone"), True),
    "KeyError": (lambda: KeyError("gone"), True),
    "Two": (lambda: Two("a", 3), True),
    "Counted": (lambda: Counted(3), True),
    "WithMessage": (lambda: WithMessage("why"), True),
    "UnicodeDecodeError": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), True),
    "FileNotFoundError": (lambda: FileNotFoundError(2, "not there", "a/b"), True),
    "ExceptionGroup": (lambda: ExceptionGroup("both", [ValueError("a"), Two("b", 1)]), False),
    "Named": (lambda: Named(path="a"), False),
    "Holding": (lambda: Holding(1, 2), False),
    "Local": (local, False),
}


class Raising:
    """Raise at sample 3."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.make()
        return index


def raised(data: Any, **more: Any) -> tuple[list[Any], Exception]:
    """Return the batches before and after, and the error between them."""
    found, error = list[Any](), None
    batches = iter(DataLoader(data, **{"batch_size": 2, "seed": 1, **more}))
    while True:
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            break
        except Exception as each:
            error = each
    assert error is not None
    return found, error


LEFT = [[0, 1], [4, 5], [6, 7]]


@pytest.mark.parametrize("name", OURS)
def test_error_of_ours_is_itself_after_pickling(name: str) -> None:
    error = OURS[name]()
    error.add_note("where")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
    assert vars(again) == vars(error) and again.code == error.code


@pytest.mark.parametrize("name", some(2, OURS))
def test_error_of_ours_is_itself_from_a_loader_process(name: str) -> None:
    found, error = raised(Raising(OURS[name]), num_workers=1)
    meant = OURS[name]()
    assert found == LEFT and type(error) is type(meant) and str(error) == str(meant)
    notes = "".join(error.__notes__)
    assert "in DataLoader worker process 0" in notes and "raised for sample 3 of epoch 0" in notes
    for attribute, value in vars(meant).items():
        assert getattr(error, attribute) == value


@pytest.mark.parametrize("name", some(3, THEIRS))
def test_error_of_a_users_kind_is_itself_or_named_from_a_loader_process(name: str) -> None:
    make, itself = THEIRS[name]
    assert type(raised(Raising(make))[1]).__name__ == name
    found, error = raised(Raising(make), num_workers=1)
    assert found == LEFT
    if itself:
        assert type(error).__name__ == name
    else:
        assert type(error) is RuntimeError
    told = str(error) + "".join(getattr(error, "__notes__", ()))
    assert name in told and "in DataLoader worker process 0" in told


class Exhausted:
    """Exhaust an iterator at sample 3, in one of several places."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int) -> int:
        return self._at("read", index)

    def transform(self, raw: int) -> int:
        return self._at("transform", raw)

    def _at(self, where: str, index: int) -> int:
        if where == self.where and index == 3:
            next(iter(()))
        return index

    def __getitem__(self, index: int) -> int:
        return self.transform(self.read(index))


class Own(StopIteration):
    """A subclass of the error."""


def exhausted(rows: list[Any]) -> Any:
    """Collate every batch except that of sample 3."""
    if 3 in rows:
        raise Own
    return torch.tensor(rows)


@pytest.mark.parametrize("num_workers", some(1, [1, 0]))
@pytest.mark.parametrize("where", ["read", "transform", "collate_fn"])
def test_stop_iteration_of_a_sample_or_batch_takes_its_place_alone(where: str, num_workers: int) -> None:
    more: dict[str, Any] = {"collate_fn": exhausted} if where == "collate_fn" else {}
    found, error = raised(Exhausted(where), num_workers=num_workers, **more)
    assert found == LEFT and isinstance(error, DatasetError)
    told = str(error) + "".join(error.__notes__)
    assert "StopIteration" in told and ("batch 1" if more else "sample 3") in told


def test_stop_iteration_of_samples_one_by_one_takes_its_place_alone() -> None:
    found, error = raised([torch.tensor(0)] * 2, batch_size=None, collate_fn=lambda row: next(iter(())))
    assert found == [] and isinstance(error, DatasetError)
    found, error = raised(Raising(Own), batch_size=None, collate_fn=torch.tensor)
    assert found == [0, 1, 2, 4, 5, 6, 7] and isinstance(error, DatasetError)


def stop(number: int) -> None:
    next(iter(()))


def test_stop_iteration_of_worker_init_fn_is_no_end() -> None:
    found, error = raised(list(range(COUNT)), num_workers=1, worker_init_fn=stop)
    assert found == [] and isinstance(error, DatasetError)


class Failing:
    """A sampler that fails at its fourth index, and gives others after it."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.given += 1
        if self.given == 4:
            raise LookupError("no index")
        if self.given > 7:
            raise StopIteration
        return self.given


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_a_sampler_takes_the_place_of_its_index(num_workers: int) -> None:
    """PyTorch's loader without processes raises the error there, too."""
    for kind in (TorchLoader, DataLoader) if not num_workers else (DataLoader,):
        batches, found = iter(kind(list(range(COUNT)), None, sampler=Failing(), num_workers=num_workers)), []
        for _ in range(7):
            try:
                found.append(int(next(batches)))
            except LookupError as error:
                found.append(str(error))
        assert found == [1, 2, 3, "no index", 5, 6, 7]
        assert next(batches, None) is None


class Unsendable:
    """Return a value at sample 3 that no other process can receive."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return (each for each in ()) if index == 3 else index


def as_it_is(rows: list[Any]) -> list[Any]:
    return rows


@pytest.mark.parametrize("persistent", [False, True])
def test_batch_that_cannot_be_sent_is_an_error_in_its_place_alone(persistent: bool) -> None:
    """PyTorch's loader waits for ever for such a batch."""
    loader = DataLoader(
        Unsendable(),
        batch_size=2,
        num_workers=1,
        collate_fn=as_it_is,
        timeout=20,
        persistent_workers=persistent,
    )
    for _ in range(2):
        batches = iter(loader)
        assert next(batches) == [0, 1]
        with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
            next(batches)
        assert list(batches) == [[4, 5], [6, 7]]


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start_worker(["tests.dataloader"], workers=1)
    yield started
    started.close()


@pytest.mark.parametrize(
    ("where", "candidate"),
    [
        ("read", "p2"),
        ("transform", "p2"),
        ("transform", "p1"),
        ("read", "p1"),
        ("read", "p3"),
        ("collate_fn", "p3"),
    ],
)
@pytest.mark.full
def test_stop_iteration_at_a_worker_takes_its_place_alone(
    worker: EmbeddedServer, where: str, candidate: str
) -> None:
    more: dict[str, Any] = {"workers": [worker.url], "offload": Offloading(candidate=candidate)}
    if where == "collate_fn":
        more["collate_fn"] = exhausted
    found, error = raised(dataset(f"{NAME}:Exhausted", where=where), **more)
    assert found == LEFT and isinstance(error, DatasetError) and "StopIteration" in str(error)


def test_epoch_ends_where_the_sampler_does() -> None:
    """There ``StopIteration`` is meant."""
    loader = DataLoader(list(range(COUNT)), batch_size=2, sampler=iter(range(5)))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert json.dumps(loader.state_dict())
