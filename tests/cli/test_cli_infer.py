"""Test ``upriver infer``: answers as JSON and as text, files of every kind, with and without a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.inference.asking import here
from tests.inference.between import between
from tests.server.running import Running, running
from upriver import progress
from upriver.cli import infer as infer_module
from upriver.cli import main
from upriver.cli.inputs import read_inputs
from upriver.cli.stages import input_stages
from upriver.inference import offload as offload_module
from upriver.pipeline import stored_tensor
from upriver.program.capture.input_spec import ModelInputs
from upriver.program.example_inputs import Example
from upriver.program.models.registry import load_model

OWN = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x, other):
        hidden = torch.relu(self.left(x) + self.right(other))
        return {"hidden": hidden, "sum": hidden.sum(1)}

def two():
    from upriver.program.example_inputs import Example
    return Two(), Example(args=(torch.randn(2, 6),), kwargs={"other": torch.randn(2, 3)})

def chain():
    layers = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)
    return nn.Sequential(*layers), torch.randn(1, 6)

class Apart(nn.Module):
    def forward(self, x, times=1.0, by=None, *, less=None):
        x = x * times
        x = x if by is None else x / by
        return x if less is None else x - less

def apart():
    return Apart(), (torch.randn(2, 3), 2.0, torch.rand(2, 3) + 1)

class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 3), nn.Linear(3, 2)

    def forward(self, ids, feat, more=None):
        answer = self.head(self.embedding(ids) + feat)
        return answer if more is None else answer + more

class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

def branch():
    return Branch(), torch.randn(1, 6)
"""

