"""Check loader processes: the order of their tasks, and the origin of their errors."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate, get_worker_info

from tests.examples import some
from tests.server.running import wait_for
from upriver.dataloader import DataLoader, dataset
from upriver.dataloader.local import shared_memory
from upriver.dataloader.local.torch_processes import MAKES_WAY, ended_by, why_ended
from upriver.dataloader.local.workers import LoaderProcesses, SampleMaker
from upriver.dataloader.tasks import Arrivals, Task
from upriver.pipeline.mapstyle import MapStyle
from upriver.types import DONE, RAW, START


class Slow:
    """Read quickly and compute slowly; some samples cannot be read, others cannot be computed."""

    def read(self, index: int) -> int:
        if index % 10 == 7:
            raise LookupError(f"no {index}")
        return index

    def transform(self, raw: int) -> int:
        time.sleep(0.01)
        if raw % 10 == 3:
            raise ValueError(f"bad {raw}")
        return -raw

    def __getitem__(self, index: int) -> int:
        return self.transform(self.read(index))


class Niceness(Slow):
    """Return the niceness of the process that computes the sample."""

    def transform(self, raw: int) -> int:
        return os.nice(0)


def task(number: int, stop: int) -> Task:
    return Task(
        number=number,
        epoch=0,
        batch=0,
        indices=(number,),
        samples=(number,),
        whole=False,
        start=START,
        stop=stop,
    )


def run(
    tasks: list[Task], num_workers: int, given_first: int, dataset: Slow | None = None, **options: Any
) -> list[Any]:
    arrivals: Arrivals = SimpleQueue()
    maker = SampleMaker(MapStyle(dataset or Slow()), default_collate)
    processes = LoaderProcesses(maker, num_workers=num_workers, **options)
    running = processes.start(arrivals, tasks[:given_first])
    for each in tasks[given_first:]:
        running.give(each)
    found = [arrivals.get(timeout=60) for _ in tasks]
    processes.stop()
    return found


@pytest.mark.parametrize("num_workers", some(1, [2, 1]))
@pytest.mark.parametrize("given_first", some(2, [0, 5, 60]))
def test_every_result_and_every_error_is_that_of_its_task(num_workers: int, given_first: int) -> None:
    tasks = [task(number, RAW if number % 3 else DONE) for number in range(60)]
    found = {arrival.number: arrival for arrival in run(tasks, num_workers, given_first)}
    assert len(found) == 60
    for number, arrival in found.items():
        reads = number % 3 != 0
        if number % 10 == 7:
            assert f"no {number}" in str(arrival.error) and arrival.final
        elif number % 10 == 3 and not reads:
            assert f"bad {number}" in str(arrival.error) and arrival.final
        else:
            assert arrival.value == [number if reads else -number]


class Strided(Slow):
    """Return tensors of any memory order, and samples of all other kinds."""

    def read(self, index: int) -> int:
        return index

    def transform(self, raw: int) -> Any:
        torch.manual_seed(raw)
        values = torch.rand(4, 6)
        return {
            "turned": values.t(),
            "part": (values[1:3, ::2], values.to(torch.float64)[2, 3]),
            "repeated": torch.tensor([raw]).expand(5),
            "none": [values[:0], values.bool()],
            "as it is": torch.nn.Parameter(values.clone()) if raw == 3 else None,
            "else": (values.numpy()[0], f"{raw}", None, raw),
            "array": np.random.default_rng(raw).random((3, 4, 5)).transpose(2, 0, 1),
            "stored": np.frombuffer(values.numpy().tobytes()).reshape(2, 6).T[::-1],
            "words": np.array([f"{raw}"]),
        }


def test_samples_come_with_their_strides_and_take_a_descriptor_a_task() -> None:
    samples = tuple(range(50))
    tasks = [task(number, DONE)._replace(indices=samples, samples=samples) for number in range(6)]
    before = len(os.listdir("/proc/self/fd"))
    dataset = Strided()
    found = run(tasks, 1, 6, dataset)
    assert len(os.listdir("/proc/self/fd")) - before < 6 * (1 + 5), "a few are as they were"
    expected = [dataset.transform(number) for number in samples]
    assert all(alike(arrival.value, expected) for arrival in found)


class Columns(Slow):
    """Return samples that lie apart in one large tensor."""

    def __init__(self) -> None:
        self.table = torch.arange(1000 * 24.0).reshape(4, 6, 1000)

    def read(self, index: int) -> torch.Tensor:
        return self.table[..., index]

    def transform(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.t()


def test_of_samples_that_lie_far_apart_nothing_else_comes_along() -> None:
    dataset = Columns()
    samples = tuple(range(5))
    (arrival,) = run([task(0, DONE)._replace(indices=samples, samples=samples)], 1, 1, dataset)
    for number, sample in enumerate(arrival.value):
        assert torch.equal(sample, dataset.transform(dataset.read(number))) and sample.stride() == (1, 6)
        assert sample.untyped_storage().nbytes() < 5 * 128


class Twice(Slow):
    """Return a tensor, and an array over the same memory."""

    def read(self, index: int) -> torch.Tensor:
        return torch.full((1000,), float(index))

    def transform(self, raw: torch.Tensor) -> Any:
        return raw, raw.numpy()


@pytest.mark.parametrize("count", [1, 5])
def test_an_array_over_the_memory_of_a_tensor_is_what_that_is(count: int) -> None:
    samples = tuple(range(count))
    tasks = [task(number, DONE)._replace(indices=samples, samples=samples) for number in range(20)]
    for arrival in run(tasks, 1, 20, Twice()):
        for number, (tensor, array) in enumerate(arrival.value):
            assert (tensor == number).all() and (array == number).all()


def alike(one: Any, other: Any) -> bool:
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(map(same_leaf, leaves, others))


def same_leaf(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        strides = [np.empty_like(each).strides for each in (one, other)]  # as they are without gaps
        return type(one) is type(other) and np.array_equal(one, other) and strides[0] == strides[1]
    kept = [(type(each), each.dtype, each.requires_grad, each.stride()) for each in (one, other)]
    return kept[0] == kept[1] and torch.equal(one, other)


def test_reading_for_others_comes_before_what_is_done_here() -> None:
    tasks = [task(number, DONE) for number in range(1, 40, 10)] * 1 + [
        task(number, RAW) for number in range(40, 44)
    ]
    order = [arrival.number for arrival in run(tasks, 1, len(tasks))]
    assert set(order[:4]) == {40, 41, 42, 43}


def test_they_make_way_for_the_process_that_trains_whatever_else_they_begin_with(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = os.nice(0)
    found = run([task(0, DONE)], 1, 1, Niceness(), worker_init_fn=lambda number: os.write(1, b"begun"))
    assert found[0].value == [min(19, before + MAKES_WAY)] and os.nice(0) == before
    assert capfd.readouterr().out == "begun"


class Noted:
    """A sample that records which thread releases it last."""

    threads: ClassVar[list[str]] = []

    def __del__(self) -> None:
        Noted.threads.append(threading.current_thread().name)


class Noting(Slow):
    """Make `Noted` samples."""

    def __len__(self) -> int:
        return 30

    def transform(self, raw: int) -> Noted:
        return Noted()


@pytest.mark.parametrize("room", [True, False])
def test_another_thread_lets_go_of_what_was_handed_out_where_memory_is_not_short(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "ROOM_BYTES", 0 if room else 2**62)
    monkeypatch.setattr(Noted, "threads", [])
    loader = DataLoader(
        Noting(), batch_size=None, num_workers=1, collate_fn=lambda made: made, sampler=[1] * 30
    )
    for number, made in enumerate(loader, start=1):
        assert isinstance(made, Noted) and len(Noted.threads) < number
        del made
        time.sleep(0.02)  # the accelerator's turn
    del loader
    gc.collect()
    wait_for(lambda: len(Noted.threads) >= 30)  # nothing is kept: the other thread releases at its end
    assert len(Noted.threads) == 30
    assert ("upriver-here" in Noted.threads) is room


class Opened:
    """Return the state in which a loader process started: the file that each opens, and its generators."""

    file: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None and info.dataset is self
        return (*self.file, info.id, info.num_workers, info.seed)


def opened(number: int) -> None:
    """Open a file in each worker, as PyTorch's documentation shows."""
    info = get_worker_info()
    assert info is not None and info.id == number
    drawn = torch.initial_seed(), torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()
    info.dataset.file = (f"file {number}", info.seed, *drawn)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_what_a_process_begins_with_is_the_users_dataset_and_pytorchs_seeds(context: str) -> None:
    def found(kind: Any, dataset: Any) -> Any:
        torch.manual_seed(5)
        loader = kind(
            dataset,
            batch_size=2,
            num_workers=2,
            collate_fn=list,
            worker_init_fn=opened,
            multiprocessing_context=context,
        )
        return [list(loader) for _ in range(2)]

    theirs = found(TorchLoader, Opened())
    assert found(DataLoader, Opened()) == theirs
    assert found(DataLoader, dataset("tests.dataloader.local.test_workers:Opened")) == theirs


