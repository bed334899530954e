"""``upriver push``: programs of several shapes beside one weights file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from upriver.cli import main
from upriver.coldstart import layout, programs
from upriver.program.files import load
from upriver.program.names import load_model
from upriver.store import Store

OWN = """
import os

import torch
from torch import nn

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        scale = torch.tensor([float(x.shape[1])])
        return self.head(self.first(x[:, None]).mean(2) * scale)

def sound():
    return Pooled()

def given():
    return Pooled(), torch.randn(2, 8)

def chatty():
    print("printed")
    os.write(1, b"written\\n")
    return given()
"""


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "push_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def pushed(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    command = ["push", "push_models:sound", tmp_path.as_uri(), "--input-shape", "8", *arguments, "--json"]
    assert main(command) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_each_micro_batch_and_length_is_a_program_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = pushed(tmp_path, capsys, "--micro-batch", "1,4", "--length", "8, 12")
    programs = document["programs"]
    assert [(each["micro_batch"], each["length"]) for each in programs] == [(1, 8), (4, 8), (1, 12), (4, 12)]
    assert len({each["digest"] for each in programs}) == 4
    assert document["digest"] == programs[0]["digest"]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    store = Store.open(tmp_path.as_uri())
    for each in programs:
        program = load(store, each["digest"])
        assert program.weights_digest == document["weights_digest"]
        model, inputs = load_model("push_models:sound", input_shape=(each["length"],))
        given = inputs.example(each["micro_batch"])
        assert isinstance(given, torch.Tensor)
        with torch.no_grad():
            assert torch.equal(program.run((given,), 0, program.num_stages)[0], model.eval()(given))


def test_one_program_without_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = pushed(tmp_path, capsys, "--freeze-to", "first")
    assert [each["micro_batch"] for each in document["programs"]] == [16]
    assert document["programs"][0]["length"] is None
    assert load(Store.open(tmp_path.as_uri()), document["digest"]).stages[-1].name == "first"


def test_weights_have_their_manifest_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = pushed(tmp_path, capsys, "--micro-batch", "1,4")
    store = Store.open(tmp_path.as_uri())
    manifest = layout.read(store, document["weights"])
    assert {"first.weight", "head.bias"} < {tensor.name for tensor in manifest.tensors}
    for each in document["programs"]:
        cold = programs.open(f"{tmp_path.as_uri()}/{each['graph']}")
        given = torch.randn(each["micro_batch"], 8)
        expected = load(store, each["digest"]).run((given,), 0, cold.num_stages)
        assert torch.equal(cold.run((given,), 0, cold.num_stages)[0], expected[0])
        coming = programs.arriving(cold)
        assert coming is None or coming.wait(60)


def test_what_was_pushed_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["push", "push_models:sound", tmp_path.as_uri(), "--input-shape", "8", "--micro-batch", "1,2"]
    assert main(command) == 0
    names = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert (names.count("digest"), names.count("weights_digest")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["push_models:sound", "--micro-batch", "1,x"], "--micro-batch must be"),
        (["push_models:sound", "--micro-batch", "0"], "--micro-batch must be"),
        (["push_models:sound", "--micro-batch", "1,65537"], "must be 1 to 65536, got 65537"),
        (["push_models:sound", "--micro-batch", "1" * 5000], "--micro-batch must be"),
        (["push_models:sound", "--input-shape", "9" * 5000], "--input-shape must be"),
        (["push_models:sound", "--input-shape", "99999,99999"], "at most 17179869184 bytes"),
        (["push_models:sound", "--input-shape", ",".join("1" * 12)], "in 12 dimensions"),
        (["push_models:given", "--micro-batch", "99999999999"], "must be 1 to 65536"),
        (["push_models:sound", "--input-shape", "8", "--length", "9" * 15], "at most 17179869184 bytes"),
        (["push_models:sound", "--length", "8,"], "--length must be"),
        (["push_models:sound", "--length", "8"], "samples of shape (3, 224, 224)"),
        (["push_models:given", "--length", "8"], "an example of its own"),
        (["push_models:sound", "--autocast", "int8"], "int8"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    name, *options = arguments
    assert main(["push", name, tmp_path.as_uri(), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / ".upriver").exists()


def test_a_store_that_ends_with_the_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "push_models:sound", "memory://gone", "--input-shape", "8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'memory://gone' ends with this process" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("blocked", [".upriver", ".upriver/weights"])
def test_a_store_that_takes_nothing_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocked: str
) -> None:
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file where a folder is wanted")
    assert main(["push", "push_models:sound", tmp_path.as_uri(), "--input-shape", "8"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: cannot write ")
    assert blocked in said


def test_what_a_model_prints_is_no_part_of_the_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", "push_models:chatty", tmp_path.as_uri(), "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["micro_batch"] == 16
    assert "printed" in captured.err
    assert "written" in captured.err
