"""Check batches from real workers over HTTP: the same bits for any offloading and any killed process."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import SubsetRandomSampler

from tests.dataloader.leaving import nothing_left
from tests.dataloader.toy_datasets import STEPS, VICTIM, same
from tests.examples import examples, some
from tests.rpc.scripted_http import Exchange, scripted
from tests.server.running import wait_for
from upriver.dataloader import DataLoader, Offloading, dataset
from upriver.dataloader.options import RemoteWorkers
from upriver.errors import ConfigError, NotAuthorized
from upriver.protocol import error_body
from upriver.retry import Backoff
from upriver.rpc.local_server import EmbeddedServer

ALLOW = ["tests.dataloader"]
DATASETS = "tests.dataloader.toy_datasets"
COUNT = 60
CANDIDATES = ("p1", "p2", "p3")


@pytest.fixture(scope="module")
def workers() -> Iterator[list[EmbeddedServer]]:
    started = [EmbeddedServer.start_worker(ALLOW, workers=1) for _ in range(2)]
    yield started
    for worker in started:
        worker.close()


def urls(workers: list[EmbeddedServer]) -> list[str]:
    return [worker.url for worker in workers]


def named(kind: str = "Divided", **arguments: Any) -> Any:
    return dataset(f"tests.dataloader.toy_datasets:{kind}", count=COUNT, **arguments)


def epochs(count: int = 2, **arguments: Any) -> list[list[Any]]:
    loader = DataLoader(arguments.pop("dataset", named()), batch_size=7, seed=3, **arguments)
    return [list(loader) for _ in range(count)]


@pytest.fixture(scope="module")
def reference() -> list[list[Any]]:
    return epochs()


@pytest.mark.parametrize("ratio", [0.3, pytest.param(1.0, marks=pytest.mark.full)])
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_same_batches_whatever_is_offloaded(
    workers: list[EmbeddedServer], reference: list[list[Any]], candidate: Any, ratio: float, count: int
) -> None:
    offload = Offloading(candidate=candidate, ratio=ratio)
    loader = DataLoader(named(), batch_size=7, seed=3, workers=urls(workers[:count]), offload=offload)
    assert same([list(loader) for _ in range(2)], reference)
    made = loader.report.made
    there = sum(made.get(url, 0) for url in urls(workers))
    assert abs(there - 2 * COUNT * ratio) <= 14 and sum(made.values()) == 2 * COUNT


@pytest.mark.parametrize("candidate", some(1, CANDIDATES))
def test_with_loader_processes_too(
    workers: list[EmbeddedServer], reference: list[list[Any]], candidate: Any
) -> None:
    offload = Offloading(candidate=candidate, ratio=0.5)
    assert same(epochs(workers=urls(workers), offload=offload, num_workers=2), reference)


def test_what_is_computed_there_goes_on_with_the_numbers_after_those_of_reading_here(
    workers: list[EmbeddedServer],
) -> None:
    here = epochs(dataset=named("Chancy"))
    offload = Offloading(candidate="p1", ratio=0.5)
    assert same(epochs(dataset=named("Chancy"), workers=urls(workers), offload=offload), here)
    loader = DataLoader(named("Chancy"), batch_size=7, seed=3, workers=urls(workers), offload=offload)
    assert same([list(loader) for _ in range(2)], here)
    assert abs(loader.report.made["here"] - COUNT) <= 14


def test_always_is_whole_batches_and_single_samples_where_nobody_there_can_collate(
    workers: list[EmbeddedServer], reference: list[list[Any]]
) -> None:
    assert same(epochs(workers=urls(workers), offload="always"), reference)
    apart = epochs(collate_fn=lambda rows: rows)
    assert same(epochs(collate_fn=lambda rows: rows, workers=urls(workers), offload="always"), apart)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.full
def test_batches_of_many_samples(workers: list[EmbeddedServer], candidate: Any) -> None:
    """They have more tensors than one response may hold."""
    data = dataset("tests.dataloader.toy_datasets:Divided", count=2100)
    here = list(DataLoader(data, batch_size=2100, seed=3))
    offload = Offloading(candidate=candidate)
    loader = DataLoader(data, batch_size=2100, seed=3, workers=urls(workers), offload=offload)
    assert same(list(loader), here)
    assert "here" not in loader.report.made


def test_an_epoch_that_is_dropped_is_closed_whoever_sees_that(workers: list[EmbeddedServer]) -> None:
    """The collector may close it in any thread, even one that the holder of a lock waits for."""
    loader = DataLoader(named(), batch_size=7, seed=3, workers=urls(workers), offload="always")
    epoch = iter(loader)
    next(epoch)
    circle: list[Any] = [epoch]
    circle.append(circle)
    del epoch, circle
    hired = loader._hired
    assert hired is not None
    taken, collected = threading.Event(), threading.Event()

    def hold() -> None:
        with hired._lock:
            taken.set()
            assert collected.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    gc.collect()
    collected.set()
    holder.join()
    assert len(list(loader)) == 9


def test_nobody_collates_elsewhere_what_makes_no_batch(workers: list[EmbeddedServer]) -> None:
    one_by_one = {"batch_size": None, "workers": urls(workers)}
    with pytest.raises(ConfigError, match="'p3' collates elsewhere, and batch_size=None"):
        DataLoader(named(), offload=Offloading(candidate="p3"), **one_by_one)
    with pytest.raises(ConfigError, match="collate_fn"):
        DataLoader(
            named(), collate_fn=lambda rows: rows, workers=urls(workers), offload=Offloading(candidate="p3")
        )


@pytest.mark.full
@pytest.mark.slow
def test_what_a_stopped_worker_was_given_is_made_here(
    reference: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens long before its connections time out; it gets tasks again once it has resumed."""
    monkeypatch.setattr("upriver.dataloader.remote.worker_choice.LATE_S", 0.5)
    monkeypatch.setattr("upriver.dataloader.epoch.LOOK_S", 0.1)
    with EmbeddedServer.start_worker(ALLOW, workers=1) as worker:
        loader = DataLoader(named(), batch_size=7, seed=3, workers=[worker.url], offload="always")
        assert same(list(loader), reference[0])
        iterator = iter(loader)
        found = [next(iterator) for _ in range(2)]
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert same(found + list(iterator), reference[1])
            assert time.monotonic() - began < 100, "a connection times out after two minutes"
            assert loader.report.made["here"] > 0
            assert "does not answer" in loader.report.why_not[worker.url]
        finally:
            os.kill(worker.pid, signal.SIGCONT)


