"""Check that OpenMP's threads do not spin on cores that a load needs, and otherwise stay unchanged."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from upriver.coldstart.fetch.openmp_wait import sleep_sooner

SCRIPT = """
import os, threading, time
from pathlib import Path
import torch
from upriver.coldstart.fetch.openmp_wait import sleep_sooner

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
def test_threads_sleep_soon_while_somebody_needs_the_cores_and_spin_again_after_it() -> None:
    pool, num_threads, added, sleep_soon, spin_again = found(2, cores=2)
    assert (pool, num_threads, added) == ("1", "2", "2")
    assert (sleep_soon, spin_again) == ("True", "True")


def test_one_thread_has_nobody_to_wait_for() -> None:
    assert found(1, cores=1)[:3] == ["0", "1", "1"]


def test_a_process_without_openmp_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    sleep_sooner()
