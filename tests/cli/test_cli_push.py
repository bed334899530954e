"""Test ``upriver push``: programs of several shapes with one weights file, and weights alone."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.examples import some
from upriver.cli import main
from upriver.coldstart import load, loading
from upriver.coldstart import load_program as programs
from upriver.coldstart.format import manifest as layout
from upriver.errors import UpriverError
from upriver.program.graph import artifact_store
from upriver.program.models.registry import load_model
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

def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model

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


@pytest.mark.full
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
        program = artifact_store.load(store, each["digest"])
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
    assert artifact_store.load(Store.open(tmp_path.as_uri()), document["digest"]).stages[-1].name == "first"


def test_weights_have_their_manifest_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = pushed(tmp_path, capsys, "--micro-batch", "1,4")
    store = Store.open(tmp_path.as_uri())
    manifest = layout.read(store, document["weights"])
    assert {"first.weight", "head.bias"} < {tensor.name for tensor in manifest.tensors}
    for each in document["programs"]:
        cold = programs.open(f"{tmp_path.as_uri()}/{each['graph']}")
        given = torch.randn(each["micro_batch"], 8)
        expected = artifact_store.load(store, each["digest"]).run((given,), 0, cold.num_stages)
        assert torch.equal(cold.run((given,), 0, cold.num_stages)[0], expected[0])
        coming = programs.arriving(cold)
        assert coming is None or coming.wait(60)


@pytest.mark.full
def test_what_it_prints_is_what_a_cold_start_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = pushed(tmp_path, capsys, "--micro-batch", "1,4", "--prefix", "kept/here")
    assert document["uri"] == document["programs"][0]["uri"]
    for each in document["programs"]:
        cold = programs.open(each["uri"])
        assert (cold.digest, cold.micro_batch) == (each["digest"], each["micro_batch"])
        coming = programs.arriving(cold)
        assert coming is None or coming.wait(60)


@pytest.mark.full
@pytest.mark.parametrize("damaged", some(1, ["weights", "graph"]))
def test_what_is_damaged_is_written_anew(
    damaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "upriver.store.local.etag_of", lambda status: f'"{status.st_ino}-{status.st_mtime_ns}"'
    )

    def load_it() -> None:
        cold, coming = programs.begin(document["uri"])
        assert coming is not None
        coming.wait(60)
        given = torch.ones(16, 8)
        expected = sound.run((given,), 0, sound.num_stages)
        assert torch.equal(cold.run((given,), 0, cold.num_stages)[0], expected[0])

    document = pushed(tmp_path, capsys)
    sound = artifact_store.load(Store.open(tmp_path.as_uri()), document["digest"])
    load_it()
    file = tmp_path / document[damaged]
    before, status = file.read_bytes(), file.stat()
    with file.open("r+b") as opened:  # a disk does so, without a trace in the ETag
        opened.seek(-1 if damaged == "graph" else -64, os.SEEK_END)
        opened.write(b"\xff")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.read_bytes() != before
    pushed(tmp_path, capsys)
    with pytest.raises(UpriverError, match=r"push --rewrite|has digest"):
        load_it()
    pushed(tmp_path, capsys, "--rewrite")
    assert file.read_bytes() == before
    load_it()


# --------------------------------------------------------------------------------------- weights alone


@pytest.mark.parametrize("name", ["sounds", "models/sounds", "sounds.safetensors"])
def test_weights_alone_are_published_in_the_order_of_execution(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = pushed(tmp_path, capsys, "--weights-to", name)
    path = f"{name.removesuffix('.safetensors')}.safetensors"
    assert (document["weights"], document["uri"]) == (path, f"{tmp_path.as_uri()}/{path}")
    assert not (tmp_path / ".upriver").exists()
    store = Store.open(tmp_path.as_uri())
    assert store.exists(document["manifest"])
    manifest = layout.read(store, path)
    names = [tensor.name for tensor in manifest.tensors]
    assert {each.partition(".")[0] for each in names[:2]} == {"first"}
    assert {each.partition(".")[0] for each in names[2:]} == {"head"}
    model, inputs = load_model("push_models:sound", input_shape=(8,))
    state = model.state_dict()
    assert document["num_weights"] == len(names) == len(state) and document["num_ties"] == 0
    assert document["weight_bytes"] == sum(value.nbytes for value in state.values())
    assert document["object_bytes"] == (tmp_path / path).stat().st_size
    stored = load_file(tmp_path / path)
    assert all(torch.equal(stored[key], value) for key, value in state.items())
    given = inputs.example(2)
    assert isinstance(given, torch.Tensor)
    cold = load(lambda: load_model("push_models:sound", seed=1)[0], document["uri"]).eval()
    with torch.no_grad():
        assert torch.equal(cold(given), model.eval()(given))
    handle = loading(cold)
    assert handle is None or handle.wait(60)


def test_the_command_that_loads_them_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    document = pushed(folder, capsys, "--weights-to", "sounds")
    program, *arguments = shlex.split(document["load"])
    assert program == "upriver"
    assert main([*arguments, "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plain"]["same_answer"] is True
    assert found["weight_bytes"] == document["weight_bytes"]


def test_weights_alone_may_be_trained_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = load_model("push_models:sound", seed=3)
    trained_file = tmp_path / "trained.safetensors"
    save_file(model.state_dict(), trained_file)
    pushed(tmp_path, capsys, "--weights-to", "sounds", "--weights", str(trained_file))
    command = ["push", "push_models:sound", tmp_path.as_uri(), "--input-shape", "8", "--weights-to", "random"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "random weights" in told.err and "random.safetensors" in told.out
    trained, random = (load_file(tmp_path / f"{name}.safetensors") for name in ("sounds", "random"))
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(random["head.weight"], trained["head.weight"])


def test_published_weights_may_be_pushed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pushed(tmp_path, capsys, "--weights-to", "first")
    first = tmp_path / "first.safetensors"
    assert any(name.startswith("__pad__") for name in load_file(first))
    pushed(tmp_path, capsys, "--weights-to", "second", "--weights", str(first))
    assert (tmp_path / "second.safetensors").read_bytes() == first.read_bytes()


def test_weights_with_two_names_are_needed_under_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["push", "push_models:tied", tmp_path.as_uri(), "--input-shape", "8"]
    first = tmp_path / "first.safetensors"
    assert main([*command, "--weights-to", "first"]) == 0
    assert "1.weight" not in load_file(first)
    assert main([*command, "--weights-to", "second", "--weights", str(first)]) == 0
    assert (tmp_path / "second.safetensors").read_bytes() == first.read_bytes()
    save_file({name: value for name, value in load_file(first).items() if "weight" not in name}, first)
    first.with_suffix(".manifest.json").unlink()
    capsys.readouterr()
    assert main([*command, "--weights-to", "third", "--weights", str(first)]) == 2
    assert "lacks 2 tensors, first '0.weight'" in capsys.readouterr().err


def test_a_pickled_checkpoint_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trained.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    command = ["push", "push_models:sound", tmp_path.as_uri(), "--weights-to", "sounds"]
    assert main([*command, "--weights", str(tmp_path / "trained.pt")]) == 2
    told = capsys.readouterr().err
    assert "trained.pt is a pickled checkpoint" in told
    assert "safetensors.torch.save_model" in told
    assert not list(tmp_path.glob("sounds*"))


def test_weights_alone_of_a_model_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["push", "push_models:given", tmp_path.as_uri(), "--weights-to", "given", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["load"] == f"upriver coldstart {document['uri']} push_models:given"
    assert layout.read(Store.open(tmp_path.as_uri()), "given.safetensors").tensors


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
        (["push_models:sound", "--weights-to", "w", "--micro-batch", "16"], "does not go with --micro-batch"),
        (
            ["push_models:sound", "--weights-to", "w", "--freeze-to", "first", "--prefix", "x"],
            "--freeze-to, --prefix",
        ),
        (["push_models:sound", "--weights-to", "w", "--length", "8"], "does not go with --length"),
        (["push_models:sound", "--weights-to", "w", "--granularity", "op"], "not go with --granularity"),
        (["push_models:sound", "--weights-to", "w", "--autocast", "bfloat16"], "not go with --autocast"),
        (["push_models:sound", "--weights-to", ""], "object name '' is empty"),
        (["push_models:sound", "--weights-to", "../w"], "has the segment"),
        (["push_models:nothing", "--weights-to", "w"], "no callable"),
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


def test_a_model_that_takes_no_such_image_is_told_what_asks_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", "push_models:sound", tmp_path.as_uri(), "--weights-to", "w"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the order of weights cannot be recorded")
    assert said.endswith("(called with float32 (1, 3, 224, 224); --input-shape asks for another shape)")
    assert not list(tmp_path.glob("w*"))


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


def test_a_folder_by_its_path_is_pushed_to_and_loaded_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)

    def asked(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    program = asked("push", "push_models:given", "store", "--micro-batch", "2")
    assert program["uri"] == f"{(tmp_path / 'store').as_uri()}/.upriver/programs/{program['digest']}"
    for place in (f"store/.upriver/programs/{program['digest']}", program["uri"]):
        assert asked("coldstart", place)["digest"] == program["digest"]
    monkeypatch.chdir("store")
    assert asked("coldstart", f".upriver/programs/{program['digest']}")["digest"] == program["digest"]
    weights = asked("push", "push_models:given", ".", "--weights-to", "w", "--weights", _weights(tmp_path))
    for place in ("w", "./w.safetensors", "../store/w", weights["uri"]):
        assert asked("coldstart", place, "push_models:given", "--compare")["plain"]["same_answer"]


def _weights(folder: Path) -> str:
    """Write weights of the model; return the file."""
    save_file(load_model("push_models:given")[0].state_dict(), folder / "given.safetensors")
    return str(folder / "given.safetensors")
