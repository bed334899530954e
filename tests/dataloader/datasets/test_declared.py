"""Check datasets with declared stages: any stretch made elsewhere, in any share, gives the same batches."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

from tests.dataloader.leaving import nothing_left
from tests.dataloader.toy_datasets import Plain, same
from tests.examples import examples
from tests.pipeline.making import encoded, pixels, write
from tests.pipeline.test_any_chain import STORED, chains
from upriver.dataloader import DataLoader, Offloading
from upriver.dataloader.datasets.declared import Declared
from upriver.errors import BadSample, ConfigError, ObjectNotFound
from upriver.pipeline import (
    ColorJitter,
    Dataset,
    Decode,
    InputChain,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    index,
)
from upriver.rpc.local_server import EmbeddedServer
from upriver.store import Store

COUNT, SEED = 45, 3
STAGES = (
    Decode(),
    RandomResizedCrop(24),
    ColorJitter(brightness=0.4, hue=0.1),
    RandomHorizontalFlip(),
    Normalize(),
)
NAMES = ("read", "decode", "random_resized_crop", "color_jitter", "random_horizontal_flip", "normalize")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    files = {
        f"{'ab'[each % 2]}/{each:02}.jpg": encoded(pixels(30 + each, 60 - each, each))
        for each in range(COUNT)
    }
    dataset = index(write(tmp_path_factory.mktemp("declared"), files), stages=STAGES)
    dataset.publish()
    return dataset


@pytest.fixture(scope="module")
def servers(data: Dataset) -> Iterator[list[EmbeddedServer]]:
    started = [EmbeddedServer.start({"default": data.store.uri}, workers=1, threads=1) for _ in range(2)]
    yield started
    for server in started:
        server.close()


def epochs(data: Dataset, **arguments: Any) -> list[list[Any]]:
    loader = DataLoader(
        data, batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(1), seed=SEED, **arguments
    )
    return [list(loader) for _ in range(2)]


class Plainly(torch.utils.data.Dataset[Any]):
    """Make the same samples, one stage after another."""

    def __init__(self, data: Dataset, epoch: int) -> None:
        self._data, self._epoch = data, epoch

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, at: int) -> Any:
        (place,) = self._data.locate([at])
        blob = torch.frombuffer(bytearray(self._data.store.get(place.object)), dtype=torch.uint8)
        value = self._data.chain.run(
            blob, sample=at, epoch=self._epoch, seed=SEED, start=-len(STAGES), stop=0
        )
        return value, int(self._data.targets[at])


@pytest.fixture(scope="module")
def reference(data: Dataset) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        list(TorchLoader(Plainly(data, epoch), batch_size=7, shuffle=True, generator=generator))
        for epoch in range(2)
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_pytorchs_loader(
    data: Dataset, reference: list[list[Any]], num_workers: int
) -> None:
    assert same(epochs(data, num_workers=num_workers), reference)


class Reads:
    """Hold all reads but an epoch's first until the next epoch reads, which waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turn, self._second, self._old = threading.Condition(), False, 0
        self._make_all = Declared.make_all
        monkeypatch.setattr(Declared, "make_all", lambda *args, **more: self.make_all(*args, **more))

    def make_all(self, source: Declared, *args: Any, **more: Any) -> list[Any]:
        made = self._make_all(source, *args, **more)
        if more["start"] == source.positions[0]:
            with self._turn:
                self._wait(more["epoch"], first=0 in args[0])
                self._turn.notify_all()
        return made

    def _wait(self, epoch: int, *, first: bool) -> None:
        if epoch == 1:
            self._second = True
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: not self._old, 60)
        elif not first:
            self._old += 1
            assert self._turn.wait_for(lambda: self._second, 60)
            self._old -= 1


