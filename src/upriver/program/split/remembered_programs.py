"""Remember which program a model's frozen part became, so that a later job names it before it is captured.

A digest of all that decides the program names it: the code and the settings of the model, as for a proof, the
values that its frozen part reads, and the form of the inputs. Features that an earlier job has kept are found
by the program's digest. Losing the file costs the seconds of a capture.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
import torch
import xxhash
from torch import nn

from upriver.cache import Cache
from upriver.program.graph.artifact_paths import DIGEST
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import Granularity
from upriver.program.split.proof_cache import model_facts
from upriver.program.split.split import Split
from upriver.program.tensor_layouts import stored_parts

SCHEMA: Literal["upriver.remembered-program/1"] = "upriver.remembered-program/1"

_REMEMBERED = Cache("programs")


class RememberedProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program's name and length, without the program.

    Attributes:
        num_stages: Number of its stages, which is the freeze point.
    """

    digest: str
    num_stages: int
    schema: Literal["upriver.remembered-program/1"] = SCHEMA


def outline_digest(
    model: nn.Module,
    outline: Split,
    example: torch.Tensor,
    *,
    autocast: torch.dtype | None,
    granularity: Granularity,
) -> str:
    """Return the name of all that decides the program of an outlined model.

    Args:
        example: A micro-batch of inputs.
    """
    facts = [
        SCHEMA,
        granularity,
        *model_facts(
            model, outline.tail.values.ships, outline.skipped, device=_device(model), autocast=autocast
        ),
        f"{tuple(example.shape)} {example.dtype}",
        str((outline.boundary, outline.in_eval, outline.prefix_units)),
    ]
    folded = hashlib.sha256("\0".join(facts).encode())
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for name in sorted(outline.reads):
        tensor = tensors[name].detach()
        folded.update(f"\0{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.stride()}\0".encode())
        for part in stored_parts(tensor):
            raw = part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            folded.update(xxhash.xxh3_128_digest(raw))
    return folded.hexdigest()


def remembered_program(digest: str) -> RememberedProgram | None:
    """Return the program that an earlier job has captured of the same outline; None if there is none."""

    def decode(data: bytes) -> RememberedProgram:
        found = msgspec.json.decode(data, type=RememberedProgram)
        if not DIGEST.fullmatch(found.digest) or found.num_stages < 1:
            raise ValueError("it names no program")
        return found

    return _REMEMBERED.load(digest, decode)


def remember_program(digest: str, program: Program) -> None:
    """Save the program of an outline. A cache that cannot be written is left alone."""
    found = RememberedProgram(digest=program.digest, num_stages=program.num_stages)
    _REMEMBERED.save(digest, msgspec.json.encode(found).decode() + "\n")


def _device(model: nn.Module) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))
