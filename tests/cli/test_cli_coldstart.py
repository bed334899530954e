"""``upriver coldstart``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from upriver.cli import main
from upriver.coldstart import publish_model
from upriver.program.names import load_model
from upriver.store import Store

NET = ("torchvision:squeezenet1_1", "--input-shape", "3,48,48")


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """Weights of a network, published."""
    model, inputs = load_model(NET[0], seed=5, input_shape=(3, 48, 48))
    publish_model(model.eval(), Store.open(tmp_path.as_uri()), "net.safetensors", (inputs.example(1),))
    return f"{tmp_path.as_uri()}/net"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command says, as JSON."""
    assert main(["coldstart", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("grouping", ["upriver", "pisel", "layer_by_layer"])
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


def test_for_people(stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.png"
    assert main(["coldstart", stored, *NET, "--compare", "--plot", str(picture)]) == 0
    told = capsys.readouterr()
    assert "first answer" in told.out and "the same to the bit" in told.out
    assert picture.read_bytes().startswith(b"\x89PNG") and f"Picture: {picture}" in told.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere", *NET), "weights are s3://BUCKET/NAME or file:///FOLDER/NAME"),
        (("file:///nowhere/at/all", *NET), "does not exist"),
        (("STORED", "torchvision:nothing"), "nothing"),
        (("STORED", "torchvision:alexnet"), "has not the weights of AlexNet"),
        (("STORED", *NET, "--batch", "0"), "--batch must be at least 1"),
        (("STORED", *NET, "--grouping", "none"), "grouping must be one of"),
        (("STORED", *NET, "--plot", "x.txt"), "--plot takes a file name"),
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
