"""What the README points at must run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"


@pytest.mark.slow
def test_finetune_example_learns() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert "accuracy 1.00" in done.stdout
    # Where they come from is for the policy to decide, on the machine and at the moment of the run.
    samples = ast.literal_eval(done.stdout.splitlines()[-1].partition("samples from ")[2])
    assert sum(samples.values()) == 5 * 64 + 16


def test_finetune_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
