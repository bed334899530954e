"""Test ``upriver features``: what is kept as a table and as JSON, and what is removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.features.keeping import key, row, stretch
from upriver.cli import main
from upriver.features import DiskFeatures


def fill(folder: Path) -> None:
    disk = DiskFeatures(folder, budget_bytes=1 << 30)
    for number, saved_s in ((1, 0.5), (2, 0.1)):
        kept = disk.open(stretch(number), saved_s=saved_s, about=f"ResNet up to layer{number}")
        assert kept.append({key(each): row(each) for each in range(10)})


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_features_list_names_each_stretch_with_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    found = answer(capsys, "features", "list", "--folder", str(tmp_path))["features"]
    assert {each["digest"] for each in found} == {stretch(1).digest, stretch(2).digest}
    assert [(each["samples"], each["program"]) for each in found] == [(10, "a" * 64)] * 2
    assert all(each["bytes"] > 0 for each in found)
    assert main(["features", "list", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ResNet up to layer1" in out and "ResNet up to layer2" in out


def test_features_list_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "list", "--folder", str(tmp_path / "none")]) == 0
    assert "no features are kept" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_features_gc_removes_the_least_useful_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    used = DiskFeatures(tmp_path, budget_bytes=0).used_bytes
    assert answer(capsys, "features", "gc", "--folder", str(tmp_path), "--older-than", "1d") == {"bytes": 0}
    freed = answer(capsys, "features", "gc", "--folder", str(tmp_path), "--at-most", f"{used - 1} B")["bytes"]
    assert 0 < freed < used
    [left] = answer(capsys, "features", "list", "--folder", str(tmp_path))["features"]
    assert left["digest"] == stretch(1).digest
    answer(capsys, "features", "gc", "--folder", str(tmp_path))
    assert answer(capsys, "features", "list", "--folder", str(tmp_path)) == {"features": []}


@pytest.mark.parametrize(
    ("option", "value"), [("--at-most", "much"), ("--at-most", "-1"), ("--older-than", "tomorrow")]
)
def test_features_gc_with_a_bad_value_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    fill(tmp_path)
    assert main(["features", "gc", "--folder", str(tmp_path), option, value]) == 2
    assert option in capsys.readouterr().err
    assert len(DiskFeatures(tmp_path, budget_bytes=0).entries()) == 2
