"""Check docs/models.md: cut a few of its models again, and check that its rows keep the promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

REQUIRED = {
    "torchvision": ["googlenet", "inception_v3"],
    "transformers": [
        *("bert", "roberta", "distilbert", "deberta-v2", "T5EncoderModel", "gpt2", "llama"),
        *("vit", "swin", "CLIPVisionModel", "wav2vec2", "WhisperEncoder"),
    ],
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/models.json").read_text())
    return found


def run(*arguments: str, timeout: float = 840) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/models.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


QUICK = ("torchvision:resnet18", "own_models:early_exit", "own_models:centred")
"""One model of a library, one with two exits, and one that must be refused."""


@pytest.mark.parametrize("only", [("--only", *QUICK), pytest.param((), marks=pytest.mark.full)])
@pytest.mark.full
def test_a_part_of_the_table_comes_out_the_same_again(only: tuple[str, ...]) -> None:
    done = run("--check", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences" in done.stdout


def test_models_of_every_library_are_in_the_table(rows: list[dict[str, Any]]) -> None:
    names: dict[str, list[str]] = {}
    for row in rows:
        library, _, name = row["name"].partition(":")
        names.setdefault(library, []).append(name)
    assert len(names["torchvision"]) >= 20
    assert len(names["timm"]) >= 12
    assert len(names["transformers"]) >= 12
    assert len(names["own_models"]) >= 5
    for library, required in REQUIRED.items():
        assert set(required) <= set(names[library])
    assert len({row["family"] for row in rows if row["name"].startswith("torchvision:")}) >= 20


def test_most_models_offer_five_proven_cuts_and_the_others_a_reason(rows: list[dict[str, Any]]) -> None:
    enough = [row for row in rows if row["proof"] == "passed" and row["cuts"] >= 5]
    assert len(enough) >= 0.95 * len(rows)
    for row in rows:
        assert row["proof"]
        assert (row["captured"] == "unsplit") == (row["proof"] != "passed")
    assert "influence each other" in next(r["proof"] for r in rows if r["name"] == "own_models:centred")


def test_the_page_is_that_of_the_rows(rows: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs/models.md").read_text()
    for row in rows:
        line = next(line for line in page.splitlines() if f"| `{row['name'].partition(':')[2]}` |" in line)
        assert f"| {row['cuts']} | {row['tensors']} |" in line
    enough = sum(row["proof"] == "passed" and row["cuts"] >= 5 for row in rows)
    assert f"{enough} of {len(rows)} models" in page


@pytest.mark.full
def test_a_name_that_is_not_in_the_table() -> None:
    done = run("--only", "torchvision:resnet81")
    assert done.returncode != 0
    assert "torchvision:resnet81" in done.stderr
    assert "Traceback" not in done.stderr
