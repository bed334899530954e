"""Test where benchmarks write what they make, and how they end."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.harness.children import ROOT, module_command
from benchmarks.harness.records import Output
from benchmarks.harness.reports import RESULTS


def test_a_quick_form_writes_into_a_new_folder_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (Output.of(Namespace(quick=True, out=None), "claim") for _ in range(2))
    assert first.folder != second.folder and first.folder.parent == tmp_path
    assert str(first.folder) in capsys.readouterr().err
    assert Output.of(Namespace(quick=True, out=tmp_path), "claim") == Output(tmp_path, "claim_quick")
    assert Output.of(Namespace(quick=False, out=None), "claim") == Output(RESULTS, "claim")


def test_a_quick_form_that_runs_nothing_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    listed = Output.of(Namespace(quick=True, out=None, report=False, list=True), "claim")
    assert not listed.records().rows
    with pytest.raises(SystemExit, match="--quick --report needs --out"):
        Output.of(Namespace(quick=True, out=None, report=True, list=False), "claim")
    assert not list(tmp_path.iterdir())


def test_a_report_on_a_part_does_not_replace_that_of_the_claim(tmp_path: Path) -> None:
    for out in (None, RESULTS):
        with pytest.raises(SystemExit, match="a part of the claim; name a folder"):
            Output.of(Namespace(quick=False, out=out), "claim", whole=False)
    assert Output.of(Namespace(quick=False, out=tmp_path), "claim", whole=False).folder == tmp_path
    assert Output.of(Namespace(quick=True, out=tmp_path), "claim", whole=False).folder == tmp_path


@pytest.mark.parametrize("right", [True, False])
def test_a_benchmark_with_wrong_bits_writes_its_report_and_ends_with_one(tmp_path: Path, right: bool) -> None:
    row = {"name": "own_models:siamese", "way": "plain", "how": "told", "proof_s": 0.1, "split_s": 0.2}
    (tmp_path / "proof_steps_quick.jsonl").write_text(json.dumps({**row, "right": right}) + "\n")
    command = module_command("proof_steps", "--quick", "--report", "--out", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (
        (0, "") if right else (1, "error: own_models:siamese, plain: told\n")
    )
    report = (tmp_path / "proof_steps_quick.md").read_text(encoding="utf-8")
    assert report.strip() in done.stdout and ("WRONG" in report) == (not right)
