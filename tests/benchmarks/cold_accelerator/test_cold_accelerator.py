"""Test the benchmark of cold starts on an accelerator, with the processor in its place."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.cold_accelerator.__main__ import Found, text
from benchmarks.harness.children import module_command


def a_run(turn: int, way: str, knob: int, answered_s: float, **more: object) -> dict[str, object]:
    told = {"turn": turn, "model": "gpt2", "run": way, "knob": knob, "started": False, "equal": True}
    return told | {"answered_s": answered_s} | more


@pytest.mark.full
def test_every_way_answers_right_and_the_report_says_so(tmp_path: Path) -> None:
    runs = tmp_path / "cold_accelerator_quick.json"
    # It runs in a process of its own, because it forks: that process must not have computed anything.
    argv = module_command("cold_accelerator", "--quick", "--out", tmp_path)
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    found = Found(**json.loads(runs.read_text()))
    assert not found.failed and all(each["equal"] for each in found.runs)
    kinds = {(each["turn"], each["run"], each["knob"], each["started"]) for each in found.runs}
    assert len(kinds) == len(found.runs) == 2 * 2 * 2 + 2 * 2
    report = runs.with_suffix(".md").read_text()
    assert "SqueezeNet" in report and f"{len(found.runs)} of {len(found.runs)} answers" in report


def test_the_first_turn_chooses_and_does_not_count() -> None:
    found = Found(
        runs=[
            a_run(0, "upriver", 4, 2.0),
            a_run(0, "upriver", 16, 1.0),
            a_run(0, "upriver", 4, 0.1, started=True),
            a_run(1, "upriver", 16, 3.0),
            a_run(2, "upriver", 16, 5.0),
        ]
    )
    assert found.best("gpt2", "upriver") == 16 and found.turns == 2
    assert (spread := found.seconds("gpt2", "upriver", False)) is not None and spread.values == (3.0, 5.0)
    assert found.seconds("gpt2", "upriver", True) is None


def test_the_report_names_what_was_wrong_or_failed_and_counts_who_was_first() -> None:
    ways = ["upriver", "pisel", "sequential"]
    found = Found(
        runs=[
            a_run(1, "upriver", 4, 1.02),
            a_run(1, "pisel", 4, 0.5),
            a_run(1, "sequential", 4, 1.0, equal=False),
        ],
        nbytes={"gpt2": 498_000_000},
        failed=["gpt2, runai: it ended"],
    )
    told = text(found, ways)
    assert "First, or within 3 % of who is: 1 of 1." in told  # our own ways are not compared with each other
    assert "not equal: GPT-2 by sequential, 1 times" in told and "failed: gpt2, runai: it ended" in told
    found.runs[0]["answered_s"] = 1.04
    assert "First, or within 3 % of who is: 0 of 1." in text(found, ways)