def until_told(
    url: str, workers: Any, offload: Any, caplog: pytest.LogCaptureFixture
) -> tuple[DataLoader, list[str]]:
    """Iterate until the log has told of a worker; return the loader, and the warnings about this worker."""
    arguments = {"batch_size": 7, "seed": 3, "sampler": [0] * 10**6}
    loader = DataLoader(named(), workers=workers, offload=offload, **arguments)
    for _ in loader:
        said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        if told := [each for each in said if url in each]:
            return loader, told
    raise AssertionError("never told")


@pytest.mark.parametrize("offload", ["auto", "always"])
def test_an_address_where_nobody_is_is_named_by_log_and_report(
    caplog: pytest.LogCaptureFixture, offload: Any
) -> None:
    url = "http://127.0.0.1:9"
    loader, [said] = until_told(url, [url], offload, caplog)
    assert "refused" in loader.report.why_not[url]
    assert said.startswith(f"a worker is not used for now: {url}: ") and said.count(url) == 1
    assert said.removeprefix("a worker is not used for now: ") in loader.why


@pytest.mark.parametrize("offload", ["auto", "always"])
def test_a_refused_token_is_named_by_log_report_and_reason(
    reference: list[list[Any]], caplog: pytest.LogCaptureFixture, offload: Any
) -> None:
    def refuse(exchange: Exchange) -> None:
        body = error_body(NotAuthorized("the token is not valid here"))
        exchange.plain(401, json.dumps(body).encode())

    lasting = "the token is not valid here; the token was refused, which does not mend by itself"
    with scripted(refuse) as url:
        remote = RemoteWorkers([url], token="old")
        loader, told = until_told(url, remote, offload, caplog)
        assert told == [f"a worker is not used: {url}: {lasting}"]
        assert same(epochs(workers=remote, offload=offload), reference)
    assert loader.report.why_not == {url: lasting} and loader.report.made.keys() == {"here"}
    assert f"{url}: {lasting}" in loader.why
    assert offload == "auto" or "all samples are made here" in loader.why


