"""Save and restore a training run in one safetensors file: tensors, and all other state as JSON metadata."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upriver.cli.output import written
from upriver.errors import ConfigError, StoreError
from upriver.text import bytes_text

SCHEMA = "upriver.checkpoint/1"
_META = "upriver"

MAY_BECOME = {("on_bad_sample", "fail", "skip")}
"""Settings that may change when a run resumes: (name, saved value, new value). A run that fails at the first
bad sample has trained the same steps as one that skips bad samples. In the other direction, samples may be
missing already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of a run besides its tensors.

    Attributes:
        config: Settings that must be equal to resume.
        epochs: One record for each trained epoch; the last one has no ``accuracy`` before it is evaluated.
        losses: (loss, samples) of each step of the present epoch.
    """

    config: Mapping[str, Any]
    job: Mapping[str, Any]
    epochs: list[dict[str, Any]]
    losses: list[tuple[float, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint as read: the run's progress, and its tensors."""

    progress: Progress
    tensors: Mapping[str, torch.Tensor]
    param_groups: list[dict[str, Any]]
    plain: Mapping[str, Mapping[str, Any]]


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all; see `upriver.cli.output.written`.

    Raises:
        StoreError: If the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save, save_file

    # Tied weights share memory, which the format cannot express: each name gets its own copy.
    own = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    told = dict(metadata) if metadata else None
    with written(path) as new:
        if new == path:  # a device, or a pipe
            path.write_bytes(save(own, told))
            return
        try:
            save_file(own, new, metadata=told)
        except SafetensorError as error:
            raise StoreError(f"cannot write {path}: {error}") from error


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint, whole or not at all."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    tensors = {f"model/{name}": value for name, value in model.state_dict().items() if name not in frozen}
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for number, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{number}/{key}"] = value
            else:
                plain.setdefault(str(number), {})[key] = value
    tensors["random"] = torch.get_rng_state()
    document = {
        "schema": SCHEMA,
        "config": dict(progress.config),
        "job": dict(progress.job),
        "epochs": progress.epochs,
        "losses": progress.losses,
        "param_groups": state["param_groups"],
        "plain": plain,
    }
    save_tensors(path, tensors, {_META: json.dumps(document)})


def check_room(path: Path, output: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that the disk has room for a run's files before training.

    The disk holds at most two checkpoints, or a checkpoint and the trained model. An old checkpoint stays
    until the new one is whole. Existing files need no further room.

    Raises:
        StoreError: If room is missing; the message says how much is free and needed.
    """
    trainable = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    state = model.state_dict()
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    whole = sum(tensor.nbytes for tensor in state.values())
    checkpoint = whole - frozen + _states(optimizer) * trainable
    needed = max(checkpoint, whole) + (0 if path.exists() else checkpoint)
    free = shutil.disk_usage(Path(os.path.realpath(output)).parent).free
    if free < needed:
        raise StoreError(
            f"the disk of {output} has {bytes_text(free)} free, and training needs {bytes_text(needed)}: "
            f"checkpoints of {bytes_text(checkpoint)} and a model of {bytes_text(whole)}"
        )


def _states(optimizer: torch.optim.Optimizer) -> int:
    """Count an optimizer's tensors per parameter, by a step on a parameter of its own."""
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float32, device="cpu"))
    parameter.grad = parameter.detach().clone()
    same = type(optimizer)([{**optimizer.param_groups[0], "params": [parameter]}])  # type: ignore[call-arg]
    same.step()
    kept = [value for value in same.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.shape == parameter.shape for value in kept)


def load(path: Path, *, config: Mapping[str, Any]) -> Saved:
    """Read a checkpoint without changing anything.

    Raises:
        ConfigError: If the file is no checkpoint, or of a run with other settings; the message names the
            difference.
    """
    from safetensors.torch import load_file

    document = _document(path)
    for name, value in config.items():
        then = document["config"].get(name)
        if then != value and (name, then, value) not in MAY_BECOME:
            raise ConfigError(
                f"{path} is of another run: its {name} is {then!r}, here {value!r}; delete it to start anew"
            )
    return Saved(
        progress=Progress(
            config=document["config"],
            # Older versions kept the mode among the settings.
            job={"exact": document["config"].get("exact"), **document["job"]},
            epochs=document["epochs"],
            losses=[(loss, count) for loss, count in document["losses"]],
        ),
        tensors=load_file(path),
        param_groups=document["param_groups"],
        plain=document["plain"],
    )


def restore(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's tensors into a model, its optimizer and torch's random state."""
    _restore(model, _part(saved.tensors, "model"))
    state: dict[int, dict[str, Any]] = {int(number): dict(values) for number, values in saved.plain.items()}
    for name, tensor in _part(saved.tensors, "optimizer").items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": saved.param_groups})
    torch.set_rng_state(saved.tensors["random"])


def job_state(path: Path) -> Mapping[str, Any]:
    """Return the job's state in a checkpoint."""
    state = _document(path)["job"]
    return state if isinstance(state, dict) else {}


@torch.no_grad()
def _restore(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Write only tensors that differ.

    A job watches its frozen tensors, and would report a write of equal bits.
    """
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in saved and not torch.equal(tensor.detach().cpu(), saved[name]):
            tensor.copy_(saved[name])


def _document(path: Path) -> dict[str, Any]:
    """Return the checkpoint's document without reading the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            document: dict[str, Any] = json.loads((file.metadata() or {}).get(_META, "{}"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the checkpoint {path}: {error}") from error
    if document.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is not a checkpoint of {SCHEMA}")
    return document


def _part(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(f"{part}/"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{part}/")
    }
