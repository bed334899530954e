"""Test the benchmark of a decision: its timings, its page, and a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.decision_time.__main__ import (
    ALGORITHM,
    CHAINS,
    CHOOSING,
    GOAL_US,
    chain,
    decisions,
    measure,
    report,
)
from benchmarks.harness.children import module_command
from benchmarks.harness.long_chain import STAGES


def test_all_that_have_a_choice_decide_and_the_papers_is_its_algorithm() -> None:
    every = decisions()
    assert set(every) == {ALGORITHM, *(f"`{name}`" for name in CHOOSING)}
    assert set(CHOOSING) == {"inference", "loadpart", "neurosurgeon"}
    sums = chain(0)
    assert len(sums.device_s) == STAGES + 1
    cuts = set()
    for upload in (1e4, 1e6, 1e9):
        for load in (1.0, 32.0):
            cut = every[ALGORITHM](sums, upload, load)
            assert every["`loadpart`"](sums, upload, load).cut == cut  # type: ignore[attr-defined]
            cuts.add(cut)
    assert len(cuts) > 1, "there is something to decide"


def test_each_is_timed_as_often_on_chains_and_links_that_change() -> None:
    taken = measure([chain(seed) for seed in range(2)], 5)
    assert {name: len(times) for name, times in taken.items()} == dict.fromkeys(decisions(), 5)
    assert all(seconds > 0 for times in taken.values() for seconds in times)


@pytest.mark.parametrize(
    ("median", "said"), [(GOAL_US - 1, "being ready: **met**."), (GOAL_US, "**missed** for `inference`.")]
)
def test_the_page_judges_the_median_and_names_who_missed(median: float, said: str) -> None:
    text = report({ALGORITHM: [1.0, 2.0, 900.0], "`inference`": [median] * 3}, 1000)
    assert said in text and "| Algorithm 1 alone | 2.0 (1.0 to 900.0) |" in text


@pytest.mark.full
def test_the_script_writes_its_page(tmp_path: Path) -> None:
    command = module_command("decision_time", "--decisions", "3")
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "decision_time.md").read_text()
    assert text in done.stdout and f"3 decisions each, in turns over {CHAINS} random chains" in text
    wrong = subprocess.run([*command[:3], "--decisions", "0"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "at least 1, got 0" in wrong.stderr
