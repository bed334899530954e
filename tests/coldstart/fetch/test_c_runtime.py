"""Check that a load gets cores from OpenMP and memory from the heaps, and otherwise leaves both unchanged."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from upriver.coldstart.fetch.c_runtime import FEWEST_BYTES, HEAP_BYTES, SHARE, HeapTrimmer, sleep_sooner

SCRIPT = """
import os, threading, time
from pathlib import Path
import torch
from upriver.coldstart.fetch.c_runtime import sleep_sooner

TASKS = Path("/proc/self/task")

def threads():
    return {int(each.name) for each in TASKS.iterdir()}

def spun_s():
    "What the other threads of this one's operators take, some operators long."
    def taken_ns():
        return sum(int((TASKS / str(each) / "schedstat").read_text().split()[0]) for each in pool)
    before = taken_ns()
    for _ in range(20):
        values.mul_(-1.0)
        time.sleep(0.02)
    return (taken_ns() - before) / 1e9

def work():
    sleep_sooner()
    asleep.set()
    ends.wait()

first, values = threads(), torch.arange(1 << 20, dtype=torch.float32)
values.mul_(1.0)
pool, asleep, ends = threads() - first, threading.Event(), threading.Event()
before_s, alone = spun_s(), threads()
thread = threading.Thread(target=work)
thread.start()
asleep.wait()
during_s, added = spun_s(), len(threads() - alone)
ends.set()
thread.join()
while threads() != alone:
    time.sleep(0.01)
assert torch.equal(values, torch.arange(1 << 20)), values
print(len(pool), torch.get_num_threads(), added, during_s < before_s / 4, spun_s() > before_s / 4)
"""


def found(num_threads: int, *, cores: int) -> list[str]:
    """Return the output of the script with this number of OpenMP threads on this number of cores."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    spinning = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, allowed)), sys.executable, "-c", SCRIPT],
        env={**spinning, "OMP_NUM_THREADS": str(num_threads)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.full
def test_threads_sleep_soon_while_somebody_needs_the_cores_and_spin_again_after_it() -> None:
    pool, num_threads, added, sleep_soon, spin_again = found(2, cores=2)
    assert (pool, num_threads, added) == ("1", "2", "2")
    assert (sleep_soon, spin_again) == ("True", "True")


@pytest.mark.full
def test_one_thread_has_nobody_to_wait_for() -> None:
    assert found(1, cores=1)[:3] == ["0", "1", "1"]


@pytest.mark.parametrize("functions", [{}, {"GOMP_parallel": object(), "omp_get_max_threads": lambda: 1}])
def test_a_process_without_openmp_or_with_one_thread_is_left_alone(
    functions: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**functions))
    sleep_sooner()


class Allocator:
    """Return memory to the system, in a set time by its own clock."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.now_s, self.times, self._takes_s = 100.0, 0, takes_s

    def trim(self, pad: int) -> int:
        assert pad == 0
        self.now_s += self._takes_s
        self.times += 1
        return 1

    def clock(self) -> float:
        return self.now_s

    def heap(self) -> HeapTrimmer:
        return HeapTrimmer(self.trim, self.clock)


def test_memory_is_given_back_each_time_that_so_much_has_come() -> None:
    allocator = Allocator()
    heap = allocator.heap()
    for number in range(16):
        heap.came(HEAP_BYTES // 4)
        assert allocator.times == (number + 1) // 4


def test_what_takes_long_is_done_less_often() -> None:
    allocator = Allocator(takes_s=0.5)
    heap, wall_s = allocator.heap(), 0.5 / SHARE
    for _ in range(1000):  # each in a second
        heap.came(HEAP_BYTES)
        allocator.now_s += 1.0
    assert allocator.times == pytest.approx(1000 / wall_s, abs=1)


@pytest.mark.parametrize(("nbytes", "times"), [(FEWEST_BYTES - 1, 0), (FEWEST_BYTES, 1), (HEAP_BYTES, 1)])
def test_the_end_gives_back_what_is_worth_it(nbytes: int, times: int) -> None:
    allocator = Allocator()
    heap = allocator.heap()
    heap.came(nbytes)
    heap.ended()
    heap.ended()
    assert allocator.times == times


@pytest.mark.parametrize("do", [HeapTrimmer.ended, lambda heap: heap.came(HEAP_BYTES)])
def test_a_c_library_that_cannot_is_left_alone(do: Callable[[HeapTrimmer], None]) -> None:
    heap = HeapTrimmer(None)
    heap.came(FEWEST_BYTES)
    do(heap)