class Deadly:
    """Kill the process at one sample, once, as a lack of memory may."""

    def __init__(self, done: Path) -> None:
        self.done = done

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 17 and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("persistent", some(1, [False, True]))
def test_a_process_that_is_killed_is_told_and_nobody_waits_for_it(
    num_workers: int, persistent: bool, tmp_path: Path
) -> None:
    loader = DataLoader(
        Deadly(tmp_path / "done"), batch_size=2, num_workers=num_workers, persistent_workers=persistent
    )
    iterator, found, raised, states = iter(loader), dict[int, list[int]](), [], []
    while True:
        try:
            batch = next(iterator).tolist()
        except StopIteration:
            break
        except RuntimeError as error:
            raised.append(str(error))
            states.append(loader.state_dict())
        else:
            found[loader.state_dict()["batches"] - 1] = batch
    assert all(batch == [2 * at, 2 * at + 1] for at, batch in found.items()) and 8 not in found
    assert raised and all("killed by SIGKILL" in each for each in raised), raised
    assert len(found) + len(raised) == 20
    first = states[0]["batches"]
    assert set(range(first)) <= set(found) and first <= 8  # no lost sample counts as handed out
    other = DataLoader(Deadly(tmp_path / "done"), batch_size=2, num_workers=num_workers)
    other.load_state_dict({**states[0], "seed": other.seed})
    assert [batch.tolist() for batch in other] == [[2 * at, 2 * at + 1] for at in range(first, 20)]
    assert len(list(loader)) == 20  # with others


