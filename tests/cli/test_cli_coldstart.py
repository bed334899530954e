"""Test ``upriver coldstart``: its output, plots and errors, for weights of a model and for programs."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.examples import some
from tests.program.nets import Small
from upriver.cli import main
from upriver.coldstart import publish_model
from upriver.coldstart.load_program import publish
from upriver.program.capture.prefix import capture
from upriver.program.graph import artifact_store
from upriver.program.graph.constants import keys_read
from upriver.program.graph.executor import Program
from upriver.program.models.registry import load_model
from upriver.store import Store

NET = ("torchvision:squeezenet1_1", "--input-shape", "3,48,48")


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """Publish weights of a network; return their URI."""
    model, inputs = load_model(NET[0], seed=5, input_shape=(3, 48, 48))
    publish_model(model.eval(), Store.open(tmp_path.as_uri()), "net.safetensors", (inputs.example(1),))
    return f"{tmp_path.as_uri()}/net"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the command's output as JSON."""
    assert main(["coldstart", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("grouping", some(1, ["upriver", "pisel", "layer_by_layer"]))
def test_the_answer_is_that_of_the_plain_way(
    grouping: str, stored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, stored, *NET, "--compare", "--batch", "2", "--grouping", grouping)
    assert found["plain"]["same_answer"] is True
    kinds = [moment["kind"] for moment in found["moments"]]
    model, _ = load_model(NET[0])
    names = set(model.state_dict())
    filled, touched = (
        {name for moment in found["moments"] if moment["kind"] == kind for name in moment["weights"]}
        for kind in ("filled", "touched")
    )
    assert filled == names and touched <= names, "what is there already is not waited for"
    assert kinds.count("constructed") == kinds.count("found") == kinds.count("loaded") == 1
    assert found["requests"] == kinds.count("request") >= 1
    assert found["weight_bytes"] == sum(value.nbytes for value in model.state_dict().values())
    assert 0 < found["bytes_before_answer"] <= found["weight_bytes"]


def test_a_file_of_anyone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = load_model(NET[0], seed=7)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = asked(capsys, f"{tmp_path.as_uri()}/model.safetensors", *NET, "--compare")
    assert found["plain"]["same_answer"] is True


def test_what_the_first_call_has_shown_is_there_when_the_command_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_model(NET[0], seed=6)
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    put, read, forward = Store.put, Store.read_into_async, nn.Conv2d.forward
    called = threading.Event()

    def slow(store: Store, path: str, data: bytes) -> None:
        time.sleep(1)
        put(store, path, data)

    async def patient(*given: Any, **options: Any) -> None:
        await asyncio.to_thread(called.wait, 60)
        await read(*given, **options)

    def telling(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        called.set()
        return forward(conv, x)

    monkeypatch.setattr(nn.Conv2d, "forward", telling)
    monkeypatch.setattr(Store, "read_into_async", patient)
    monkeypatch.setattr(Store, "put", slow)
    asked(capsys, f"{tmp_path.as_uri()}/net", *NET)
    assert (tmp_path / "net.order.json").exists()


class Drawing(Small):
    """Network that adds a random number in each forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the small network, and add a random number."""
        return super().forward(x) + torch.rand(())


def test_another_answer_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(Drawing().state_dict(), tmp_path / "model.safetensors")
    name = f"{__name__}:{Drawing.__name__}"
    uri, shape = f"{tmp_path.as_uri()}/model.safetensors", ("--input-shape", "3,32,32")
    assert main(["coldstart", uri, name, *shape]) == 0
    assert main(["coldstart", uri, name, *shape, "--compare"]) == 1
    assert "ANOTHER ONE" in capsys.readouterr().out


def tupled() -> tuple[nn.Module, int]:
    """Return a tuple, which a model's constructor may not do."""
    return Small(), 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ("--input-shape", "3,7"),
            "cannot be called with an input of --input-shape 3,7, float32 (1, 3, 7): ",
        ),
        (("--input", "FILE"), "cannot be called with --input FILE, float32 (1, 3): RuntimeError: "),
    ],
)
def test_an_input_that_the_model_does_not_take(
    given: tuple[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(Drawing().state_dict(), tmp_path / "model.safetensors")
    np.save(tmp_path / "x.npy", np.zeros((1, 3), dtype=np.float32))
    uri, name, file = f"{tmp_path.as_uri()}/model", f"{__name__}:Drawing", str(tmp_path / "x.npy")
    assert main(["coldstart", uri, name, given[0], given[1].replace("FILE", file), "--json"]) == 2
    said = capsys.readouterr().err
    assert told.replace("FILE", file) in said and len(said.strip().splitlines()) == 1


def test_what_a_constructor_returned_beside_its_model(
    stored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coldstart", stored, f"{__name__}:tupled"]) == 2
    told = "tupled must return a torch module, or a module and an example of its inputs; its second value"
    assert told in capsys.readouterr().err


def test_for_people(stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.png"
    assert main(["coldstart", stored, *NET, "--compare", "--plot", str(picture)]) == 0
    told = capsys.readouterr()
    assert "first answer" in told.out and "the same to the bit" in told.out
    assert picture.read_bytes().startswith(b"\x89PNG") and f"Picture: {picture}" in told.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("s3://nowhere", *NET), "weights are s3://BUCKET/NAME, file:///FOLDER/NAME or a path"),
        (("/", "torchvision:resnet18"), "weights are a file or a folder below another one"),
        (("w", "torchvision:resnet18", "--option", "endpoint=x"), "takes no options, got endpoint"),
        (("nowhere", *NET), "nowhere"),
        (("./not/at/all", *NET), "does not exist"),
        (("file:///nowhere/at/all", *NET), "does not exist"),
        (("STORED", "torchvision:nothing"), "nothing"),
        (("STORED", "torchvision:alexnet"), "has not the weights of AlexNet"),
        (("STORED", *NET, "--batch", "0"), "--batch must be at least 1"),
        (("STORED", *NET, "--grouping", "none"), "grouping must be one of"),
        (("STORED", *NET, "--plot", "x.txt"), "--plot takes a file name"),
        (("STORED", *NET, "--stop", "1"), "--stop is for a program; leave MODEL out"),
        (("STORED",), "without MODEL, URI is that of a program, STORE/PREFIX/programs/DIGEST"),
    ],
)
def test_what_cannot_be(
    arguments: tuple[str, ...], told: str, stored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coldstart", *(stored if each == "STORED" else each for each in arguments)]) == 2
    said = capsys.readouterr()
    assert told in said.err and "Traceback" not in said.err and not said.out


def test_a_pickled_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({}, tmp_path / "model.pt")
    assert main(["coldstart", f"{tmp_path.as_uri()}/model.pt", *NET]) == 2
    assert "safetensors.torch.save_model" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- programs


class Words(nn.Module):
    """Look up rows of a table; the answer holds a NaN where all values are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 6), nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply to `(rows, 3)` of int64 and `(rows, 2)`."""
        total = tokens.sum(1)
        return self.head(self.table(tokens).mean(1)) + shift, total / total


MADE: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "small": lambda: (Small(), (torch.randn(4, 3, 16, 16),)),
    "words": lambda: (Words(), (torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.randn(2, 2))),
}


@functools.cache
def made(name: str) -> Program:
    torch.manual_seed(8)
    model, given = MADE[name]()
    return capture(model.eval(), given)


def pushed(name: str, tmp_path: Path) -> str:
    """Publish a program; return its URI."""
    publish(made(name), Store.open(tmp_path.as_uri()))
    return f"{tmp_path.as_uri()}/.upriver/programs/{made(name).digest}"


@pytest.mark.parametrize("grouping", some(1, ["upriver", "pisel", "layer_by_layer"]))
@pytest.mark.parametrize("name", MADE)
def test_a_program_answers_as_it_does_the_plain_way(
    name: str, grouping: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = made(name)
    found = asked(capsys, pushed(name, tmp_path), "--compare", "--grouping", grouping)
    assert found["plain"]["same_answer"] is True and found["streamed"] is True
    assert (found["digest"], found["micro_batch"]) == (program.digest, program.micro_batch)
    assert found["stop"] == found["stages"] == program.num_stages
    nbytes = sum(tensor.nbytes for tensor in program.weight_tensors.values())
    assert found["weight_bytes"] == found["program_bytes"] == nbytes <= found["requested_bytes"]
    kinds = [moment["kind"] for moment in found["moments"]]
    filled = {moment["weights"][0] for moment in found["moments"] if moment["kind"] == "filled"}
    touched = {moment["weights"][0] for moment in found["moments"] if moment["kind"] == "touched"}
    assert filled == set(program.weight_tensors) and touched <= filled
    assert kinds.count("found") == kinds.count("loaded") == 1 and "constructed" not in kinds
    assert "constructed_s" not in found and found["found_s"] <= found["first_byte_s"] <= found["answer_s"]
    assert found["requests"] == kinds.count("request") >= 1


def test_only_the_stages_before_a_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, uri = made("small"), pushed("small", tmp_path)
    sizes, weights = [], []
    for stop in range(program.num_stages + 1):
        found = asked(capsys, f"{uri}/graph.json", "--stop", str(stop), "--compare")
        keys = keys_read(program.graph, stop)
        assert found["weight_bytes"] == sum(program.weight_tensors[key].nbytes for key in keys)
        assert found["requested_bytes"] >= found["weight_bytes"]
        assert bool(found["requests"]) is bool(keys) is (found["first_byte_s"] is not None)
        assert (found["stop"], found["stages"]) == (stop, program.num_stages)
        assert found["plain"]["same_answer"] is True
        sizes.append(found["requested_bytes"])
        weights.append(found["weight_bytes"])
    assert sizes == sorted(sizes) and sizes[0] == 0 and len(set(sizes)) > 3
    assert weights[0] == 0 < weights[1] < weights[-1] == found["program_bytes"]


def test_a_program_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, uri, picture = made("small"), pushed("small", tmp_path), tmp_path / "load.svg"
    assert main(["coldstart", uri, "--stop", "2", "--compare", "--plot", str(picture)]) == 0
    told = capsys.readouterr()
    fields = dict(line.split("  ", 1) for line in told.out.splitlines())
    assert fields["program"].strip() == program.digest
    assert fields["stages"].strip() == f"2 of {program.num_stages}, for 4 samples"
    assert "that all stages read" in fields["weights"] and "requests, at " in fields["asked for"]
    assert "first answer" in fields and "constructed" not in fields
    assert "the same to the bit" in fields["the plain way"]
    assert "<svg" in picture.read_text(encoding="utf-8") and f"Picture: {picture}" in told.err


def test_nothing_of_the_weights_for_no_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.png"
    assert main(["coldstart", pushed("small", tmp_path), "--stop", "0", "--plot", str(picture)]) == 0
    assert "0 B in 0 requests" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("samples", [1, 3, 7])
def test_samples_of_a_file_are_repeated_or_cut(
    samples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = pushed("small", tmp_path)
    rows = np.random.default_rng(0).standard_normal((samples, 3, 16, 16))  # float64, as numpy has it
    np.save(tmp_path / "x.npy", rows[0] if samples == 1 else rows)
    given = run_with(monkeypatch)
    found = asked(capsys, uri, "--input", str(tmp_path / "x.npy"), "--compare")
    expected = torch.from_numpy(rows).float().repeat(4, 1, 1, 1)[:4]
    assert [torch.equal(tensor, expected) for tensor in given] == [True, True]
    assert found["plain"]["same_answer"] is True


def test_tensors_of_a_file_are_taken_in_the_order_of_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = pushed("words", tmp_path)
    tokens, shift = torch.tensor([[1, 2, 3], [3, 0, 4]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file({"2_shift": shift, "1_tokens": tokens}, tmp_path / "x.safetensors")
    given = run_with(monkeypatch)
    assert asked(capsys, uri, "--input", str(tmp_path / "x.safetensors"))["answer_s"] > 0
    assert len(given) == 2 and torch.equal(given[0], tokens) and torch.equal(given[1], shift)


def run_with(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Record the inputs of programs that run from now on."""
    given: list[torch.Tensor] = []
    run = Program.run

    def noted(self: Program, tensors: Any, start: int, stop: int) -> Any:
        given.extend(tensors)
        return run(self, tensors, start, stop)

    monkeypatch.setattr(Program, "run", noted)
    return given


def test_a_program_without_a_manifest_is_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, store = made("small"), Store.open(tmp_path.as_uri())
    artifact_store.publish(program, store)
    uri = f"{tmp_path.as_uri()}/.upriver/programs/{program.digest}"
    found = asked(capsys, uri, "--compare", "--stop", "1")
    assert found["streamed"] is False and "moments" not in found
    assert found["weight_bytes"] == program.weight_nbytes and found["plain"]["same_answer"] is True
    assert main(["coldstart", uri]) == 0
    assert "read whole before the first stage" in capsys.readouterr().out
    assert main(["coldstart", uri, "--plot", str(tmp_path / "load.png")]) == 2
    told = capsys.readouterr()
    assert "--plot: the weights of" in told.err and "push the program again" in told.err and not told.out
    assert not (tmp_path / "load.png").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("s3://bucket/models/birds",), "weights need the MODEL that they are of"),
        (("PUSHED", "--batch", "2"), "--batch is for a MODEL; a program says itself what it takes"),
        (("PUSHED", "--input-shape", "3,8,8"), "--input-shape is for a MODEL"),
        (("PUSHED", "--stop", "-1"), "stop must lie in 0.."),
        (("PUSHED", "--stop", "1000"), "stop must lie in 0.."),
        (("PUSHED", "--grouping", "none"), "grouping must be one of"),
        (("PUSHED", "--input", "WRONG"), "cut 0 takes float32 of shape (4, 3, 16, 16)"),
        (("STORE/.upriver/programs/x",), "a digest is 64 hexadecimal characters"),
        ((f"STORE/.upriver/programs/{'0' * 64}",), "no program 0000"),
    ],
)
def test_what_no_program_can_be(
    arguments: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "wrong.npy", np.zeros((4, 3, 8, 8), dtype=np.float32))
    uri = pushed("small", tmp_path)
    stands_for = {"PUSHED": uri, "WRONG": str(tmp_path / "wrong.npy")}
    given = [stands_for.get(each, each).replace("STORE/", f"{tmp_path.as_uri()}/") for each in arguments]
    assert main(["coldstart", *given]) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and not said.out


def test_weights_that_turn_out_to_be_damaged_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = pushed("small", tmp_path)
    [file] = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-64] ^= 1
    file.write_bytes(data)
    assert main(["coldstart", uri]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and "Traceback" not in said.err and not said.out