def test_never_asks_nobody(reference: list[list[Any]]) -> None:
    assert same(epochs(workers=["http://127.0.0.1:9"], offload="never"), reference)


def test_a_worker_that_is_not_there_costs_nothing_but_its_help(
    workers: list[EmbeddedServer], reference: list[list[Any]]
) -> None:
    gone = "http://127.0.0.1:9"
    for addresses in ([gone], [gone, workers[0].url]):
        assert same(epochs(workers=addresses, offload="always"), reference)


@pytest.mark.full
def test_a_worker_that_does_not_allow_it_says_so(
    reference: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedServer.start_worker(["json"], workers=1) as worker:
        for offload in ("always", "auto"):
            caplog.clear()
            loader, told = until_told(worker.url, [worker.url], offload, caplog)
            reason = loader.report.why_not[worker.url]
            assert "json" in reason and reason in loader.why
            assert told == [f"a worker is not used: {worker.url}: {reason}"]
        loader = DataLoader(named(), batch_size=7, seed=3, workers=[worker.url], offload="always")
        assert same([list(loader) for _ in range(2)], reference)
        assert loader.report.made == {"here": 2 * COUNT}


@pytest.mark.parametrize("seed", [None, 0])
def test_a_dataset_with_a_generator_of_its_own_stays_here(
    workers: list[EmbeddedServer], seed: int | None
) -> None:
    """The loader does not seed it. From its own seed it gives the same numbers at first, here and there."""
    data = named("OwnGenerator", seed=seed)
    loader = DataLoader(data, batch_size=7, seed=3, workers=urls(workers), offload="always")
    list(loader)
    assert loader.report.made == {"here": COUNT}
    assert loader.report.why_not.keys() == set(urls(workers))
    assert all("sample 0 differs each time it is made" in why for why in loader.report.why_not.values())


def test_a_worker_that_makes_other_samples_is_not_used(workers: list[EmbeddedServer]) -> None:
    loader = DataLoader(named("OfProcess"), batch_size=7, seed=3, workers=urls(workers), offload="always")
    list(loader)
    assert loader.report.made == {"here": COUNT}
    assert all("another sample" in why for why in loader.report.why_not.values())


def test_what_cannot_be_sent_is_made_here(workers: list[EmbeddedServer]) -> None:
    loader = DataLoader(
        named("Pictures"), batch_size=7, collate_fn=list, workers=urls(workers), offload="always"
    )
    assert len(list(loader)) == 9
    assert "PIL" in next(iter(loader.report.why_not.values()))


def test_what_a_sample_raises_is_raised_here(workers: list[EmbeddedServer]) -> None:
    loader = DataLoader(
        dataset("tests.dataloader.toy_datasets:Broken", count=12, bad=[5]),
        batch_size=2,
        workers=urls(workers),
        offload="always",
    )
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(LookupError, match="sample 5 is gone"):
        next(iterator)
    assert next(iterator)[1].tolist() == [6, 7]


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.full), 1])
def test_what_a_sample_raises_carries_where_it_was_raised_there(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUTE_API_KEY", "sk-of-the-worker")
    with EmbeddedServer.start_worker(ALLOW, workers=1) as worker:
        monkeypatch.delenv("MUTE_API_KEY")
        loader = DataLoader(
            dataset("tests.dataloader.toy_datasets:Mute", count=12, bad=[5]),
            batch_size=2,
            workers=[worker.url],
            offload="always",
            num_workers=num_workers,
        )
        iterator = iter(loader)
        next(iterator), next(iterator)
        with pytest.raises(ValueError, match="bad None") as caught:
            next(iterator)
        told = "".join(traceback.format_exception(caught.value))
        here, _, there = told.partition(f"at worker {worker.url}: ")
        assert "raised for sample 5 of epoch 0" in here and "raised for sample 5 of epoch 0" in there
        assert there.startswith("tests.dataloader.toy_datasets:Mute, sample 5: ValueError: bad ***\n")
        assert "datasets.py" in there and "in __getitem__" in there and "ValueError: bad ***" in there
        assert "sk-of-the-worker" not in told
        assert next(iterator)[1].tolist() == [6, 7]


@pytest.mark.full
def test_what_only_a_worker_cannot_make_is_made_here_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MUTE_API_KEY", "sk-of-the-worker")
    with EmbeddedServer.start_worker(ALLOW, workers=1) as worker:
        monkeypatch.delenv("MUTE_API_KEY")
        loader = DataLoader(
            dataset("tests.dataloader.toy_datasets:Mute", count=12, bad_there=[5, 9]),
            batch_size=2,
            workers=[worker.url],
            offload="always",
        )
        with caplog.at_level("WARNING", "upriver"):
            assert [batch[1].tolist() for batch in loader] == [[at, at + 1] for at in range(0, 12, 2)]
    (said,) = [record.getMessage() for record in caplog.records]
    assert worker.url in said and "in __getitem__" in said and "ValueError: bad ***" in said


class Rows(NamedTuple):
    """A batch that cannot be sent."""

    values: list[Any]


def as_rows(rows: list[Any]) -> Rows:
    return Rows(rows)


def as_many(rows: list[Any]) -> list[torch.Tensor]:
    """Return more tensors than a response may have, also for the last few samples."""
    return [row[0] + at for row in rows for at in range(300)]


@pytest.mark.parametrize(
    ("allowed", "collate", "says"),
    [
        (False, as_rows, "allow"),
        (True, as_rows, "test_workers.Rows, which cannot be sent"),
        (True, as_many, "at most 1024 tensors"),
    ],
)
@pytest.mark.full
def test_workers_that_cannot_make_batches_make_samples(
    workers: list[EmbeddedServer], allowed: bool, collate: Any, says: str
) -> None:
    arguments: dict[str, Any] = {"dataset": named(), "batch_size": 7, "seed": 3, "collate_fn": collate}
    reference = DataLoader(**arguments)
    with ExitStack() as stack:
        two = workers
        if not allowed:
            two = [stack.enter_context(EmbeddedServer.start_worker([DATASETS], workers=1)) for _ in range(2)]
        loader = DataLoader(workers=urls(two), offload=Offloading(candidate="p3"), **arguments)
        for _ in range(2):
            assert same(list(loader), list(reference))
        assert loader.report.made == {"here": 2 * COUNT}
        assert any(says in why for why in loader.report.why_not.values())
        loader._offload = Offloading(candidate="p2")  # as `auto` continues with its next measurement
        for _ in range(2):
            assert same(list(loader), list(reference))
        assert all(loader.report.made[url] > 0 for url in urls(two))
        assert Counter(loader.report.made).total() == 4 * COUNT and loader.report.made["here"] == 2 * COUNT


def test_bad_samples_cost_their_batches_and_no_help(workers: list[EmbeddedServer]) -> None:
    bad = [5, 9, 10, 13, 16, 19, 22, 25, 30, 35]
    data = dataset("tests.dataloader.toy_datasets:Broken", count=COUNT, bad=bad)
    loader = DataLoader(data, batch_size=3, workers=urls(workers), offload="always")
    for _ in range(2):
        iterator, found = iter(loader), list[int]()
        while True:
            try:
                found += next(iterator)[1].tolist()
            except LookupError as error:
                assert "is gone" in str(error)
            except StopIteration:
                break
        assert found == [at for at in range(COUNT) if not {each // 3 for each in bad} & {at // 3}]
    assert "here" not in loader.report.made and not loader.report.why_not


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    with monkeypatch.context() as patch:
        patch.setenv(VICTIM, "1")
        started = EmbeddedServer.start_worker(ALLOW, workers=1)
    yield started
    started.close()


@pytest.mark.parametrize(
    ("candidate", "ratio", "count"),
    [
        ("p2", 0.3, 2),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in product(CANDIDATES, (0.3, 1.0), (1, 2))
            if each != ("p2", 0.3, 2)
        ),
    ],
)
def test_a_worker_that_is_killed_at_it_loses_nothing(
    workers: list[EmbeddedServer],
    victim: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    candidate: Any,
    ratio: float,
    count: int,
) -> None:
    """Others make its unfinished samples, once each."""
    never = Backoff(base_s=600.0, cap_s=600.0, jitter=0.0)  # otherwise one more sample is made, as a proof
    monkeypatch.setattr("upriver.dataloader.remote.worker_choice.FAILURES", never)
    data = named("Held", folder=str(tmp_path))
    all_of_them = [victim.url, *urls(workers)][:count]
    loader = DataLoader(
        data, batch_size=7, seed=3, workers=all_of_them, offload=Offloading(candidate=candidate, ratio=ratio)
    )
    assert loader._hired is not None
    for _ in range(20):
        list(loader)
        if all(worker.proved for worker in loader._hired._workers):
            break
    for worker in loader._hired._workers:
        worker.sample_s = 0.0  # otherwise luck decides which one is asked first
    before = Counter(loader.report.made)
    here = DataLoader(data, batch_size=7, seed=3)
    here.epoch = loader.epoch
    reference = list(here)
    (tmp_path / "armed").touch()
    killer = threading.Thread(target=kill_at_work, args=(victim, tmp_path))
    killer.start()
    found = list(loader)
    killer.join()
    assert same(found, reference)
    held = Counter(name.split("-")[1] for name in names(tmp_path, "victim"))
    others = Counter(name.split("-")[1] for name in names(tmp_path, "other"))
    assert held and loader.report.why_not[victim.url]
    assert set(held.values()) == {1} and others == Counter(map(str, range(COUNT)))
    made = Counter(loader.report.made) - before
    assert made[victim.url] == 0 and made.total() == COUNT
    assert set(made) <= {"here", *all_of_them[1:]}


def names(folder: Path, which: str) -> list[str]:
    return [each.name for each in folder.glob(f"{which}-*")]


def kill_at_work(victim: EmbeddedServer, folder: Path) -> None:
    until = time.monotonic() + 120
    while not names(folder, "victim") and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)


@settings(max_examples=examples(6), deadline=None)
@given(
    reads=st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    computes=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(0, 1),
)
def test_the_same_batches_for_any_pipeline(
    workers: list[EmbeddedServer], reads: list[str], computes: list[str], batch_size: int, num_workers: int
) -> None:
    data = dataset("tests.dataloader.toy_datasets:Chained", count=17, reads=reads, computes=computes)
    arguments: dict[str, Any] = {"batch_size": batch_size, "seed": 3}
    reference = list(DataLoader(data, **arguments))
    never = DataLoader(data, workers=urls(workers), offload="never", num_workers=num_workers, **arguments)
    assert same(list(never), reference)
    for number, (candidate, ratio) in enumerate(product(CANDIDATES, (0.3, 1.0))):
        count = 1 + (number + batch_size) % 2
        offload = Offloading(candidate=candidate, ratio=ratio)
        loader = DataLoader(
            data, workers=urls(workers[:count]), offload=offload, num_workers=num_workers, **arguments
        )
        assert same(list(loader), reference)
        assert Counter(loader.report.made).total() == 17 and not loader.report.why_not


@pytest.mark.parametrize("offload", ["always", Offloading(candidate="p2", ratio=0.5)])
def test_a_sample_that_cannot_be_made_and_is_not_asked_for_does_no_harm(
    workers: list[EmbeddedServer], offload: Any
) -> None:
    """The sampler may leave out broken samples: sample 0 is nothing special."""
    data = dataset("tests.dataloader.toy_datasets:Broken", count=12, bad=[0])
    loader = DataLoader(
        data, batch_size=3, sampler=list(range(1, 12)), workers=urls(workers), offload=offload
    )
    found = [index for batch in loader for index in batch[1].tolist()]
    assert found == list(range(1, 12))
    assert sum(loader.report.made.get(url, 0) for url in urls(workers)) >= 5


def test_a_sample_that_cannot_be_made_takes_its_batch_and_no_other(workers: list[EmbeddedServer]) -> None:
    data = dataset("tests.dataloader.toy_datasets:Broken", count=12, bad=[0])
    loader = DataLoader(data, batch_size=3, workers=urls(workers), offload="always")
    for _ in range(2):
        iterator = iter(loader)
        with pytest.raises(LookupError, match="sample 0 is gone"):
            next(iterator)
        assert [batch[1].tolist() for batch in iterator] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert sum(loader.report.made.get(url, 0) for url in urls(workers)) == 18


def test_where_none_can_be_made_here_nobody_is_asked_and_that_is_said(workers: list[EmbeddedServer]) -> None:
    data = dataset("tests.dataloader.toy_datasets:Broken", count=6, bad=list(range(6)))
    loader = DataLoader(data, batch_size=3, workers=urls(workers), offload="always")
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(LookupError):
            next(iterator)
    assert list(iterator) == [] and not loader.report.made
    assert "no sample could be made here" in loader.report.why_not[workers[0].url]


@pytest.mark.full
def test_workers_on_this_machine_for_a_try(reference: list[list[Any]]) -> None:
    loader = DataLoader(named(), batch_size=7, seed=3, workers=2, offload="always")
    assert same([list(loader) for _ in range(2)], reference)
    assert len(loader.report.made) == 2 and "here" not in loader.report.made


def test_two_epochs_side_by_side(workers: list[EmbeddedServer], reference: list[list[Any]]) -> None:
    loader = DataLoader(named(), batch_size=7, seed=3, workers=urls(workers), offload="always")
    one, two = iter(loader), iter(loader)
    pairs = list(zip(one, two, strict=True))
    assert same([[first for first, _ in pairs], [second for _, second in pairs]], reference)


@pytest.mark.parametrize(
    ("persistent", "left_early", "asks"),
    [
        pytest.param(False, False, False, marks=pytest.mark.full),
        (True, True, True),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in product((False, True), repeat=3)
            if any(each) and not all(each)
        ),
    ],
)
def test_no_thread_process_or_memory_outlives_a_loader(
    workers: list[EmbeddedServer], persistent: bool, left_early: bool, asks: bool
) -> None:
    offload = Offloading(candidate="p2", ratio=0.5)
    arguments = {"workers": urls(workers), "offload": offload} if asks else {}
    with nothing_left():
        loader = DataLoader(
            named("Noisy"), batch_size=4, num_workers=2, persistent_workers=persistent, **arguments
        )
        list(loader)
        iterator = iter(loader)
        next(iterator)
        if not left_early:
            list(iterator)
        del loader, iterator


