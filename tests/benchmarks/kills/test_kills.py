"""Test the parts of `kills`: its draws, its comparison, its leftovers, its report."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.kills import __main__ as kills
from benchmarks.kills.__main__ import FULL, QUICK, Pace, Setting
from benchmarks.kills.job import Difference, Outcome, make_data, through_servers
from benchmarks.kills.killer import PORTS, Target, drawn, free_ports
from benchmarks.kills.leftovers import ENTRY, Seen, alive, groups_of, is_open, memory_of, strays
from benchmarks.kills.report import faults, report, verdict, wrong

WANTED = Outcome(
    epochs=((0, 1, 2), (2, 0, 1)),
    losses=(torch.tensor(0.5), torch.tensor(0.25)),
    weights={"head.bias": torch.tensor([1.0, 2.0])},
    samples={"http://127.0.0.1:1": 4, "local": 2},
    retried=0,
)

NONE = Difference(lost=0, doubled=0, moved=0, losses=0, weights=())


def row(**other: Any) -> dict[str, Any]:
    return {
        "seed": 0,
        "commit": "abc",
        "wanted_kills": 2,
        "kills": [
            {"at_s": 5.0, "server": 0, "kind": "front"},
            {"at_s": 10.01, "server": 1, "kind": "worker"},
        ],
        "ended_by_themselves": [],
        "lost": 0,
        "doubled": 0,
        "moved": 0,
        "losses": 0,
        "weights": 0,
        "through_servers": 0.81,
        "retried": 3,
        "undisturbed_s": 20.0,
        "least_s": 75.0,
        "seconds": 80.0,
        "fronts": 3,
        "processes": 7,
        "memory": 40,
        "groups": 5,
        "left": {},
        **other,
    }


# -------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("seed", range(20))
def test_fronts_and_workers_of_both_servers_are_drawn(seed: int) -> None:
    targets = drawn(random.Random(seed), 10)
    assert len(targets) == 10 and len(set(targets)) == 4
    assert targets == drawn(random.Random(seed), 10)


def test_seeds_draw_differently_and_few_are_no_more_than_asked_for() -> None:
    assert len({tuple(drawn(random.Random(seed), 10)) for seed in range(5)}) == 5
    targets = drawn(random.Random(0), 2)
    assert len(set(targets)) == 2 and all(isinstance(target, Target) for target in targets)


# ----------------------------------------------------------------------------------------------- comparison


def test_equal_runs_do_not_differ() -> None:
    again = replace(WANTED, losses=[loss.clone() for loss in WANTED.losses], samples={}, retried=9)
    assert Difference.of(again, WANTED) == NONE
    assert not Difference.of(again, WANTED)


@pytest.mark.parametrize(
    ("epochs", "difference"),
    [
        (((0, 1), (2, 0, 1)), replace(NONE, lost=1, moved=1)),
        (((0, 1, 2),), replace(NONE, lost=3, moved=3)),
        (((0, 1, 2, 2), (2, 0, 1)), replace(NONE, doubled=1, moved=1)),
        (((0, 1, 1), (2, 0, 1)), replace(NONE, lost=1, doubled=1, moved=1)),
        (((1, 0, 2), (2, 0, 1)), replace(NONE, moved=2)),
        # A sample in another epoch does not count for its own.
        (((0, 1, 2, 2), (0, 1)), replace(NONE, lost=1, doubled=1, moved=4)),
    ],
)
def test_samples_that_are_lost_doubled_or_moved_are_counted(
    epochs: Sequence[Sequence[int]], difference: Difference
) -> None:
    found = Difference.of(replace(WANTED, epochs=epochs), WANTED)
    assert found == difference and found


def test_one_bit_is_a_difference() -> None:
    nearly = torch.nextafter(WANTED.losses[1], torch.tensor(1.0))
    assert Difference.of(replace(WANTED, losses=(WANTED.losses[0], nearly)), WANTED).losses == 1
    assert Difference.of(replace(WANTED, losses=WANTED.losses[:1]), WANTED).losses == 1
    bias = torch.nextafter(WANTED.weights["head.bias"], torch.tensor(9.0))
    for weights in ({"head.bias": bias}, {}, {**WANTED.weights, "head.more": bias}):
        assert len(Difference.of(replace(WANTED, weights=weights), WANTED).weights) == 1


def test_the_share_of_servers_is_what_was_not_made_here() -> None:
    assert WANTED.through_servers == pytest.approx(4 / 6)
    assert replace(WANTED, samples={"http://127.0.0.1:1": 6}).through_servers == 1
    assert replace(WANTED, samples={}).through_servers == 0


def test_a_target_says_which_sample_it_is(tmp_path: Path) -> None:
    data = make_data(tmp_path, 12)
    assert data.targets.tolist() == list(range(12))


# -------------------------------------------------------------------------------------------------- leftovers


def test_shared_memory_is_seen_open_and_mapped_and_not_once_it_is_gone() -> None:
    seen = Seen()
    descriptor = os.memfd_create("upriver-test")
    other = os.memfd_create("another-test")
    try:
        inode = os.fstat(descriptor).st_ino
        assert inode in memory_of(os.getpid())
        assert os.fstat(other).st_ino not in memory_of(os.getpid())
        seen.memory.add(inode)
        assert seen.left() == {"shared memory": [f"inode {inode} in process {os.getpid()}"]}
    finally:
        os.close(descriptor)
        os.close(other)
    assert seen.left() == {}


def test_a_worker_is_known_by_the_front_that_its_command_line_names() -> None:
    path = os.path.join(os.sep, "nowhere", ENTRY)
    command = [sys.executable, "-c", "input()", "-P", path, "3", "999999", "{}"]
    seen = Seen()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            assert list(strays({999999})) == [process.pid]
            assert list(strays({999998})) == []
            seen.fronts.add(999999)
            assert seen.left_after(0.0) == {"process": [str(process.pid)]}
        finally:
            process.kill()
    assert seen.left() == {}


def test_descendants_are_seen_and_a_zombie_is_gone() -> None:
    script = "import subprocess, sys; subprocess.Popen(['cat']); print('up', flush=True); input()"
    command = [sys.executable, "-c", script]
    seen = Seen()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        front = psutil.Process(process.pid)
        seen.look(front)
        assert len(seen.processes) == 2 and front in seen.processes
        (child,) = seen.processes - {front}
        front.kill()
        child.kill()
        process.wait()
    assert not alive(front)
    assert seen.left_after(10.0) == {}


def test_a_port_is_open_while_somebody_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert is_open(port)
        assert Seen().left([port]) == {"port": [str(port)]}
    assert not is_open(port)
    ports = free_ports(2)
    assert len(set(ports)) == 2 and set(ports) <= set(PORTS)


def test_control_groups_are_found_by_the_number_of_their_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "upriver-999917-4-1",
        "upriver-999917-4-front",
        "upriver-999918-4-1",
        "upriver-999917-4",
        "other",
    ):
        (tmp_path / "memory" / "box" / name).mkdir(parents=True)
    monkeypatch.setattr("benchmarks.kills.leftovers.GROUPS", tmp_path)
    assert [Path(path).name for path in sorted(groups_of({999917}))] == [
        "upriver-999917-4-1",
        "upriver-999917-4-front",
    ]
    seen = Seen(fronts={999918})
    assert list(seen.left()) == ["control group"]


# ----------------------------------------------------------------------------------------------------- report


def test_a_run_without_faults_is_met_and_one_with_faults_names_them() -> None:
    assert faults(row()) == []
    assert verdict([row(), row(seed=1), row(seed=2)], 3).startswith("Met. 6 kills: no sample lost")
    assert verdict([row()], 3).startswith("Met so far, 1 of 3 runs.")
    assert verdict([], 3) == "Not run yet."
    bad = {
        "lost": 1,
        "doubled": 2,
        "moved": 3,
        "losses": 4,
        "weights": 5,
        "through_servers": 0.5,
        "wanted_kills": 3,
        "ended_by_themselves": [1],
        "left": {"process": ["17"]},
    }
    for name, value in bad.items():
        assert len(faults(row(**{name: value}))) == 1, name
        assert len(wrong(row(**{name: value}))) == (name != "through_servers"), name
    text = verdict([row(), row(**bad)], 2)
    assert text.startswith("Missed: samples lost: 1") and "left at the end: process 17" in text


def test_the_page_has_every_run_and_every_kill() -> None:
    page = report([row(), row(seed=1, lost=2)], 3, every_s=5.0)
    assert "Missed so far, 2 of 3 runs: samples lost: 2" in page
    assert "| 0 | 1 fronts, 1 workers | 3 and 7 | 81% | 3 | 20 | 75 | 80 | none |" in page
    assert "| 1 | 10.0 | 1 | worker |" in page
    assert "80 pieces of shared memory" in page and "10 control groups" in page


def test_only_what_comes_under_kills_counts_for_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kills, at 105 and 110 s: everything is made here from the first one until 5 s after the second."""
    now = 100.0
    delivered = {"http://127.0.0.1:1": 0, "local": 0}
    killer = SimpleNamespace(began=0.0)
    killer.begin = lambda: setattr(killer, "began", now)
    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: None)
    monkeypatch.setattr(kills, "time", clock)
    setting = Setting(kills=2, every_s=5.0, samples=200, epochs=2, seeds=(0,))
    pace = Pace(setting, killer)  # type: ignore[arg-type]
    for step in range(1, 31):  # a second each
        source = "local" if 105.0 < now <= 115.0 else "http://127.0.0.1:1"
        delivered[source] += 20
        job = SimpleNamespace(report=SimpleNamespace(samples=dict(delivered)))
        pace(step, job)  # type: ignore[arg-type]
        now += 1.0
    assert pace.samples == {"http://127.0.0.1:1": 0, "local": 200}
    assert through_servers(pace.samples) == 0.0
    assert through_servers(delivered) == pytest.approx(2 / 3)


def test_the_job_lasts_until_the_last_kill_has_shown() -> None:
    for setting in (FULL, QUICK):
        assert setting.least_s >= (setting.kills + 1) * setting.every_s


def test_the_job_outlasts_the_kills() -> None:
    for setting in (FULL, QUICK):
        assert setting.least_s > setting.kills * setting.every_s
        assert setting.steps > 2 * setting.kills
    assert FULL.kills * FULL.every_s == 60