NET = ("torchvision:squeezenet1_1", "--input-shape", "3,48,48")


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infer_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("UPRIVER_TOKEN", raising=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(tmp_path_factory.mktemp("store").as_uri()) as found:
        yield found.wait_ready()
    torch.set_num_threads(before)


@pytest.fixture
def x(tmp_path: Path) -> torch.Tensor:
    tensor = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "x.npy", tensor.numpy())
    return tensor


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["infer", *map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_number_stays_a_number(tmp_path: Path) -> None:
    np.save(tmp_path / "number.npy", np.float32(2.5))
    [found] = read_inputs(tmp_path / "number.npy", ModelInputs(given=Example(args=(torch.ones(()),)))).tensors
    assert torch.equal(found, torch.tensor(2.5))


def test_without_a_server_all_runs_here(
    tmp_path: Path, x: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "answer.safetensors"
    found = asked(capsys, "infer_models:chain", "--input", tmp_path / "x.npy", "--output", output)
    model, _ = load_model("infer_models:chain")
    wanted = here(model, x)
    assert torch.equal(load_file(output)["output_0"], wanted)
    assert [row["class"] for row in found["top"]] == wanted[0].argsort(descending=True).tolist()
    assert sum(row["share"] for row in found["top"]) == pytest.approx(1.0)
    assert found["outputs"] == [{"shape": [1, 4], "dtype": "float32"}]
    assert found["requests"] == {"requests": 1, "device": 1, "server": 0, "gave_up": 0, "hedged": 0}
    assert found["last"]["server"] == "" and found["last"]["cut"] == found["stages"] == 3
    assert "no server to ask" in found["why"]


def test_a_server_gives_the_same_bits(
    tmp_path: Path, x: torch.Tensor, server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = load_model("infer_models:chain")
    for more in (("--cut", "1"), ("--policy", "remote")):
        output = tmp_path / "answer.safetensors"
        arguments = (
            "--input",
            tmp_path / "x.npy",
            "--server",
            server.url,
            "--repeat",
            "3",
            "--output",
            output,
        )
        found = asked(capsys, "infer_models:chain", *arguments, *more)
        assert torch.equal(load_file(output)["output_0"], here(model, x))
        assert found["requests"]["server"] == 3 and found["last"]["server"] == server.url
        assert set(found["median"]) == {"total_s", "decide_s", "device_s", "link_s", "server_s"}


def test_an_image_is_brought_to_the_models_size(
    tmp_path: Path, server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    output = tmp_path / "answer.safetensors"
    found = asked(
        capsys,
        *NET,
        "--input",
        tmp_path / "photo.png",
        "--server",
        server.url,
        "--cut",
        "5",
        "--output",
        output,
    )
    model, _ = load_model("torchvision:squeezenet1_1")
    chain = input_stages("eval", size=48)
    stored = stored_tensor((tmp_path / "photo.png").read_bytes())
    sample = chain.run(stored, sample=0, epoch=0, seed=0, start=chain.start, stop=0)
    assert torch.equal(load_file(output)["output_0"], here(model, sample[None]))
    assert len(found["top"]) == 5 and found["last"]["server"] == server.url


def test_several_inputs_come_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"first": torch.randn(2, 6), "other": torch.randn(2, 3)}
    save_file(tensors, tmp_path / "inputs.safetensors")
    output = tmp_path / "answer.safetensors"
    found = asked(capsys, "infer_models:two", "--input", tmp_path / "inputs.safetensors", "--output", output)
    model, _ = load_model("infer_models:two")
    wanted = here(model, tensors["first"], other=tensors["other"])
    assert [row["shape"] for row in found["outputs"]] == [[2, 4], [2]] and found["top"] is None
    answers = load_file(output)
    assert torch.equal(answers["output_0"], wanted["hidden"])
    assert torch.equal(answers["output_1"], wanted["sum"])


@pytest.mark.full
def test_positional_inputs_may_be_named_as_the_models_forward_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of these names does not matter: 'by' would come before 'x'."""
    model, _ = load_model("infer_models:apart")
    tensors = {"x": torch.randn(2, 3), "by": torch.rand(2, 3) + 1, "less": torch.randn(2, 3)}
    x, by, less = tensors.values()
    for given, wanted in (
        ({"x": x, "by": by}, here(model, x, 2.0, by)),
        ({"z": by, "x": x}, here(model, x, 2.0, by)),  # in order, unless named
        ({"a": x, "b": by}, here(model, x, 2.0, by)),
        ({"x": x, "times": by}, here(model, x, by)),
        (tensors, here(model, x, 2.0, by, less=less)),  # the example leaves one out
    ):
        save_file(given, tmp_path / "inputs.safetensors")
        output = tmp_path / "answer.safetensors"
        asked(capsys, "infer_models:apart", "--input", tmp_path / "inputs.safetensors", "--output", output)
        assert torch.equal(load_file(output)["output_0"], wanted)


def test_inputs_that_leave_one_out_are_an_error_that_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"by": torch.ones(2, 3)}, tmp_path / "inputs.safetensors")
    assert main(["infer", "infer_models:apart", "--input", str(tmp_path / "inputs.safetensors")]) == 2
    assert "the model takes x, times, by, less; " in capsys.readouterr().err
    save_file({"x": torch.ones(1, 3, 48, 48), "y": torch.ones(1)}, tmp_path / "inputs.safetensors")
    assert main(["infer", *NET, "--input", str(tmp_path / "inputs.safetensors")]) == 2
    err = capsys.readouterr().err
    assert "the model takes x; " in err and "holds x, y" in err


@pytest.mark.full
def test_inputs_are_named_as_forward_does_without_an_example_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = load_model("infer_models:Features")
    ids, feat, more = torch.randint(0, 10, (2,)), torch.randn(2, 3), torch.randn(2, 2)
    for given, wanted in (
        ({"feat": feat, "ids": ids}, here(model, ids, feat)),
        ({"feat": feat, "ids": ids, "more": more}, here(model, ids, feat, more)),
        ({"a": ids, "b": feat}, here(model, ids, feat)),
    ):
        save_file(given, tmp_path / "inputs.safetensors")
        output = tmp_path / "answer.safetensors"
        asked(capsys, "infer_models:Features", "--input", tmp_path / "inputs.safetensors", "--output", output)
        assert torch.equal(load_file(output)["output_0"], wanted)


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("Features", {"feat": (2, 3)}, "the model takes ids, feat; {path} holds feat"),
        ("two", {"x": (2, 6), "other": (2, 3), "z": (1,)}, "holds other, x, z, of which it does not take z"),
        ("chain", {"x": (1, 6), "y": (1, 6)}, "{path} holds x, y, of which it does not take y"),
        ("chain", {"x": (2, 7)}, "; --input {path} holds float32 (2, 7)"),
        ("chain", {"x": ()}, "--input {path}: a model's inputs must begin with a tensor that has samples"),
    ],
)
def test_what_a_model_does_not_take_is_named_with_its_file(
    model: str, given: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "inputs.safetensors"
    save_file({name: torch.ones(shape) for name, shape in given.items()}, path)
    assert main(["infer", f"infer_models:{model}", "--input", str(path)]) == 2
    assert said.format(path=path) in capsys.readouterr().err


@pytest.mark.full
def test_a_sample_without_a_batch_and_in_double_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 48, 48)))
    assert asked(capsys, *NET, "--input", tmp_path / "x.npy")["outputs"][0]["shape"] == [1, 1000]


def test_people_are_told_too(
    tmp_path: Path, x: torch.Tensor, server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(tmp_path / "x.npy"), "--server", server.url, "--cut", "1", "--repeat", "2"]
    assert main(["infer", "infer_models:chain", *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"1 of 3 stages here, the rest on {server.url}" in printed
    assert "class" in printed and "device s" in printed and "requests 2" in printed
    assert "as asked for" in printed


def test_a_server_that_does_not_answer_is_said_and_costs_nothing(
    tmp_path: Path, x: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(
        capsys, "infer_models:chain", "--input", tmp_path / "x.npy", "--server", "http://127.0.0.1:9"
    )
    assert found["requests"]["device"] == 1
    assert "Not asked: http://127.0.0.1:9" in found["why"]


@pytest.mark.full
def test_a_program_that_was_pushed_is_found(
    tmp_path: Path, x: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    push = [
        "push",
        "infer_models:chain",
        store.as_uri(),
        "--micro-batch",
        "1",
        "--granularity",
        "op",
        "--json",
    ]
    assert main(push) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(store.as_uri()) as found:
        arguments = (
            "--input",
            tmp_path / "x.npy",
            "--server",
            found.wait_ready().url,
            "--no-push",
            "--cut",
            "2",
        )
        document = asked(capsys, "infer_models:chain", *arguments)
    torch.set_num_threads(before)
    assert document["digest"] == digest and document["last"]["server"] == found.url


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["infer_models:chain", "--input", "missing.npy"], "cannot read --input missing.npy"),
        (["infer_models:chain", "--input", "x.txt"], "--input must be an image"),
        (["infer_models:chain", "--input", "{x}", "--repeat", "0"], "--repeat must be"),
        (["infer_models:chain", "--input", "{x}", "--cut", "9"], "--cut must be a whole number in 0..3"),
        (["infer_models:chain", "--input", "{x}", "--policy", "best"], "--policy must be"),
        (["infer_models:chain", "--input", "{x}", "--policy", "local", "--cut", "1"], "or --policy"),
        (["infer_models:chain", "--input", "{x}", "--deadline", "0"], "--deadline must be"),
        (["infer_models:chain", "--input", "{x}", "--exact", "nearly"], "--exact must be"),
        (["infer_models:chain", "--input", "{x}", "--server", "here"], "a server is http://HOST:PORT"),
        (["infer_models:chain", "--input", "{x}", "--output", "no/folder/here"], "does not exist"),
        (["infer_models:branch", "--input", "{x}"], "control flow depends on data"),
        (["infer_models:nobody", "--input", "{x}"], "has no callable"),
        ([*NET, "--input", "{x}"], "the model does not run"),
        (["infer_models:chain", "--input", "{photo}"], "is an image, and the model takes an example"),
        ([*NET, "--input", "{broken}"], "is no image that can be read"),
        (["infer_models:chain", "--input", "{objects}"], "no array of numbers: it holds Python objects\n"),
        (["infer_models:chain", "--input", "{words}"], "no array of numbers: it is no .npy file\n"),
        (["infer_models:chain", "--input", "{text}"], "is no safetensors file"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, x: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        name: tmp_path / name
        for name in ("photo.png", "broken.png", "objects.npy", "words.npy", "text.safetensors")
    }
    Image.new("RGB", (8, 8)).save(files["photo.png"])
    files["broken.png"].write_bytes(b"no image")
    np.save(files["objects.npy"], np.array([{}], dtype=object), allow_pickle=True)
    files["words.npy"].write_text("words")
    files["text.safetensors"].write_text("words")
    names = {"x": tmp_path / "x.npy", **{name.partition(".")[0]: path for name, path in files.items()}}
    assert main(["infer", *(argument.format(**names) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines(keepends=True) if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0]
    assert "random weights" in captured.err or captured.err.count("\n") == 1


def test_a_server_without_the_program_says_how_it_comes_by_it(
    tmp_path: Path, x: torch.Tensor, server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "other.safetensors"
    model, _ = load_model("infer_models:chain", seed=5)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, weights)
    arguments = ["--input", str(tmp_path / "x.npy"), "--server", server.url, "--no-push"]
    assert main(["infer", "infer_models:chain", *arguments, "--weights", str(weights)]) == 2
    err = capsys.readouterr().err
    assert "--no-push" in err and "upriver push MODEL STORE --granularity op --micro-batch 1" in err


def test_a_server_that_is_sent_the_program_for_long_is_waited_for(
    tmp_path: Path,
    x: torch.Tensor,
    server: Running,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted upload would begin anew each time, and never complete."""
    weights, noted = tmp_path / "other.safetensors", threading.Event()
    model, _ = load_model("infer_models:chain", seed=6)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, weights)
    monkeypatch.setattr(offload_module, "START_S", 0.05)

    def note(message: str) -> None:
        progress.note(message)
        noted.set()

    monkeypatch.setattr(infer_module, "note", note)
    with between(server.url) as front:

        def slowly(path: str) -> None:
            if "/programs/" in path:
                noted.wait(60)

        front.before = slowly
        arguments = ["--server", front.url, "--policy", "remote", "--weights", str(weights)]
        found = asked(capsys, "infer_models:chain", "--input", tmp_path / "x.npy", *arguments)
        assert found["requests"]["server"] == 1 and found["last"]["server"] == front.url
    assert noted.is_set()
