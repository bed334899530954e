"""Check that a model loads local weights from a file, an index or a folder, however the path is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from upriver import coldstart
from upriver.coldstart.format.manifest import publish
from upriver.coldstart.plain_load import load_weights
from upriver.errors import Damaged, ModelError, ProgramError, UpriverError
from upriver.store import Store


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def reference() -> nn.Sequential:
    torch.manual_seed(5)
    model = build()
    model(torch.randn(3, 4))
    return model


def sharded(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Write an index of two files, the first of which has stale copies of the second one's tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(state)
    save_file(
        {name: torch.zeros_like(value) for name, value in state.items()}
        | {name: state[name] for name in names[:3]},
        folder / "1.safetensors",
    )
    save_file({name: state[name] for name in names[3:]}, folder / "2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {n: f"{1 + (k >= 3)}.safetensors" for k, n in enumerate(names)}})
    )
    return index


def a_file(folder: Path, state: dict[str, torch.Tensor], name: str = "w.safetensors") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / name)
    return folder / name


def in_a_cache(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Return a folder of links to files elsewhere, as Hugging Face's libraries keep them."""
    blobs, there = folder / "models--a" / "blobs", folder / "models--a" / "snapshots" / "rev"
    sharded(blobs, state)
    there.mkdir(parents=True)
    for each in blobs.iterdir():
        (there / each.name).symlink_to(f"../../blobs/{each.name}")
    return there


def linked(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    there = a_file(folder / "elsewhere", state)
    (folder / "here").mkdir()
    (folder / "here" / "model.safetensors").symlink_to(there)
    return folder / "here"


def published(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    publish(state, Store.open(folder.as_uri()), "w.safetensors")
    return folder / "w.safetensors"


PLACES: dict[str, Callable[[Path, dict[str, torch.Tensor]], Path | str]] = {
    "a file": a_file,
    "a file of another name": lambda folder, state: a_file(folder, state, "weights.st"),
    "a file in upper case": lambda folder, state: a_file(folder, state, "W.SAFETENSORS"),
    "a name with blanks": lambda folder, state: a_file(folder, state, "a b%20#1/weights .safetensors"),
    "a file without its ending": lambda folder, state: a_file(folder, state).with_suffix(""),
    "a folder of one file": lambda folder, state: a_file(folder, state, "net/model.safetensors").parent,
    "a published file": published,
    "an index": sharded,
    "a folder": lambda folder, state: sharded(folder / "net", state).parent,
    "a slash behind": lambda folder, state: f"{sharded(folder / 'net', state).parent}/",
    "a way up": lambda folder, state: f"{sharded(folder / 'net', state).parent}/../net",
    "a relative path": lambda folder, state: os.path.relpath(sharded(folder / "net", state).parent),
    "a cache of links": in_a_cache,
    "an index in a cache": lambda f, state: in_a_cache(f, state) / "model.safetensors.index.json",
    "a link to a file elsewhere": linked,
    "a link to a folder": lambda f, state: (
        (f / "link").symlink_to(sharded(f / "net", state).parent),
        f / "link",
    )[1],
}


@pytest.mark.parametrize("place", PLACES)
def test_load_weights_takes_whatever_names_them(place: str, reference: nn.Sequential, tmp_path: Path) -> None:
    named = PLACES[place](tmp_path, reference.state_dict())
    model = build()
    load_weights(model, Path(named))
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    if Path(named).name not in ("weights.st", "W.SAFETENSORS") and "%" not in str(named):
        model, handle = coldstart.begin(build, f"file://{os.path.abspath(named)}")
        assert handle.wait(60)
        assert all(torch.equal(model.state_dict()[n], v) for n, v in reference.state_dict().items())


def pickled(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save(state, folder / "weights")
    return folder / "weights"


def pickled_shards(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    index = sharded(folder, state)
    index.write_text(index.read_text().replace("2.safetensors", "pytorch_model-2.bin"))
    return folder


def overwritten(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    published(folder, state)
    return a_file(folder, {name: value + 1 for name, value in state.items()})


def flipped(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    file = published(folder, state)
    data, status = bytearray(file.read_bytes()), file.stat()
    data[-64] ^= 1
    with file.open("r+b") as there:
        there.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return file


REFUSED: dict[str, tuple[Callable[[Path, dict[str, torch.Tensor]], Path], type[UpriverError], str]] = {
    "nothing": (
        lambda f, state: f / "no" / "w.safetensors",
        ModelError,
        "cannot read weights from .*not exist",
    ),
    "no such file": (
        lambda f, state: f / "w.safetensors",
        ModelError,
        "cannot read weights from .*w.safetensors",
    ),
    "an empty folder": (lambda f, state: f, ModelError, "there is none of"),
    "two files and no index": (
        lambda f, state: (a_file(f, state, "a.safetensors"), a_file(f, state, "b.safetensors"), f)[2],
        ModelError,
        "name one of the files that it holds: a.safetensors, b.safetensors",
    ),
    "a pickle": (pickled, ProgramError, "is a pickled checkpoint"),
    "an index of pickles": (pickled_shards, ProgramError, "pytorch_model-2.bin is a pickled checkpoint"),
    "another file beside a manifest": (overwritten, ModelError, "is not the one that its manifest"),
    "a wrong bit": (flipped, Damaged, "have another checksum than was published"),
    "too few": (
        lambda f, state: a_file(f, {n: v for n, v in state.items() if n != "2.bias"}),
        ModelError,
        "lacks 1 tensors, first '2.bias'",
    ),
    "too many": (lambda f, state: a_file(f, state | {"x": torch.ones(1)}), ModelError, "has not, 1 tensors"),
    "a prefix": (
        lambda f, state: a_file(f, {f"model.{n}": v for n, v in state.items()}),
        ModelError,
        "lacks . tensors",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_load_weights_of_what_is_none_is_refused_in_one_line(
    case: str, reference: nn.Sequential, tmp_path: Path
) -> None:
    place, error, problem = REFUSED[case]
    with pytest.raises(error, match=problem) as caught:
        load_weights(build(), place(tmp_path, reference.state_dict()))
    assert len(str(caught.value).splitlines()) == 1


class Hooked(nn.Module):
    """Transform the tensors that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_load_state_dict_pre_hook(self._turn)

    def _turn(self, _module: nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"].t().clone()


def test_load_weights_runs_a_models_own_loading_code(tmp_path: Path) -> None:
    weight = torch.arange(9.0).reshape(3, 3)
    file = a_file(tmp_path, {"layer.weight": weight, "layer.bias": torch.ones(3)})
    model = Hooked()
    load_weights(model, file)
    assert torch.equal(model.layer.weight, weight.t())
