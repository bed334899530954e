"""Test ``upriver calibrate``: the document, the table next to the paper's, and the saved models."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.terminal import on_terminal
from upriver.cli import main
from upriver.profile.latency.benchmark_configs import RANGES
from upriver.profile.latency.serialization import kept, predictor_from_json, predictor_to_json

ONE_KIND = {"copy.flip": RANGES["copy.flip"]}


@pytest.fixture(autouse=True)
def two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {kind: RANGES[kind] for kind in ("activation.relu", "copy.flip")}
    monkeypatch.setattr("upriver.profile.latency.calibration.RANGES", few)
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path / "cache"))


@pytest.mark.full
def test_the_document_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "latency.json"
    assert main(["calibrate", "--quick", "--output", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu" and found["configurations"] > 0
    assert {error["kind"] for error in found["errors"]} == {"activation.relu", "copy.flip"}
    assert {"kind": "conv", "model": "device", "rmse_us": 41325.68, "mape_percent": 40.09} in found["paper"]
    predictor = kept("cpu")
    assert predictor is not None and Path(found["kept"]).is_file()
    assert predictor_to_json(predictor_from_json(output.read_bytes())) == predictor_to_json(predictor)


@pytest.mark.full
def test_the_table_stands_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--quick"]) == 0
    captured = capsys.readouterr()
    lines, told = captured.out.splitlines(), captured.err.splitlines()
    shape = r"timing (activation\.relu|copy\.flip): [0-9]+ %, about [0-9]+ s left"
    assert 1 <= len(told) <= 10 and all(re.fullmatch(shape, line) for line in told)
    assert told[-1].endswith(": 100 %, about 0 s left")
    [relu] = [line.split() for line in lines if line.startswith("activation.relu")]
    [flip] = [line.split() for line in lines if line.startswith("copy.flip")]
    assert relu[-4:] == ["4.5", "12.6", "1452", "17.7"]
    assert flip[-4:] == ["-"] * 4
    assert len(relu) == len(flip) == 13


@pytest.mark.full
def test_a_terminal_shows_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upriver.profile.latency.calibration.RANGES", ONE_KIND)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with on_terminal(monkeypatch) as shown:
        assert main(["calibrate", "--quick", "--json"]) == 0
    last = re.findall(r"timing [a-z.]+ .* ([0-9]+)/([0-9]+).* ([-0-9]+:[-0-9]+:[-0-9]+)", shown())[-1]
    assert int(last[0]) <= int(last[1])


@pytest.mark.full
def test_a_folder_that_cannot_be_written_is_said_and_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", os.devnull)
    monkeypatch.setattr("upriver.profile.latency.calibration.RANGES", ONE_KIND)
    assert main(["calibrate", "--quick", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kept"] is None
    assert "The models are not kept" in captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--minutes", "0"], "--minutes must be"),
        (["--minutes", "soon"], "--minutes"),
        (["--device", "abacus"], "abacus"),
        (["--output", "/does/not/exist/latency.json"], "/does/not/exist"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1
