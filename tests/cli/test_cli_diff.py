"""Test ``upriver diff`` against real servers: of the same bits, of another instruction set, and none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.running import Running, free_port, running
from upriver.cli import main

OWN = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.conv(self.norm(x)))

def convolutions():
    layers = [
        nn.BatchNorm2d(16), nn.MaxPool2d(2), Residual(),
        nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ]
    return nn.Sequential(*layers), torch.randn(2, 16, 32, 32)

class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

def branch():
    return Branch(), torch.randn(1, 6)
"""

MODEL = ("diff_models:convolutions", "--micro-batch", "4")

ELSEWHERE = "SSE41"
"""Instruction set of the other machine: no machine that torch runs on has none above it."""

TOKEN = "the-token-of-the-other-server"


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "diff_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("UPRIVER_TOKEN", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("same").as_uri(), threads=torch.get_num_threads()) as found:
        yield found.wait_ready()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server that asks for a token, and whose low bits differ from this process's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", ELSEWHERE)  # for the server only: this process has chosen already
        options = {"threads": torch.get_num_threads(), "token": TOKEN}
        with running(tmp_path_factory.mktemp("other").as_uri(), **options) as found:
            patch.undo()
            yield found.wait_ready()


@pytest.fixture
def other(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Return that server, with its token in the environment."""
    monkeypatch.setenv("UPRIVER_TOKEN", TOKEN)
    return guarded


def found_by(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["diff", *map(str, arguments), "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def assert_convolution_is_first(document: dict[str, Any], *, cut: int) -> None:
    """Check that all is equal before a cut, and that a convolution before it is named."""
    operator = document["first_operator"]
    assert operator["operators"] == ["conv2d.default"] and operator["kind"] == "Conv2d"
    assert operator["module"] == "2.conv"
    assert [form["shape"] for form in operator["reads"]] == [[4, 16, 16, 16], [16, 16, 3, 3], [16]]
    assert operator["gives"] == [{"dtype": "float32", "shape": [4, 16, 16, 16]}]
    assert 0 < operator["own"]["relative"] < 1e-3
    assert 0 < operator["own"]["num_different"] <= operator["own"]["num_elements"] == 4 * 16 * 16 * 16
    assert document["first_stage"] == cut and not document["equal"]
    for stage in document["stages"]:
        for deviation in (stage["own"], stage["accumulated"]):
            assert stage["cut"] >= cut or (deviation["relative"], deviation["num_different"]) == (0.0, 0)
        if stage["cut"] >= cut:
            assert 0 < stage["accumulated"]["relative"] < 1e-3 and stage["accumulated"]["num_different"]
    for different in (operator, document["stages"][cut - 1]):
        assert different["own"]["relative"] == different["accumulated"]["relative"]
        assert different["own"]["num_different"] == different["accumulated"]["num_different"]
    assert document["answer"] == document["stages"][-1]["accumulated"]
    assert document["tolerance"] == {"rtol": 1e-3, "atol": 1e-4, "excess": ""}


@pytest.mark.full
def test_servers_of_equal_bits_differ_in_nothing(same: Running, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = found_by(capsys, *MODEL, "--server", same.url)
    assert code == 0 and document["equal"] and document["schema"] == "upriver.diff/1"
    assert document["first_stage"] is document["first_operator"] is None
    assert document["operators"] == document["fingerprint"] == []
    assert [stage["after"] for stage in document["stages"]] == list("01234567")
    assert {stage["accumulated"]["num_different"] for stage in document["stages"]} == {0}
    assert document["server"] == same.url and document["micro_batch"] == 4
    threads = torch.get_num_threads()
    assert document["threads"] == {"here": threads, "there": threads}
    assert main(["diff", *MODEL, "--server", same.url]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("No bit differs, in no stage and not in the answer of a whole run.\n")
    assert "random weights" in printed.err


@pytest.mark.full
def test_other_instruction_set_shows_in_a_convolution(
    other: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = found_by(capsys, *MODEL, "--server", other.url)
    assert code == 1
    assert_convolution_is_first(document, cut=3)
    assert [operator["operators"] for operator in document["operators"]] == [
        ["_native_batch_norm_legit_no_training.default"],
        ["conv2d.default"],
    ]
    variable = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    assert document["fingerprint"] == [
        {"field": "onednn_max_cpu_isa", "here": variable, "there": ELSEWHERE},
    ]
    assert main(["diff", *MODEL, "--server", other.url]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"onednn_max_cpu_isa '{ELSEWHERE}' there, '{variable}' here" in text
    assert "First to give other bits from equal inputs: aten.conv2d.default in 2.conv (Conv2d)." in text
    assert "gives float32 (4, 16, 16, 16)." in text and text.endswith("of the largest, and takes it.")


@pytest.mark.full
def test_operators_as_stages_show_the_same_operator(
    other: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = found_by(capsys, *MODEL, "--server", other.url, "--granularity", "op")
    assert code == 1
    assert_convolution_is_first(document, cut=4)
    assert document["operators"] == [document["first_operator"]]
    differing = {stage["kind"] for stage in document["stages"] if stage["own"]["num_different"]}
    assert differing <= {"Conv2d", "Linear"}  # what oneDNN computes


def test_part_before_the_first_convolution_is_equal(
    guarded: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    token = ("--token-file", tmp_path / "token")
    code, document = found_by(capsys, *MODEL, "--server", guarded.url, *token, "--freeze-to", "1")
    assert code == 0 and document["equal"] and document["freeze_to"] == "1"
    assert [stage["after"] for stage in document["stages"]] == ["0", "1"]
    assert [line["field"] for line in document["fingerprint"]] == ["onednn_max_cpu_isa"]


@pytest.mark.full
def test_process_with_a_variable_takes_the_place_of_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(1, 16, 32, 32)).astype(np.float32))
    variable, picture = f"ONEDNN_MAX_CPU_ISA={ELSEWHERE}", tmp_path / "growth.png"
    arguments = ("--input", tmp_path / "x.npy", "--freeze-to", "4", "--plot", picture)
    code, document = found_by(capsys, *MODEL, "--against-env", variable, *arguments)
    assert code == 1
    assert_convolution_is_first(document, cut=3)
    assert len(document["stages"]) == 5 and document["server"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_process_with_other_threads_takes_the_place_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = found_by(capsys, *MODEL, "--threads", 1, "--against-threads", 2)
    assert document["threads"] == {"here": 1, "there": 2} and torch.get_num_threads() == 1
    assert document["fingerprint"] == []
    assert code == (0 if document["equal"] else 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*MODEL], "nothing to compare with: give --server URL, --against-threads N or --against-env"),
        (
            [*MODEL, "--server", "http://there:7000", "--against-threads", "2"],
            "--against-threads and --against-env start a process here, in place of --server",
        ),
        ([*MODEL, "--server", "there"], "a server is http://HOST:PORT or https://HOST:PORT, got 'there'"),
        ([*MODEL, "--server", "{free}"], "{free}: "),
        ([*MODEL, "--server", "ray+http://there:7000"], "--server: ray+http://there:7000 is a directory"),
        ([*MODEL, "--against-env", "COLOUR"], "--against-env must be NAME=VALUE, got 'COLOUR'"),
        ([*MODEL, "--against-env", "COLOUR=1"], "--against-env takes variables that choose kernels (ATEN_"),
        ([*MODEL, "--against-threads", "0"], "--against-threads must be a whole number in 1..256, got 0"),
        ([*MODEL, "--server", "{free}", "--threads", "0"], "--threads must be a whole number in 1..256"),
        ([*MODEL, "--server", "{free}", "--granularity", "end"], "--granularity must be module or op"),
        ([*MODEL, "--server", "{free}", "--freeze-to", "9"], "the model has no module '9'"),
        ([*MODEL, "--server", "{same}", "--freeze-to", "2", "--input", "none.npy"], "cannot read --input"),
        ([*MODEL, "--server", "{guarded}"], "no token was given"),
        ([*MODEL, "--server", "{same}", "--ca", "none.pem"], "cannot read the authorities none.pem"),
        (["torchvision:resnet", "--server", "{same}"], "torchvision has no model 'resnet'; near are"),
        (["diff_models:branch", "--server", "{same}"], "torch.export could not capture the model: control"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, same: Running, guarded: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = {"free": f"http://127.0.0.1:{free_port()}", "same": same.url, "guarded": guarded.url}
    assert main(["diff", *(each.format(**urls) for each in arguments)]) == 2
    printed = capsys.readouterr()
    [line] = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert said.format(**urls) in line and printed.out == ""
