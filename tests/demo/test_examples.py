"""Check that the examples in the README run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "finetune.py"


@pytest.mark.full
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
    # The policy decides where they come from, on the machine and at the moment of the run.
    samples = ast.literal_eval(done.stdout.splitlines()[-1].partition("samples from ")[2])
    assert sum(samples.values()) == 5 * 64 + 16


@pytest.mark.full
def test_distributed_example_trains_one_model(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(EXAMPLES / "distributed.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    # Both write to one pipe, without buffers: the end of a line may come after the other one's.
    said = dict(re.findall(r"rank (\d): (160 samples, accuracy 1\.00, weights -?\d+\.\d{6})", done.stdout))
    assert sorted(said) == ["0", "1"], done.stdout
    assert said["0"] == said["1"]  # the same weights on both


@pytest.mark.parametrize("name", ["finetune.py", "distributed.py"])
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 45