@pytest.mark.parametrize("persistent", [False, True])
def test_what_was_read_for_an_epoch_that_is_left_early_does_not_show_in_the_next(
    data: Dataset, reference: list[list[Any]], persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Reads(monkeypatch)
    loader = DataLoader(data, batch_size=7, seed=SEED, num_workers=1, persistent_workers=persistent)
    here = DataLoader(data, batch_size=7, seed=SEED)
    here.epoch = 1
    next(iter(loader))
    assert same(list(loader), list(here))


def test_an_epoch_whose_processes_have_begun_another_says_so(data: Dataset) -> None:
    """In PyTorch's loader it would be the same iterator."""
    for dataset in (data, Plain(60)):
        loader = DataLoader(dataset, batch_size=5, seed=SEED, num_workers=1, persistent_workers=True)
        here = DataLoader(dataset, batch_size=5, seed=SEED)
        here.epoch = 1
        old = iter(loader)
        next(old)
        new = iter(loader)
        raised = 0
        for _ in range(len(loader) - 1):
            try:
                next(old)
            except RuntimeError as error:
                assert "have begun another epoch" in str(error)
                raised += 1
        assert raised and next(old, None) is None
        assert same(list(new), list(here))


@pytest.mark.parametrize("persistent", [False, True])
def test_no_thread_process_or_memory_outlives_a_loader(data: Dataset, persistent: bool) -> None:
    with nothing_left():
        loader = DataLoader(data, batch_size=5, num_workers=1, persistent_workers=persistent)
        list(loader)
        next(iter(loader))
        del loader


STRETCHES = [
    *("p1", "p2", "p3", "read..collate", "decode..collate", "normalize..collate"),
    *(f"{first}..{last}" for at, first in enumerate(NAMES) for last in NAMES[at:]),
]


WAYS = [
    *((candidate, 1.0, 1, 0) for candidate in STRETCHES[:6]),
    *((candidate, 0.3, 2, 1) for candidate in STRETCHES[1:4:2]),
    *(pytest.param(candidate, 1.0, 1, 0, marks=pytest.mark.full) for candidate in STRETCHES[6:]),
    *(
        pytest.param(candidate, 0.3, 2, 1, marks=pytest.mark.full)
        for at, candidate in enumerate(STRETCHES)
        if at not in (1, 3)
    ),
]
"""Stretch, share, number of servers, and processes here. The last ones differ in the stretch alone."""


@pytest.mark.parametrize(("candidate", "ratio", "count", "num_workers"), WAYS)
@pytest.mark.full
def test_any_stretch_may_run_elsewhere(
    data: Dataset,
    reference: list[list[Any]],
    servers: list[EmbeddedServer],
    candidate: str,
    ratio: float,
    count: int,
    num_workers: int,
) -> None:
    urls = [server.url for server in servers[:count]]
    arguments = {"workers": urls, "offload": Offloading(candidate=candidate, ratio=ratio)}
    loader = DataLoader(
        data,
        batch_size=7,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        seed=SEED,
        num_workers=num_workers,
        **arguments,
    )
    assert same([list(loader) for _ in range(2)], reference)
    made = loader.report.made
    there = sum(made.get(url, 0) for url in urls)
    assert sum(made.values()) == 2 * COUNT and abs(there - 2 * COUNT * ratio) <= 14, loader.report


@pytest.mark.full
def test_numbers_of_any_type(data: Dataset, servers: list[EmbeddedServer]) -> None:
    order = np.random.default_rng(2).permutation(COUNT)
    here = list(DataLoader(data, batch_size=7, seed=SEED, sampler=order.tolist()))
    for sampler in (list(order), list(torch.from_numpy(order))):
        assert same(list(DataLoader(data, batch_size=7, seed=SEED, sampler=sampler)), here)
        arguments = {"workers": [servers[0].url], "offload": "always"}
        loader = DataLoader(data, batch_size=7, seed=SEED, sampler=sampler, **arguments)
        assert same(list(loader), here) and "here" not in loader.report.made
    for number in (COUNT, -COUNT - 1, 1.0, np.array([1]), "1"):
        with pytest.raises(IndexError, match=f"samples have numbers in 0..{COUNT - 1}"):
            list(DataLoader(data, seed=SEED, sampler=[number]))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], list[EmbeddedServer]]]:
    """Return a store for each kind of file that a chain can begin with, and servers that have all stores."""
    uris = {}
    for decoder, blobs in STORED.items():
        suffix = {"decode": "jpg", "decode_wav": "wav", "load_tensor": "npy"}[decoder]
        named = {f"a/{each:02}.{suffix}": blobs[each % len(blobs)] for each in range(11)}
        uris[decoder] = write(tmp_path_factory.mktemp(decoder), named)
    started = [EmbeddedServer.start(uris, workers=1, threads=1) for _ in range(2)]
    yield uris, started
    for server in started:
        server.close()


