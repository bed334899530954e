"""Check the memory layout of batches, which decides kernels' low bits: the same wherever they are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.dataloader.toy_datasets import same
from tests.examples import some
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.errors import ConfigError
from upriver.rpc.local_server import EmbeddedServer

COUNT = 24
WHERE = [None, *((candidate, ratio) for candidate in ("p1", "p2", "p3") for ratio in (0.5, 1.0))]


class Clips(Dataset[Any]):
    """Return images one after another with the colours of each pixel together in memory; arrays as well."""

    def __len__(self) -> int:
        return COUNT

    def read(self, index: int) -> Any:
        return torch.rand(4, 5, 6, 3)

    def transform(self, raw: Any) -> Any:
        clip, array = raw.permute(0, 3, 1, 2), np.random.rand(4, 5, 6, 3).transpose(0, 3, 1, 2)
        return {"tensor": clip, "array": array, "crop": clip[:, :, 1:4, 1:4]}

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.read(index))


class Scans(Clips):
    """Read values that are turned, cut and read-only; the transformed values depend on the order of sums."""

    def read(self, index: int) -> Any:
        turned = np.random.rand(300, 40, 3).astype(np.float32).transpose(2, 0, 1)
        stored = np.frombuffer(np.random.rand(90, 70).tobytes()).reshape(90, 70)
        return {
            "turned": turned,
            "cut": turned[:, 10:280, 3:37],
            "stored": stored.T,
            "part": stored[3:80, 4:60],
        }

    def transform(self, raw: Any) -> Any:
        return {name: (each, each - each.mean(), np.add.reduce(each, axis=0)) for name, each in raw.items()}


class Masked(Clips):
    """Read arrays with masked values."""

    def read(self, index: int) -> Any:
        return np.ma.masked_less(np.random.rand(5), 0.5)

    def transform(self, raw: Any) -> Any:
        return raw * 2


def filled(rows: list[Any]) -> Any:
    """Replace the masked values by a number."""
    return [row.filled(-1.0) for row in rows]


@pytest.fixture(scope="module")
def worker() -> Iterator[EmbeddedServer]:
    started = EmbeddedServer.start_worker(["tests.dataloader"], workers=1)
    yield started
    started.close()


def batches(kind: str, worker: EmbeddedServer, where: Any, num_workers: int, **more: Any) -> list[Any]:
    data = dataset(f"tests.dataloader.test_layout:{kind}")
    if where is not None:
        candidate, ratio = where
        more |= {"workers": [worker.url], "offload": Offloading(candidate=candidate, ratio=ratio)}
    loader = DataLoader(data, batch_size=4, seed=3, num_workers=num_workers, **more)
    found = list(loader)
    assert where is None or loader.report.made[worker.url] > 0
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.full
def test_batches_by_pytorchs_own_collating_are_contiguous_whoever_collates(
    worker: EmbeddedServer, where: Any, num_workers: int
) -> None:
    found = batches("Clips", worker, where, num_workers)
    assert all(each.is_contiguous() for batch in found for each in batch.values())
    assert same(found, batches("Clips", worker, None, 0))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", some(2, ((where,) for where in WHERE[1:5])))
@pytest.mark.full
def test_arrays_are_what_they_are_here_also_in_their_low_bits(
    worker: EmbeddedServer, where: Any, num_workers: int
) -> None:
    found = batches("Scans", worker, where, num_workers, collate_fn=list)
    assert same(found, batches("Scans", worker, None, 0, collate_fn=list))


@pytest.mark.full
def test_arrays_that_are_more_than_their_elements_are_made_here(worker: EmbeddedServer) -> None:
    data = dataset("tests.dataloader.test_layout:Masked")
    arguments: dict[str, Any] = {"batch_size": 4, "seed": 3, "collate_fn": filled, "workers": [worker.url]}
    loader = DataLoader(data, offload=Offloading(candidate="p2", ratio=0.5), **arguments)
    assert same(list(loader), batches("Masked", worker, None, 0, collate_fn=filled))
    assert loader.report.made == {"here": COUNT}
    with pytest.raises(ConfigError, match=r"reads what no worker can be sent: .*MaskedArray"):
        DataLoader(data, offload=Offloading(candidate="p1"), **arguments)


class Word(str):
    """A user type registered with PyTorch's collating."""


def test_what_a_user_has_registered_with_pytorchs_own_collating_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Word, lambda words, *, collate_fn_map: "-".join(words))
    rows: Any = [(Word("a"), torch.rand(2)), (Word("b"), torch.rand(2))]
    ((words, _),) = DataLoader(rows, batch_size=2)
    assert words == "a-b"
