"""Test where benchmarks write what they make."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

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
