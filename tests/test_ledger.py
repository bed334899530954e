"""Check that a ledger lists every test with its cost, including tests that ran in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BUSY = """
import subprocess, sys, time

BUSY = "import time\\nwhile time.process_time() < 0.5: pass"

def test_busy_below():
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)

def test_busy_itself():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
"""


@pytest.mark.full
def test_ledger_of_tests_in_another_process_has_their_costs(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY, encoding="utf-8")
    ledger = tmp_path / "ledger"
    options = ["-c", ROOT / "pyproject.toml", f"--confcutdir={ROOT}", "-p", "tests.conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "1", "--ledger", ledger, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # else its worker imports all test files first
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines = ledger.read_text(encoding="utf-8").splitlines()
    assert head.split("\t") == ["seconds", "own_s", "below_s", "processes", "test"]
    rows = {line.split("\t")[-1].rpartition("::")[2]: line.split("\t")[:-1] for line in lines}
    below, itself = rows["test_busy_below"], rows["test_busy_itself"]
    assert float(below[2]) > 0.2 and below[3] == "1"
    assert float(itself[1]) >= 0.3 and itself[3] == "0"
    assert "test_busy.py" in done.stdout.partition("ledger")[2]
