"""Test the benchmark of the wire: its page, its records, and a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.children import module_command
from benchmarks.harness.records import Records
from benchmarks.wire.__main__ import FRAMES, FULL, GOAL, QUICK, RAW, SERVER, report, shares, verdict


def turn(raw: list[float], frames: list[float], server: list[float], *, load: float = 0.5) -> dict[str, Any]:
    rates = {RAW: raw, FRAMES: frames, SERVER: server}
    cpu_s = {name: [0.24 * number for number in range(1, 4)] for name in rates}
    return {"commit": "abc", "code": "def", "load": load, "rates": rates, "cpu_s": cpu_s}


TURNS = [
    turn([4e9, 2e9, 1e9], [2e9, 1e9, 0.4e9], [4e8, 4e8, 4e8]),
    turn([4e9, 4e9, 4e9], [1e9, 3e9, 2e9], [4e8, 4e8, 2e8], load=3.25),
]


def test_shares_are_of_the_raw_socket_in_the_same_repeat() -> None:
    assert shares(TURNS[0], FRAMES) == [0.5, 0.5, 0.4]
    assert shares(TURNS[0], RAW) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("frames", "said"), [(GOAL, "**met** (0.40)"), (GOAL - 0.01, "**missed** (0.39)")])
def test_verdict_goes_by_the_median_of_all_repeats(frames: float, said: str) -> None:
    assert verdict([turn([1.0] * 3, [0.1, frames, 0.9], [0.1] * 3)]) == said


def test_report_has_every_row_with_its_range_and_the_load_of_each_turn() -> None:
    text = report(TURNS, FULL)
    assert "by the median: **met** (0.50), with 3 of 5 turns to come." in text
    assert (
        "| raw socket | 4000 (1000 to 4000) | 1.00 (1.00 to 1.00) | 1.00, 1.00 | 20.0 (10.0 to 30.0) |"
        in text
    )
    assert "| frames | 1500 (400 to 3000) | 0.50 (0.25 to 0.75) | 0.50, 0.50 |" in text
    assert "| server | 400 (200 to 400) | 0.10 (0.05 to 0.40) | 0.20, 0.10 |" in text
    assert "its load average was 0.5, 3.2 when" in text and "Commit abc; " in text


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = module_command("wire", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.full
def test_quick_run_keeps_its_turns_and_reports_them(tmp_path: Path) -> None:
    done = run("--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "wire_quick.md").read_text()
    assert text in done.stdout and "turns to come" not in text
    [row] = Records(tmp_path / "wire_quick.jsonl").rows.values()
    assert {name: len(rates) for name, rates in row["rates"].items()} == dict.fromkeys(
        (RAW, FRAMES, SERVER), QUICK.repeats
    )
    assert all(rate > 0 for rates in row["rates"].values() for rate in rates)
    assert all(each > 0 for each in row["cpu_s"][SERVER])
    (tmp_path / "wire_quick.jsonl").write_text(json.dumps({**row, "load": 77.0}) + "\n")
    again = run("--quick", "--report", "--out", tmp_path)
    assert again.returncode == 0 and "its load average was 77.0 when" in again.stdout


@pytest.mark.slow
@pytest.mark.full
def test_report_of_nothing_and_unknown_arguments_are_refused(tmp_path: Path) -> None:
    nothing = run("--report", "--out", tmp_path)
    assert nothing.returncode == 1 and "no turn is recorded" in nothing.stderr
    unknown = run("send-all")
    assert unknown.returncode == 2 and "unknown argument 'send-all'" in unknown.stderr
