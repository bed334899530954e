"""Where a training run stands, in one safetensors file: tensors as tensors, all else as JSON beside them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upriver.errors import ConfigError, StoreError

SCHEMA = "upriver.checkpoint/1"
_META = "upriver"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a run has done besides its tensors.

    Attributes:
        config: The settings that must be the same to go on.
        job: The job's own state.
        epochs: One record for each finished epoch.
        losses: (loss, samples) of each step of the epoch under way.
    """

    config: Mapping[str, Any]
    job: Mapping[str, Any]
    epochs: list[dict[str, Any]]
    losses: list[tuple[float, int]]


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        StoreError: If the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Tied weights share memory, which the format does not know: each name gets its own copy.
    own = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    unfinished = None
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        os.close(handle)
        save_file(own, unfinished, metadata=dict(metadata) if metadata else None)
        os.chmod(unfinished, 0o666 & ~_umask())
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    finally:
        if unfinished is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)


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


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, config: Mapping[str, Any]
) -> Progress:
    """Put a checkpoint into a model, its optimizer and torch's random state.

    Raises:
        ConfigError: If the file is no checkpoint, or of a run with other settings; names what differs.
    """
    document, tensors = _read(path)
    for name, value in config.items():
        if document["config"].get(name) != value:
            raise ConfigError(
                f"{path} is of another run: its {name} is {document['config'].get(name)!r}, here {value!r}; "
                "delete it to start anew"
            )
    _restore(model, _part(tensors, "model"))
    state: dict[int, dict[str, Any]] = {
        int(number): dict(values) for number, values in document["plain"].items()
    }
    for name, tensor in _part(tensors, "optimizer").items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": document["param_groups"]})
    torch.set_rng_state(tensors["random"])
    return Progress(
        config=document["config"],
        job=document["job"],
        epochs=document["epochs"],
        losses=[(loss, count) for loss, count in document["losses"]],
    )


def job_state(path: Path) -> Mapping[str, Any]:
    """The job's own state in a checkpoint.

    Raises:
        ConfigError: If the file is no checkpoint.
    """
    document, _ = _read(path)
    state = document["job"]
    return state if isinstance(state, dict) else {}


@torch.no_grad()
def _restore(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Write what differs; a job watches its frozen tensors, and would take a write of the same bits amiss."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in saved and not torch.equal(tensor.detach().cpu(), saved[name]):
            tensor.copy_(saved[name])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {}).get(_META, "{}"))
            if document.get("schema") != SCHEMA:
                raise ConfigError(f"{path} is not a checkpoint of {SCHEMA}")
            return document, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the checkpoint {path}: {error}") from error


def _part(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(f"{part}/"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{part}/")
    }


def _umask() -> int:
    """What the user's files are created with; mkstemp ignores it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