class Leaving:
    """Exit the process at one sample."""

    def __init__(self, leave: Callable[[int], None], code: int) -> None:
        self.leave, self.code = leave, code

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 13:
            self.leave(self.code)
        return index


def ended(told: BaseException) -> int | None:
    """Return the process that the error names."""
    found = re.search(r"DataLoader worker \(pid\(s\) (\d+)\) exited unexpectedly, with", str(told))
    return int(found[1]) if found is not None else None


@pytest.mark.parametrize("num_workers", some(1, [2, 1]))
@pytest.mark.parametrize("persistent", some(1, [False, True]))
@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_dataset_that_exits_ends_its_process_and_loses_no_batch_before(
    num_workers: int, persistent: bool, code: int
) -> None:
    loader = DataLoader(
        Leaving(sys.exit, code), batch_size=2, num_workers=num_workers, persistent_workers=persistent
    )
    iterator = iter(loader)
    pids = {each.pid for each in multiprocessing.active_children()}
    assert [next(iterator).tolist() for _ in range(6)] == [[2 * at, 2 * at + 1] for at in range(6)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"with exit code {code}$") as caught:
            next(iterator)
        assert ended(caught.value) in pids
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)  # with others, which reach the same sample


class Stopped(BaseException):
    """An exception that is no error, as frameworks use for cancellation."""


