"""Test the benchmark of cold starts from a store that limits the rate of each connection."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.cold_connections import __main__ as cold_connections
from benchmarks.cold_connections.__main__ import KNOWN, NAMES, SEQUENTIAL, load_number, text
from benchmarks.harness.children import module_command


@pytest.mark.full
def test_every_load_answers_right_and_the_report_says_so(tmp_path: Path) -> None:
    # It runs in a process of its own, because it forks: that process must not have computed anything.
    argv = module_command("cold_connections", "--quick", "--out", tmp_path)
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    told = (tmp_path / "cold_connections_quick.md").read_text()
    assert "SqueezeNet" in told and f"{len(NAMES)} of {len(NAMES)} answers" in told


def test_the_report_counts_what_is_sooner_and_what_is_near_the_best() -> None:
    def a_run(answered_s: float, began: int) -> dict[str, object]:
        return {"answered_s": answered_s, "equal": answered_s < 9, "began": began, "ended": 2 * began}

    def runs(first: float, last: float, told: float) -> dict[str, list[dict[str, object]]]:
        found = {load_number(number): [a_run(first, number)] for number in range(1, cold_connections.LOADS)}
        return {
            **found,
            load_number(cold_connections.LOADS): [a_run(last, 4)],
            KNOWN: [a_run(told, 8)],
            SEQUENTIAL: [a_run(9.0, 8)],
        }

    found = {"gpt2": runs(2.0, 1.0, 0.95), "vgg19": runs(2.0, 1.5, 1.0), "resnet50": runs(2.0, 2.5, 1.0)}
    told = text(found, dict.fromkeys(found, 500_000_000))
    assert "sooner than the first: 2 of 3. Within 10% of one that is told: 1 of 3." in told
    assert "18 of 21 answers" in told
    assert "1 to 2" in told and "4 to 8" in told