@pytest.mark.full
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), batch_size=st.integers(1, 5), data=st.data())
def test_any_chain_at_any_place(
    files: tuple[dict[str, str], list[EmbeddedServer]],
    chain: InputChain,
    batch_size: int,
    data: st.DataObject,
) -> None:
    uris, servers = files
    decoder = chain.stages[0].name
    made_of = index(Store.open(uris[decoder], name=decoder), stages=chain.stages)
    made_of.publish()
    arguments: dict[str, Any] = {"batch_size": batch_size, "seed": SEED}
    try:
        reference = list(DataLoader(made_of, **arguments))
    except (BadSample, RuntimeError):  # too small for a stage, or of sizes that form no batch
        assume(False)
    names = Declared(made_of, SEED).stages
    first = data.draw(st.integers(0, len(names) - 1))
    last = data.draw(st.integers(first, len(names) - 1))
    candidates = ("p1", "p2", "p3", f"{names[first]}..{names[last]}")
    for number, (candidate, ratio) in enumerate(product(candidates, (0.3, 1.0))):
        count = 1 + (number + batch_size) % 2
        loader = DataLoader(
            made_of,
            workers=[server.url for server in servers[:count]],
            offload=Offloading(candidate=candidate, ratio=ratio),
            **arguments,
        )
        assert same(list(loader), reference)
        assert sum(loader.report.made.values()) == 11 and not loader.report.why_not


@pytest.mark.full
def test_all_of_it_always_and_by_what_the_first_batches_take(
    data: Dataset, reference: list[list[Any]], servers: list[EmbeddedServer]
) -> None:
    urls = [server.url for server in servers]
    for offload in ("always", "auto", "never"):
        assert same(epochs(data, workers=urls, offload=offload), reference)


def test_what_may_be_worth_it_is_measured(data: Dataset, servers: list[EmbeddedServer]) -> None:
    loader = DataLoader(data, batch_size=7, workers=[servers[0].url])
    assert loader._hired is not None
    assert loader._hired.candidates == ("p1", "read..random_horizontal_flip", "p2", "p3")


def test_where_the_first_sample_is_broken_only_the_papers_own_are_measured(tmp_path: Path) -> None:
    files = {f"a/{each}.jpg": encoded(pixels(20, 20, each)) for each in range(6)}
    files["a/0.jpg"] = files["a/0.jpg"][:100]
    bad = index(write(tmp_path, files), stages=STAGES)
    loader = DataLoader(bad, batch_size=2, sampler=[1, 2, 3, 4], workers=["http://127.0.0.1:9"])
    assert len(list(loader)) == 2
    assert loader._hired is not None and loader._hired.candidates == ("p1", "p2", "p3")


def test_with_a_collate_function_of_ones_own(data: Dataset, servers: list[EmbeddedServer]) -> None:
    here = epochs(data, collate_fn=list)
    for offload in ("always", Offloading(candidate="p2"), Offloading(candidate="read..decode", ratio=0.5)):
        assert same(epochs(data, collate_fn=list, workers=[servers[0].url], offload=offload), here)
    for candidate in ("p3", "decode..collate"):
        with pytest.raises(ConfigError, match="collate_fn"):
            epochs(data, collate_fn=list, workers=[servers[0].url], offload=Offloading(candidate=candidate))


