"""Check the CPU seconds of processes that make samples here, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from upriver.dataloader import DataLoader
from upriver.dataloader.local.cpu_seconds import CpuSeconds


def burn(seconds: float, done: Any, over: Any) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    done.set()
    over.wait()


class Child:
    """A process that has used some CPU seconds, and stays."""

    def __init__(self, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self.done, self.over = context.Event(), context.Event()
        self.process = context.Process(target=burn, args=(seconds, self.done, self.over), daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> None:
        self.over.set()
        self.process.join()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(0.055)
    yield child
    child.end()


def of_others(clock: CpuSeconds) -> float:
    clock()
    return clock._theirs


def test_they_are_those_of_loader_processes_too(child: Child) -> None:
    """The error is below the hundredths of a second in which /proc counts."""
    clock = CpuSeconds(lambda: [child.pid])
    assert child.done.wait(60)
    there = of_others(clock)
    assert 0.055 <= there < 0.5 and round(there, 2) != there


def test_what_a_process_has_used_is_not_lost_when_it_ends(child: Child) -> None:
    clock = CpuSeconds(lambda: [child.pid])
    assert child.done.wait(60)
    before = clock()
    assert of_others(clock) >= 0.055
    child.end()
    assert clock() >= before and of_others(clock) >= 0.055


def test_a_number_that_another_process_has_again_counts_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([3.0, None, 1.0, 1.5])
    monkeypatch.setattr("upriver.dataloader.local.cpu_seconds._cpu_seconds_of", lambda pid: next(seen))
    clock = CpuSeconds(lambda: [7])
    assert [of_others(clock) for _ in range(4)] == [3.0, 3.0, 3.0, 3.5]


class Burning:
    """Return the process that made a sample, and the CPU seconds that it has used since its start."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float]:
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass
        return os.getpid(), time.process_time()


def test_a_loaders_processes_are_counted_and_nobody_elses(child: Child) -> None:
    assert child.done.wait(60)
    loader = DataLoader(Burning(), batch_size=None, num_workers=2, persistent_workers=True)
    used = dict(list(loader))
    assert loader._kept is not None
    assert set(loader._kept.pids()) == set(used) and child.pid not in used
    assert of_others(CpuSeconds(loader._kept.pids)) >= sum(used.values())
    assert of_others(CpuSeconds()) == 0
