"""Check datasets and functions by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import default_collate

from tests.dataloader import toy_datasets
from tests.dataloader.toy_datasets import Noisy
from upriver.dataloader import DataLoader, dataset
from upriver.dataloader.datasets.named import name_of
from upriver.errors import ConfigError

NOISY = "tests.dataloader.toy_datasets:Noisy"


def nested() -> Any:
    def inner(rows: list[Any]) -> list[Any]:
        return rows

    return inner


def test_a_dataset_by_name_is_that_dataset() -> None:
    named = dataset(NOISY, count=7)
    assert isinstance(named.dataset, Noisy) and len(named) == 7 and named[3]["index"] == 3
    assert (named.name, named.arguments) == (NOISY, {"count": 7})
    assert len(list(DataLoader(named, batch_size=2))) == 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.such.module:x", "there is no no.such.module:x here"),
        ("tests.dataloader.toy_datasets:Nobody", "Nobody"),
        ("tests.dataloader.toy_datasets", "package.module:callable"),
        ("a b:c", "package.module:callable"),
        ("os:name", "is a str, and must be callable"),
        ("builtins:int", "int has no samples by index"),
        ("tests.dataloader.toy_datasets:Stream", "Stream has no samples by index"),
        (5, "package.module:callable, got 5"),
        ("x\x1b:y", "package.module:callable"),
    ],
)
def test_names_that_cannot_be(name: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        dataset(name)


@pytest.mark.parametrize("value", [Path("x"), (1, 2), {1: 2}, float("nan"), object(), b"x", {"a": [(1,)]}])
def test_arguments_that_cannot_travel(value: Any) -> None:
    told = "argument 'count' must be what JSON can say.*; name a function of your own module that makes it"
    with pytest.raises(ConfigError, match=told):
        dataset(NOISY, count=value)


def test_arguments_that_are_too_large() -> None:
    with pytest.raises(ConfigError, match="at most 65536 bytes"):
        dataset(NOISY, count="x" * 70_000)


def test_functions_by_name() -> None:
    assert name_of(default_collate) == "default"
    assert name_of(toy_datasets.same) == "tests.dataloader.toy_datasets:same"
    assert name_of(lambda rows: rows) is None
    assert name_of(nested()) is None
    assert name_of(Noisy(3).__getitem__) is None