@pytest.mark.full
def test_a_server_that_dies_loses_its_share(data: Dataset, reference: list[list[Any]]) -> None:
    with EmbeddedServer.start({"default": data.store.uri}, workers=1, threads=1) as server:
        loader = DataLoader(
            data,
            batch_size=7,
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
            seed=SEED,
            workers=[server.url],
            offload=Offloading(candidate="read..random_resized_crop", ratio=0.6),
        )
        iterator = iter(loader)
        found = [next(iterator) for _ in range(2)]
        os.kill(server.pid, signal.SIGKILL)
        assert same([found + list(iterator), list(loader)], reference)
        assert loader.report.made["here"] > 0


@pytest.mark.full
def test_one_on_this_machine_for_a_try(data: Dataset, reference: list[list[Any]]) -> None:
    assert same(epochs(data, workers=1, offload="always"), reference)


@pytest.mark.full
def test_a_server_without_the_store_says_so(data: Dataset, tmp_path: Path) -> None:
    with EmbeddedServer.start({"other": tmp_path.as_uri()}, workers=1, threads=1) as server:
        loader = DataLoader(data, batch_size=7, workers=[server.url], offload="always")
        list(loader)
        assert loader.report.made == {"here": COUNT}
        assert "no store 'default'" in loader.report.why_not[server.url]


@pytest.mark.full
def test_a_bad_sample_is_named(tmp_path: Path) -> None:
    files = {f"a/{each}.jpg": encoded(pixels(20, 20, each)) for each in range(6)}
    files["a/4.jpg"] = files["a/4.jpg"][:100]
    bad = index(write(tmp_path, files), stages=STAGES)
    bad.publish()
    with EmbeddedServer.start({"default": bad.store.uri}, workers=1, threads=1) as server:
        for arguments in ({}, {"num_workers": 1}, {"workers": [server.url], "offload": "always"}):
            iterator = iter(DataLoader(bad, batch_size=2, **arguments))
            next(iterator), next(iterator)
            with pytest.raises((BadSample, RuntimeError), match=r"sample 4 in object 'a/4\.jpg'"):
                next(iterator)


@pytest.mark.full
def test_bad_and_missing_objects_cost_their_batches_and_no_help(tmp_path: Path) -> None:
    files = {f"a/{each:02}.jpg": encoded(pixels(20, 20, each)) for each in range(30)}
    files.update({f"a/{each:02}.jpg": files["a/00.jpg"][:100] for each in (4, 6, 9, 11, 12)})
    data = index(write(tmp_path, files), stages=STAGES)
    data.publish()
    gone = [data.locate([at])[0].object for at in (16, 18, 21)]
    for name in gone:
        (tmp_path / name).unlink()
    with EmbeddedServer.start({"default": data.store.uri}, workers=1, threads=1) as server:
        for candidate in ("p3", "p2", "read..decode"):
            loader = DataLoader(
                data, batch_size=2, workers=[server.url], offload=Offloading(candidate=candidate)
            )
            for epoch in range(1, 3):
                iterator, found, failed = iter(loader), 0, list[str]()
                while True:
                    try:
                        found += len(next(iterator)[1])
                    except (BadSample, ObjectNotFound) as error:
                        failed.append(str(error))
                    except StopIteration:
                        break
                assert found == 14 and len(failed) == 8
                assert sum(name in error for name in gone for error in failed) == 3
                assert loader.report.made == {server.url: epoch * 14} and not loader.report.why_not


@pytest.mark.parametrize(
    "candidate", ["decode..read", "collate..collate", "read..", "..read", "read..crop", "p4", "", 3, None]
)
def test_stretches_that_there_are_not(data: Dataset, candidate: Any) -> None:
    with pytest.raises(ConfigError, match="candidate"):
        DataLoader(data, offload=Offloading(candidate=candidate))
