"""Name the frozen part of a model, so that every job finds the rows that an earlier one has kept.

Before the frozen part is captured, a digest of its code, settings, values and input names it, together with
the features of two fixed samples. Afterwards its program does. A small file for each of the two remembers the
name that rows were first kept under. Another one for each freeze point remembers which parameters a job
trains, so that jobs with a later freeze point find its rows. A lost file costs the rows, which are computed
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import torch
from torch import nn

from upriver.cache import Cache
from upriver.program.graph.artifact_paths import DIGEST
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import Granularity
from upriver.program.split.proof_cache import code_facts, digest_of, machine_facts
from upriver.program.split.split import Split

SCHEMA: Literal["upriver.frozen-name/1"] = "upriver.frozen-name/1"

_NAMES = Cache("names")
_POINTS = Cache("freeze_points")


class FrozenName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a frozen part.

    Attributes:
        digest: Digest of the outline or of the program that it was first known by.
        num_stages: Number of its stages then; 1 of an outline.
        about: The class of the model and its freeze point then, in words.
    """

    digest: str
    num_stages: int
    about: str = ""
    schema: Literal["upriver.frozen-name/1"] = SCHEMA


def frozen_name(outlined: str | None, program: Program | None = None, *, about: str = "") -> FrozenName:
    """Return the name of a frozen part, and remember it for later jobs.

    Args:
        outlined: Result of :func:`outline_digest`; None if no outline was made.
        program: The captured program; None before it is known.
        about: Words for those who list what is kept.

    Raises:
        ValueError: If neither is given.
    """
    digests = [*([program.digest] if program is not None else []), *([outlined] if outlined else [])]
    if not digests:
        raise ValueError("a frozen part is named by its outline or its program")
    known = {digest: known_name(digest) for digest in digests}
    # The outline's name may be of this very job. The program's is older, where a script was edited since.
    found = next((name for name in known.values() if name is not None), None)
    if found is None:
        num_stages = program.num_stages if program is not None and outlined is None else 1
        found = FrozenName(digest=digests[-1], num_stages=num_stages, about=about)
    for digest, name in known.items():
        if name != found:
            _NAMES.save(digest, msgspec.json.encode(found).decode() + "\n")
    return found


def known_name(digest: str) -> FrozenName | None:
    """Return the name that is remembered for the digest of an outline or a program; None if there is none."""

    def decode(data: bytes) -> FrozenName:
        found = msgspec.json.decode(data, type=FrozenName)
        if not DIGEST.fullmatch(found.digest) or found.num_stages < 1:
            raise ValueError("it names no frozen part")
        return found

    return _NAMES.load(digest, decode)


class _Trained(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters that a job trains, by name."""

    trained: tuple[str, ...]
    schema: Literal["upriver.trained/1"] = "upriver.trained/1"


def remember_trained(model: nn.Module, boundary: str) -> None:
    """Remember for later jobs which parameters of a model are trained.

    Args:
        boundary: Last module of the frozen part. The last job with this model and boundary counts.
    """
    names = sorted(name for name, each in model.named_parameters() if each.requires_grad)
    digest, found = _freeze_point(model, boundary), _Trained(trained=tuple(names))
    if _trained(digest) != found:
        _POINTS.save(digest, msgspec.json.encode(found).decode() + "\n")


def trained_by_others(model: nn.Module) -> list[frozenset[str]]:
    """Return the parameters that each earlier job with a model of this class trained, by its boundary."""
    found = (_trained(_freeze_point(model, path)) for path, _ in model.named_modules())
    return [frozenset(each.trained) for each in found if each is not None]


def _trained(digest: str) -> _Trained | None:
    return _POINTS.load(digest, lambda data: msgspec.json.decode(data, type=_Trained))


def _freeze_point(model: nn.Module, boundary: str) -> str:
    kind = type(model)
    return digest_of((kind.__module__, kind.__qualname__, boundary))


def outline_digest(
    model: nn.Module,
    outline: Split,
    example: torch.Tensor,
    *,
    autocast: torch.dtype | None,
    granularity: Granularity,
) -> str:
    """Return the digest of all that decides the features of an outlined model.

    Modules that only the tail calls do not count, so jobs with other heads have the same digest. The features
    of two fixed samples count, since a forward may read what no module holds, such as a global variable.

    Args:
        outline: Made with ``named=True``.
        example: A micro-batch of inputs.
    """
    facts = _facts(model, outline, example, autocast=autocast, granularity=granularity)
    return digest_of((*facts, *outline.values, *outline.features))


def _facts(
    model: nn.Module,
    outline: Split,
    example: torch.Tensor,
    *,
    autocast: torch.dtype | None,
    granularity: Granularity,
) -> Iterator[str]:
    yield SCHEMA
    yield granularity
    yield from machine_facts(device=_device(model), autocast=autocast)
    yield f"{tuple(example.shape)} {example.dtype}"
    yield str((outline.boundary, outline.in_eval, outline.prefix_units, outline.skipped))
    yield str([(str(each.source), str(each.shape), each.overwritten) for each in outline.tail.values.ships])
    yield from code_facts(
        {path: module for path, module in model.named_modules() if _counts(path, outline.skipped)}
    )


def _counts(path: str, skipped: tuple[str, ...]) -> bool:
    """Return whether a module lies in a frozen one, or around it."""
    inside = any(f"{path}.".startswith(f"{each}.") for each in skipped)
    around = path == "" or any(each.startswith(f"{path}.") for each in skipped)
    return inside or around


def _device(model: nn.Module) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))
