"""Test ``upriver cuts``: the whole answer as JSON, the table, the plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upriver.cli import main

OWN = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)), torch.randn(2, 6)

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        return self.head(x * 2 if x.sum() > 0 else x)

def branch():
    return Branch(), torch.randn(2, 6)

def noisy():
    return nn.Sequential(nn.Linear(6, 6), Noise(), nn.Linear(6, 6)), torch.randn(2, 6)

class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)
"""

KEYS = [
    "cut",
    "after",
    "bytes_per_sample",
    "tensors",
    "param_bytes_before",
    "flops_before",
    "legal",
    "why_not",
]


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["cuts", *arguments, "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    assert all(list(row) == KEYS for row in rows)
    return rows


@pytest.mark.full
def test_alexnet_has_the_stages_and_bytes_that_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "torchvision:alexnet", "--micro-batch", "1")
    assert [row["cut"] for row in rows] == list(range(22))
    assert [row["after"] for row in rows] == [
        "input",
        *(f"features.{number}" for number in range(13)),
        "avgpool",
        *(f"classifier.{number}" for number in range(7)),
    ]
    sizes = [602112, 774400, 774400, 186624, 559872, 559872, 129792, 259584, 259584]
    assert [row["bytes_per_sample"] for row in rows] == [
        *sizes, *[173056] * 4, *[36864] * 3, *[16384] * 5, 4000
    ]  # fmt: skip
    assert all(row["legal"] and row["tensors"] == 1 for row in rows)


def test_cuts_behind_operators(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "cut_models:small", "--granularity", "op")
    assert [row["after"] for row in rows] == ["input", "0: linear", "1: relu", "2: linear"]


def test_the_nodes_of_loadpart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", "cut_models:small", "--nodes", "paper", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [list(row.values()) for row in rows] == [
        [0, "input", "input", 24, 1, True],
        [1, "matmul", "0", 24, 1, False],
        [2, "bias", "0", 24, 1, True],
        [3, "activation", "1", 24, 1, True],
        [4, "matmul", "2", 16, 1, False],
        [5, "bias", "2", 16, 1, True],
    ]
    assert list(rows[0]) == ["number", "kind", "name", "cut_bytes", "tensors", "runnable"]
    assert main(["cuts", "cut_models:small", "--nodes", "paper"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert printed[0] == ["node", "kind", "after", "KB/sample", "tensors", "runnable"]
    assert printed[-1] == ["5", "bias", "2", "0.0", "1", "yes"]
    assert len(printed) == 2 + len(rows)


def test_nodes_are_not_numbered_of_a_model_that_decides_by_its_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["cuts", "cut_models:branch", "--nodes", "paper"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "depends on data" in captured.err
    assert captured.err.count("\n") == 1


def test_a_model_that_decides_by_its_data_is_answered_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_of(capsys, "cut_models:branch")
    assert [(row["after"], row["legal"]) for row in rows] == [
        ("input", True),
        ("first", True),
        ("output", False),
    ]
    assert "depends on data" in str(rows[-1]["why_not"])
    assert main(["cuts", "cut_models:branch"]) == 0
    assert "not legal: cut 2: " in capsys.readouterr().out


def test_the_table_gives_each_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", "cut_models:noisy", "--freeze-to", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("rand_like.default, which is random") == 1
    assert "cuts 2 to 3: module '1'" in printed


def test_autocast_halves_what_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, "cut_models:small", "--autocast", "bfloat16")
    assert [row["bytes_per_sample"] for row in rows] == [24, 12, 12, 8]


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["cuts", "cut_models:noisy", "--plot", str(tmp_path / "cuts.png"), "--json"]) == 0
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.full
def test_cuts_draws_the_bytes_of_a_stored_sample(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "cuts.svg"
    assert main(["cuts", "cut_models:small", "--plot", str(picture), "--stored-bytes", "20"]) == 0
    assert "<!-- a stored sample: 20 B -->" in picture.read_text(encoding="utf-8")


@pytest.mark.full
def test_a_picture_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "cuts.png"
    plot.symlink_to("/dev/full")
    assert main(["cuts", "cut_models:small", "--plot", str(plot)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: cannot write {plot}: No space left on device\n"
    assert plot.is_symlink()
    assert sorted(path.name for path in tmp_path.glob("*[!_]")) == ["cut_models.py", "cuts.png"]
    assert not list(tmp_path.glob(".cuts*"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--granularity", "end"], "'end'"),
        (["--autocast", "float64"], "float64"),
        (["--plot", "/does/not/exist/cuts.png"], "/does/not/exist"),
        (["--stored-bytes", "7"], "--stored-bytes is a line of the picture: give --plot"),
        (["--stored-bytes", "-7", "--plot", "cuts.png"], "stored_bytes"),
        (["--freeze-to", "7"], "'7'"),
        (["--input-shape", "7"], "shape"),
        (["--nodes", "all"], "--nodes must be paper, got 'all'"),
        (["--nodes", "paper", "--freeze-to", "0"], "--nodes paper and --freeze-to exclude each other"),
        (["--nodes", "paper", "--granularity", "op"], "--nodes paper and --granularity exclude"),
        (["--nodes", "paper", "--plot", "cuts.png"], "--nodes paper and --plot exclude"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cuts", "cut_models:small", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1
