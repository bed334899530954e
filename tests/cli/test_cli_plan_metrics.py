"""Test ``upriver plan --metrics``: decisions as the document of the contract, and refused inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from upriver.cli import main

Run = Callable[..., tuple[int, str, str]]

METRICS: dict[str, Any] = {
    "schema": "upriver.metrics/1",
    "gthp": 200.0,
    "lthp": 40.5,
    "pcycle": 10.0,
    "speedup_threshold": 1.1,
    "candidates": [
        {"name": "p1", "rthp": 20.0, "ocycle": 4.0},
        {"name": "p2", "rthp": 34.5, "ocycle": 1.0},
        {"name": "p3", "rthp": 30.0, "ocycle": 0.5},
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(METRICS))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def plan(*arguments: object) -> tuple[int, str, str]:
        status = main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return plan


def refused(run: Run, *arguments: object) -> str:
    status, out, err = run(*arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


def test_the_document(run: Run, file: Path) -> None:
    status, out, err = run("--metrics", file, "--policy", "fastflow", "--json")
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert set(document) == {"policy", "offload", "candidate", "ratio", "why"}
    assert document["policy"] == "fastflow"
    assert (document["offload"], document["candidate"], document["ratio"]) == (True, "p2", 0.46)


def test_all_policies_that_go_by_metrics(run: Run, file: Path) -> None:
    one, other = (
        json.loads(run("--metrics", file, "--policy", name, "--json")[1]) for name in ("fastflow", "upriver")
    )
    assert json.loads(run("--metrics", file, "--json")[1]) == {"plans": {"fastflow": one, "upriver": other}}
    assert other["policy"] == "upriver" and other["offload"] and other["candidate"] == "p2"
    # Both sides finish at once at 34.5 / (40.5 + 34.5 x 0.9); 1 % less than that is enough.
    assert 0.45 < other["ratio"] < 34.5 / (40.5 + 34.5 * 0.9)


def test_nothing_is_offloaded_where_nothing_stalls(run: Run, file: Path) -> None:
    file.write_text(json.dumps(METRICS | {"gthp": 41.0, "candidates": []}))
    document = json.loads(run("--metrics", file, "--policy", "fastflow", "--json")[1])
    assert (document["offload"], document["candidate"], document["ratio"]) == (False, None, 0.0)


def test_people_see_every_candidate_and_why(run: Run, file: Path) -> None:
    status, out, _ = run("--metrics", file)
    assert status == 0
    for part in (
        "200 MB/s",
        "40.5 MB/s",
        "4.94 times",
        "p1",
        "p2",
        "p3",
        "70.95",
        "p2 for 46.0% of",
        "71.55",
    ):
        assert part in out, part


def test_a_name_from_a_file_is_nothing_that_a_terminal_obeys(run: Run, file: Path) -> None:
    file.write_text(json.dumps(METRICS | {"candidates": [{"name": "\x1b[2Jp", "rthp": 50, "ocycle": 1}]}))
    assert "\x1b" not in run("--metrics", file)[1]


def test_what_does_not_count_is_refused(run: Run, file: Path, tmp_path: Path) -> None:
    assert "--bandwidth, --sweep would not" in refused(
        run, "--metrics", file, "--bandwidth", "1Mbit", "--sweep", "bandwidth=1Mbit,2Mbit"
    )
    assert "--profile would not" in refused(run, "--metrics", file, "--profile", tmp_path / "p.json")
    assert "must be one of fastflow, upriver or all, got 'hapi'" in refused(
        run, "--metrics", file, "--policy", "hapi"
    )
    assert "--metrics M.json" in refused(run, "--model", "torchvision:alexnet", "--policy", "fastflow")


def test_a_file_that_cannot_be_read_is_named(run: Run, file: Path, tmp_path: Path) -> None:
    assert "gone.json" in refused(run, "--metrics", tmp_path / "gone.json")
    file.write_text(json.dumps(METRICS | {"lthp": -1}))
    error = refused(run, "--metrics", file)
    assert "m.json" in error and "lthp" in error
    file.write_text("[" * 10_000)
    assert "m.json" in refused(run, "--metrics", file)
