"""Remember proofs: a model proven on this machine, with these versions, is not proven again.

A digest of everything that a proof depends on names it:

- the program: its graph and weights;
- the code of the user's model: classes, their source, settings;
- the model's parameters, and the tensors that cross the freeze point;
- versions and processor.

Each proof is one small file, under ``$UPRIVER_CACHE`` or the user's cache folder. Losing the file costs the
seconds of a new proof.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import platform
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch
import xxhash
from torch import nn

import upriver
from upriver.cache import Cache
from upriver.program.compiled_code import closure_of
from upriver.program.example_inputs import Example
from upriver.program.graph.executor import Program
from upriver.program.split.freeze_point import CrossingTensor, FreezePoint
from upriver.program.tensor_layouts import stored_parts

SCHEMA: Literal["upriver.proof/2"] = "upriver.proof/2"


def proof_digest(
    model: nn.Module, program: Program, point: FreezePoint, *, autocast: torch.dtype | None = None
) -> str:
    """Return the name of the proof that this program and this model's tail equal the whole model."""
    facts = model_facts(model, point.ships, point.skipped, device=program.device, autocast=autocast)
    return digest_of((SCHEMA, program.digest, *facts))


def outline_proof_digest(
    model: nn.Module,
    example: Example,
    point: FreezePoint,
    values: Sequence[str],
    *,
    autocast: torch.dtype | None = None,
) -> str:
    """Return the name of the proof that the frozen part as it is written and the tail equal the whole model.

    Args:
        values: Forms and values of the parameters and buffers that the frozen part reads, as text.
    """
    inputs = [f"{tuple(each.shape)} {each.dtype}" for each in example.tensors]
    device = example.tensors[0].device
    facts = model_facts(model, point.ships, point.skipped, device=device, autocast=autocast)
    return digest_of((SCHEMA, "outline", *inputs, *facts, *values))


def digest_of(facts: Iterable[str]) -> str:
    """Return the digest of some facts, in order."""
    folded = hashlib.sha256()
    for fact in facts:
        folded.update(fact.encode())
        folded.update(b"\0")
    return folded.hexdigest()


Asking: TypeAlias = "dict[bool, tuple[bool, ...]]"
"""Result of a proof: for each mode (True is training), which crossing tensors require a gradient."""


_PROOFS = Cache("proofs")


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal["upriver.proof/2"]
    proof: str
    program: str
    asking: dict[Literal["training", "eval"], tuple[bool, ...]]


def is_proven(digest: str, program: Program | None = None, point: FreezePoint | None = None) -> Asking | None:
    """Return the result of an earlier proof. None if there is none.

    Where the program and its freeze point are given, the result must fit them. An outline has no program.
    """

    def decode(data: bytes) -> Asking:
        found = msgspec.json.decode(data, type=_File)
        if found.proof != digest or (program is not None and found.program != program.digest):
            raise ValueError("it is of another program")
        modes = {"eval"} if program is not None and program.micro_batch == 1 else {"eval", "training"}
        if not (program is None and point is None) and found.asking.keys() != modes:
            raise ValueError(f"it must be of the modes {sorted(modes)}")
        if point is not None and {*map(len, found.asking.values())} != {len(point.ships)}:
            raise ValueError(f"it must state for {len(point.ships)} tensors whether they require a gradient")
        return {mode == "training": asks for mode, asks in found.asking.items()}

    return _PROOFS.load(digest, decode)


def remember(digest: str, program: Program | None, asking: Asking) -> None:
    """Save the result of a proof. Ignore a cache that cannot be written: the next job proves again.

    Args:
        program: None for an outline.
    """
    found: dict[Literal["training", "eval"], tuple[bool, ...]] = {
        "training" if training else "eval": asks for training, asks in asking.items()
    }
    name = program.digest if program is not None else ""
    file = _File(schema=SCHEMA, proof=digest, program=name, asking=found)
    _PROOFS.save(digest, msgspec.json.encode(file).decode() + "\n")