INTERRUPTED = """
import multiprocessing, os, signal, sys
from upriver.dataloader import DataLoader, dataset, epoch

url, worker, where, num_workers = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs behind it

def interrupt(*args):
    os.kill(os.getpid(), signal.SIGINT)

data = dataset("tests.dataloader.toy_datasets:Slow", count=600)
loader = DataLoader(data, batch_size=7, num_workers=num_workers, workers=[url], offload="always")
for number, batch in enumerate(loader):
    if number == 0:
        print(*(each.pid for each in multiprocessing.active_children()), flush=True)
        os.kill(worker, signal.SIGSTOP)
        epoch.Epoch._call_back = interrupt  # once nothing comes any more
        if where == "training":
            interrupt()
"""


@pytest.mark.parametrize(
    ("where", "num_workers"),
    [
        ("waiting", 2),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("waiting", 0), ("training", 0), ("training", 2))
        ),
    ],
)
@pytest.mark.full
def test_a_job_that_is_interrupted_ends_also_where_a_worker_hangs(where: str, num_workers: int) -> None:
    worker = EmbeddedServer.start_worker(ALLOW, workers=1)
    try:
        command = [sys.executable, "-c", INTERRUPTED, worker.url, str(worker.pid), where, str(num_workers)]
        job = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        worker.close()
    assert job.returncode == -signal.SIGINT and "KeyboardInterrupt" in job.stderr, job.stderr
    processes = [int(each) for each in job.stdout.split()]
    assert len(processes) == num_workers
    wait_for(lambda: not any(map(psutil.pid_exists, processes)))
    names = set(job.stdout.split())
    wait_for(lambda: not [each for each in os.listdir("/dev/shm") if names & set(each.split("_"))])


