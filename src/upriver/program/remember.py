"""Proofs are made once: what was proven for a model, on this machine and these versions, is remembered.

A proof is named by a digest of everything it depends on: the program (its graph and weights), the user's
model as code (classes, their source, settings) and as a list of parameters, what crosses the freeze point,
versions and processor. One small file a proof, under ``$UPRIVER_CACHE`` or the user's cache folder; losing
it costs the seconds of a new proof.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import upriver
from upriver.program.cache import cache_folder, write_whole
from upriver.program.point import FreezePoint
from upriver.program.program import Program

SCHEMA = "upriver.proof/1"


def proof_digest(
    model: nn.Module, program: Program, point: FreezePoint, *, autocast: torch.dtype | None = None
) -> str:
    """The name of the proof that this program and this model's tail are the whole model."""
    folded = hashlib.sha256()
    for fact in _facts(model, program, point, autocast):
        folded.update(fact.encode())
        folded.update(b"\0")
    return folded.hexdigest()


def is_proven(digest: str) -> bool:
    """Whether that proof was made before."""
    try:
        found = json.loads(_path(digest).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("schema") == SCHEMA and found.get("proof") == digest


def remember(digest: str, program: Program) -> None:
    """Keep that a proof was made. A cache that cannot be written is no error: the next job proves again."""
    text = json.dumps({"schema": SCHEMA, "proof": digest, "program": program.digest}) + "\n"
    with contextlib.suppress(OSError):
        write_whole(_path(digest), text)


def _path(digest: str) -> Path:
    return cache_folder() / "proofs" / f"{digest}.json"


def _facts(
    model: nn.Module, program: Program, point: FreezePoint, autocast: torch.dtype | None
) -> Iterator[str]:
    yield SCHEMA
    yield f"{upriver.__version__} {torch.__version__} {platform.machine()} {torch.get_num_threads()}"
    yield f"{torch.backends.cpu.get_cpu_capability()} {_device_name(program.device)} {autocast}"
    yield program.digest
    yield str([(str(ship.source), str(ship.shape), ship.overwritten) for ship in point.ships])
    yield str(point.skipped)
    yield repr(model)
    yield from (_settings(module) for module in model.modules())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    classes = {type(module) for module in model.modules()}
    for module_class in sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield f"{module_class.__module__}.{module_class.__qualname__} {_source(module_class)}"


_OURS_NOT = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Attributes of every module that stand elsewhere among the facts, or that a call does not depend on."""

_DEPTH = 4
"""How deep settings may lie in objects; below, only types are told apart."""


def _settings(module: nn.Module) -> str:
    """What a forward may branch on: a module's attributes, whatever they are."""
    own = {name: value for name, value in vars(module).items() if name not in _OURS_NOT}
    return str(sorted((name, _fold(value, _DEPTH)) for name, value in own.items() if not _is_hooks(name)))


def _is_hooks(name: str) -> bool:
    return name.startswith("_") and "hook" in name


def _fold(value: Any, depth: int) -> str:
    """A value as text that is the same for equal ones in every process."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            return repr(value)
        case torch.Tensor():
            return f"tensor {tuple(value.shape)} {value.dtype} {_digest_of(value)}"
        case nn.Module():
            return type(value).__qualname__
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth == 0:
        return kind
    match value:
        case dict():
            return f"{kind} {[(_fold(k, depth - 1), _fold(v, depth - 1)) for k, v in value.items()]}"
        case set() | frozenset():
            return f"{kind} {sorted(_fold(item, depth - 1) for item in value)}"
        case list() | tuple():
            return f"{kind} {[_fold(item, depth - 1) for item in value]}"
    if inspect.isroutine(value) or inspect.isclass(value):
        return (
            f"{kind} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')} {_source(value)}"
        )
    return f"{kind} {_fold(getattr(value, '__dict__', None), depth - 1)}"


def _digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(repr(tensor.detach().cpu().flatten().tolist()).encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _source(thing: Any) -> str:
    """The digest of the file that a class or a function stands in: what it calls there counts, too."""
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:  # built in, or made at run time: its settings are all that there is
        return ""
    return _file_digest(file, os.path.getmtime(file)) if file and os.path.exists(file) else ""


@functools.lru_cache(maxsize=4096)
def _file_digest(file: str, _changed: float) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