def model_facts(
    model: nn.Module,
    ships: Iterable[CrossingTensor],
    skipped: Sequence[object],
    *,
    device: torch.device,
    autocast: torch.dtype | None,
) -> Iterator[str]:
    """Yield what decides how a model computes, as text: versions, processor, settings and source.

    Values of parameters and buffers are left out.

    Args:
        ships: Tensors that cross the freeze point.
        skipped: What the tail does not call.
    """
    yield from machine_facts(device=device, autocast=autocast)
    yield str([(str(ship.source), str(ship.shape), ship.overwritten) for ship in ships])
    yield str(skipped)
    yield repr(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        yield _fold(list((parameter._backward_hooks or {}).values()), _DEPTH)
    yield from code_facts(dict(model.named_modules()))


def machine_facts(*, device: torch.device, autocast: torch.dtype | None) -> Iterator[str]:
    """Yield what decides low bits besides a model: versions, processor and threads, as text."""
    yield f"{upriver.__version__} {torch.__version__} {platform.machine()} {torch.get_num_threads()}"
    yield f"{torch.backends.cpu.get_cpu_capability()} {_device_name(device)} {autocast}"


def value_fact(name: str, tensor: torch.Tensor) -> str:
    """Return the form and the values of a parameter or buffer, as text."""
    folded = [
        xxhash.xxh3_128_hexdigest(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for part in stored_parts(tensor.detach())
    ]
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.stride()} {' '.join(folded)}"


def code_facts(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the settings of modules, by name, and the source of their classes, as text."""
    for path, module in modules.items():
        yield f"{path} {type(module).__module__}.{type(module).__qualname__} {_settings(module)}"
    classes = {type(module) for module in modules.values()}
    for module_class in sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield f"{module_class.__module__}.{module_class.__qualname__} {_source(module_class)}"


_OURS_NOT = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Attributes of every module that are among the other facts, or that do not affect a call."""

_DEPTH = 4
"""Maximum depth of settings inside objects. Below it, only types are compared."""


def _settings(module: nn.Module) -> str:
    """Return a module's attributes as text. A forward may branch on any of them."""
    own = {name: value for name, value in vars(module).items() if name not in _OURS_NOT}
    return str(sorted((name, _fold(_without_numbers(name, value), _DEPTH)) for name, value in own.items()))


def _without_numbers(name: str, value: Any) -> Any:
    """Return hooks without their ids: torch numbers them across models."""
    is_hooks = name.startswith("_") and "hook" in name and isinstance(value, dict)
    return list(value.values()) if is_hooks else value


def _fold(value: Any, depth: int) -> str:
    """Return a value as text that is the same for equal values in every process."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            return repr(value)
        case torch.Tensor():
            return f"tensor {value.dtype} {_digest_of(value)}"
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
    if isinstance(value, functools.partial):
        return f"{kind} {_fold([value.func, value.args, value.keywords], depth - 1)}"
    if inspect.isroutine(value) or inspect.isclass(value):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        captured = [each for _, each in closure_of(value)]
        return f"{kind} {name} {_source(value)} {_fold(captured, depth - 1)}"
    return f"{kind} {_fold(getattr(value, '__dict__', None), depth - 1)}"


def _digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's values.

    An unreadable tensor gets a new random digest each time, so that no proof is reused.
    """
    try:
        parts = [part.cpu() for part in stored_parts(tensor.detach())]
        values = [(tuple(part.shape), part.flatten().tolist()) for part in parts]
    except Exception:  # any tensor class
        return secrets.token_hex()
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _source(thing: Any) -> str:
    """Return the digest of the file that defines a class or function.

    The file includes code that it calls.
    """
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:  # built in, or made at run time: only its settings count
        return ""
    return _file_digest(file, os.path.getmtime(file)) if file and os.path.exists(file) else ""


@functools.lru_cache(maxsize=4096)
def _file_digest(file: str, _changed: float) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