def kinds(numbers: list[int]) -> dict[str, Any]:
    """Return the same numbers as samplers give them."""
    return {
        "numpy": SubsetRandomSampler(list(np.array(numbers))),  # type: ignore[arg-type]
        "small": list(np.array(numbers, dtype=np.uint16)),
        "tensors": list(torch.tensor(numbers)),
    }


@pytest.mark.parametrize("kind", ["numpy", "small", "tensors"])
def test_numbers_of_any_type_are_sent(workers: list[EmbeddedServer], kind: str) -> None:
    numbers = np.random.default_rng(2).permutation(COUNT).tolist()

    def made(sampler: Any, **arguments: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(4)
        if isinstance(sampler, SubsetRandomSampler):
            sampler.generator = generator
        loader = DataLoader(named(), batch_size=7, seed=3, sampler=sampler, **arguments)
        batches = list(loader)
        if arguments:
            assert "here" not in loader.report.made and sum(loader.report.made.values()) == COUNT
        return batches

    plain = SubsetRandomSampler(numbers) if kind == "numpy" else numbers
    here = made(plain)
    assert same(made(kinds(numbers)[kind]), here), "a sample draws the same by whatever number it is asked"
    there = made(kinds(numbers)[kind], workers=urls(workers), offload=Offloading(candidate="p2"))
    assert same(there, here)


def test_samples_by_numbers_that_cannot_be_sent_are_made_here(workers: list[EmbeddedServer]) -> None:
    arguments: dict[str, Any] = {"batch_size": 3, "seed": 3, "sampler": [5, -1, 4, 2, -60, 0, 3, 1]}
    here = list(DataLoader(named(), **arguments))
    loader = DataLoader(named(), workers=urls(workers), offload="always", **arguments)
    assert same(list(loader), here)
    assert loader.report.made.get("here") == 6 and not loader.report.why_not


def test_why_samples_are_made_where_they_are(workers: list[EmbeddedServer]) -> None:
    assert DataLoader(named()).why == "no workers were named"
    settled = [{}, {"workers": urls(workers), "offload": "never"}, {"workers": urls(workers)}]
    assert [DataLoader(named(), **each).decided for each in settled] == [True, True, False]
    assert "'never'" in DataLoader(named(), workers=urls(workers), offload="never").why
    forced = Offloading(candidate="p2", ratio=0.3)
    assert "ratio=0.3" in DataLoader(named(), workers=urls(workers), offload=forced).why
    assert "not decided yet" in DataLoader(named(), workers=urls(workers)).why


def test_what_cannot_be_is_refused_by_name() -> None:
    for arguments, says in (
        ({"dataset": named().dataset, "workers": ["http://w:1"]}, "upriver.dataset"),
        ({"dataset": named(), "workers": ["w:1"]}, "http://HOST:PORT"),
        ({"dataset": named(), "workers": [5]}, "http://HOST:PORT"),
        ({"dataset": named(), "offload": "sometimes"}, "an AutoOffload or an Offloading, got 'sometimes'"),
        ({"dataset": named(), "offload": 0.5}, "Offloading"),
        ({"dataset": named(), "workers": -1}, "workers"),
        ({"dataset": named(), "workers": ""}, "workers must be a list of addresses .* got ''"),
        ({"dataset": named(), "workers": "http://w:1"}, "workers must be a list of addresses"),
        ({"dataset": named(), "workers": None}, "got None"),
        ({"dataset": named(), "workers": 2.5}, "got 2.5"),
        ({"dataset": named(), "workers": True}, "workers"),
    ):
        with pytest.raises(ConfigError, match=says):
            DataLoader(**arguments)
    for plan, says in (({"candidate": "p4"}, "p1, p2, p3"), ({"candidate": "p1", "ratio": 1.5}, "ratio")):
        with pytest.raises(ConfigError, match=says):
            Offloading(**plan)