def stopped(code: int) -> None:
    raise (KeyboardInterrupt, Stopped("by hand"), asyncio.CancelledError)[code]


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("code", "said"), some(1, enumerate(["KeyboardInterrupt", "Stopped: by hand", "CancelledError"]))
)
def test_a_sample_that_is_interrupted_ends_its_process_and_loses_no_batch_before(
    num_workers: int, code: int, said: str
) -> None:
    """PyTorch loses the batch before, and raises an error of the connection."""
    loader = DataLoader(Leaving(stopped, code), batch_size=2, num_workers=num_workers)
    iterator = iter(loader)
    pids = {each.pid for each in multiprocessing.active_children()}
    assert [next(iterator).tolist() for _ in range(6)] == [[2 * at, 2 * at + 1] for at in range(6)]
    with pytest.raises(RuntimeError, match=rf"exited unexpectedly, by {said}$") as caught:
        next(iterator)
    assert any(f"(pid(s) {pid})" in str(caught.value) for pid in pids)
    batches = iter(DataLoader(Leaving(stopped, code), batch_size=2))
    assert [next(batches).tolist() for _ in range(6)] == [[2 * at, 2 * at + 1] for at in range(6)]
    with pytest.raises((KeyboardInterrupt, Stopped, asyncio.CancelledError)) as itself:
        next(batches)
    assert type(itself.value).__name__ == said.partition(":")[0]


def test_why_a_dataset_exits_is_said() -> None:
    loader = DataLoader(Leaving(lambda code: sys.exit("labels.csv is missing"), 1), num_workers=1)
    with pytest.raises(RuntimeError, match=r"with exit code 1: labels\.csv is missing$"):
        list(loader)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_process_that_is_gone_at_once_is_told_with_its_exit_code(num_workers: int) -> None:
    iterator = iter(DataLoader(Leaving(os._exit, 3), batch_size=2, num_workers=num_workers))
    pids = {each.pid for each in multiprocessing.active_children()}
    with pytest.raises(RuntimeError, match=r"with exit code 3$") as caught:
        list(iterator)
    assert ended(caught.value) in pids


def test_what_is_said_of_processes_that_have_ended() -> None:
    assert ended_by(7, 3) == "DataLoader worker (pid(s) 7) exited unexpectedly, with exit code 3"
    assert ended_by(7, -9).endswith("exited unexpectedly, killed by SIGKILL")
    assert ended_by(7, -signal.SIGBUS).endswith("killed by SIGBUS; /dev/shm may be full")
    assert ended_by(7, -99).endswith("killed by signal 99")
    nobody = object()
    assert why_ended(nobody, OSError("too many files")) == "too many files"
    assert why_ended(nobody, EOFError()) == "EOFError"


def test_what_a_process_fails_with_when_it_begins_is_each_batchs(tmp_path: Path) -> None:
    def begin(number: int) -> None:
        raise LookupError("no file")

    loader = DataLoader(Slow(), batch_size=1, sampler=range(3), num_workers=1, worker_init_fn=begin)
    iterator = iter(loader)
    for _ in range(3):
        with pytest.raises(LookupError, match="no file"):
            next(iterator)
    assert next(iterator, None) is None


class Blocked(Slow):
    """Block at one sample until a file exists."""

    def __init__(self, there: Path) -> None:
        self.there = there

    def transform(self, raw: int) -> int:
        while raw == 2 and not self.there.exists():
            time.sleep(0.001)
        return -raw


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_has_not_come_in_time_comes_later(num_workers: int, tmp_path: Path) -> None:
    there = tmp_path / "there"
    loader = DataLoader(Blocked(there), sampler=range(6), num_workers=num_workers, timeout=0.05)
    iterator, found = iter(loader), list[int]()
    for _ in range(2000):
        try:
            found += next(iterator).tolist()
        except RuntimeError as error:
            assert "timed out after 0.05 seconds" in str(error)
            assert loader.state_dict()["batches"] == len(found)
            if len(found) == 2:
                there.touch()
        except StopIteration:
            break
    assert found == [0, -1, -2, -3, -4, -5] and there.exists()
