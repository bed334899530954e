"""Run the fuzzer briefly, and check that it finds the faults it exists to find."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

from fuzz_mutations import Files, make, seeds  # noqa: E402
from fuzz_program import KINDS, fuzz, main, read  # noqa: E402


@pytest.mark.parametrize("inputs", [200, pytest.param(2_000, marks=pytest.mark.full)])
def test_broken_programs_are_refused_or_run(
    inputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--inputs", str(inputs), "--seed", "5", "--save", str(tmp_path), "--json"]
    monkeypatch.setattr(sys, "argv", ["fuzz_program.py", *options])
    failed = main()
    summary = json.loads(capsys.readouterr().out)
    problems = "\n".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert not failed and summary["failures"] == [], problems
    assert summary["inputs"] == sum(summary["outcomes"].values()) == inputs
    assert summary["deep_share"] >= 0.3
    assert set(summary["kinds"]) == set(KINDS)
    # Every check ran at least once, and not every change is an error.
    assert {"parser", "operators", "call_validator", "validator", "weights_file"} <= set(
        summary["refused_by"]
    )
    assert summary["outcomes"]["accepted"] > inputs // 50


def test_an_input_can_be_made_again() -> None:
    programs = seeds()
    first = [make(3, index, programs) for index in range(40)]
    assert [make(3, index, programs) for index in range(40)] == first
    assert len({given.files.graph + given.files.weights for given in first}) > 30


def digest(files: Files) -> str:
    return hashlib.sha256(files.graph + files.weights).hexdigest()


def misbehave(how: str, target: str, files: Files) -> None:
    """Read correctly except for one input."""
    if digest(files) != target:
        return read(files)
    match how:
        case "raises":
            raise KeyError("no such name")
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            time.sleep(600)
        case "takes memory":
            torch.zeros(320 << 20, dtype=torch.uint8).add_(1)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "outcome", "told"),
    [
        ("raises", "failed", "KeyError: 'no such name'"),
        ("crashes", "crashed", "crashed"),
        pytest.param("hangs", "hung", "hung", marks=pytest.mark.full),
        pytest.param("takes memory", "failed", "more memory than the caps allow", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_a_reader_that_misbehaves_once_is_seen(how: str, outcome: str, told: str, tmp_path: Path) -> None:
    wrong = make(3, 5, seeds()).files
    reader = partial(misbehave, how, digest(wrong))
    summary = fuzz(9, seed=3, save_to=tmp_path, reader=reader, patience_s=8 if how == "hangs" else 120)
    assert summary.failures == [5] and summary.outcomes[outcome] == 1
    assert sum(summary.outcomes.values()) == 9 and "not reached" not in summary.outcomes
    [saved] = tmp_path.glob("*.graph.json")
    assert saved.read_bytes() == wrong.graph
    [words] = tmp_path.glob("*.txt")
    assert told in words.read_text()
