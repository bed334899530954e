"""What the README points at must run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"


@pytest.mark.slow
def test_finetune_example_learns_near_the_data() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert "accuracy 1.00" in done.stdout
    assert "local" not in done.stdout.splitlines()[-1], "the embedded server gave no sample"


def test_finetune_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40
