"""What a model computes between the first uses of its weights, and the seconds that this takes here.

The E of PISeL's problem (Jafari et al., CIKM 2024, section 3.1). Whoever publishes a model runs it without
data, so it is counted there; a loader makes seconds of it by two rates of its machine, as a roofline has it
(Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009):

    E = max(flops / ``flops_per_s``, moved bytes / ``moved_bytes_per_s``) / `CAUTION`

A roofline is of one operator. This one is of all that a weight starts, which it never takes for longer than
the operators one by one. Bytes are counted beside operations because a linear layer of one sample does little
with each weight but read it.

``upriver calibrate`` keeps the rates of a device. Without it they are those of `CORE` or `ACCELERATOR`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

import msgspec
import torch

from upriver.cache import Cache
from upriver.program.graph.schema import Count
from upriver.types import Limits

SCHEMA: Literal["upriver.pace/1"] = "upriver.pace/1"

MOST_S = 3600.0
"""For what starts with one weight. Counts come from whoever may write to a store."""

CAUTION = 2.0
"""A plan takes the machine for so many times as fast as its rates say. Planned for a machine that is faster
than this one a load loses little; for a slower one much, as small groups, each of which costs a latency, then
seem to be hidden by layers that in truth are soon done."""

_RATE = Limits(least=1e6, most=1e18)
"""Of any device; else it is no rate, or what it is of is broken."""


class Execution(NamedTuple):
    """What runs from a weight's first use until that of the next one.

    Attributes:
        flops: Floating-point operations, as torch counts them: two for a product and its sum.
        moved_bytes: That operators read and write.
    """

    flops: Count
    moved_bytes: Count

    def plus(self, other: Execution) -> Execution:
        """Both."""
        return Execution(self.flops + other.flops, self.moved_bytes + other.moved_bytes)


NOTHING = Execution(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast a device computes: both above 0."""

    flops_per_s: float
    moved_bytes_per_s: float

    def seconds(self, execution: Execution) -> float:
        """What that takes, as far as a plan may count on it."""
        flops, moved_bytes = execution
        seconds = max(flops / self.flops_per_s, moved_bytes / self.moved_bytes_per_s) / CAUTION
        return min(MOST_S, seconds)


CORE = Pace(flops_per_s=75e9, moved_bytes_per_s=15e9)
"""Of a good one with 256-bit vectors, and of its memory: three quarters of what data sheets say."""

ACCELERATOR = Pace(flops_per_s=6e12, moved_bytes_per_s=240e9)
"""Three quarters of what the data sheet of a small one says."""


def pace_of(device: torch.device) -> Pace:
    """Of a device of this machine: as it was calibrated, or else a usual one."""
    if (kept := _kept(device)) is not None:
        return kept
    if device.type != "cpu":
        return ACCELERATOR
    return replace(CORE, flops_per_s=CORE.flops_per_s * torch.get_num_threads())


_PACES = Cache("paces")


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file of a device holds."""

    schema: Literal["upriver.pace/1"]
    flops_per_s: float
    moved_bytes_per_s: float


def keep_pace(device: torch.device, pace: Pace, *, threads: int) -> None:
    """Keep what a device was found to do, computing with so many threads.

    Raises:
        OSError: If the cache folder cannot be written.
    """
    kept = _Kept(schema=SCHEMA, **asdict(pace))
    _PACES.write(_name_of(device, threads), msgspec.json.encode(kept).decode() + "\n")


def _kept(device: torch.device) -> Pace | None:
    return _PACES.load(_name_of(device, torch.get_num_threads()), _pace_from)


def _pace_from(data: bytes) -> Pace:
    found = msgspec.json.decode(data, type=_Kept)
    for name in ("flops_per_s", "moved_bytes_per_s"):
        _RATE.check(name, getattr(found, name))
    return Pace(flops_per_s=found.flops_per_s, moved_bytes_per_s=found.moved_bytes_per_s)


def _name_of(device: torch.device, threads: int) -> str:
    facts = [platform.node(), device.type, threads if device.type == "cpu" else 0]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def layer_seconds(executions: Sequence[Execution], layers: Sequence[range], pace: Pace) -> list[float]:
    """To run each layer.

    What a weight starts counts with the last layer that has ended by then: behind a layer lie small weights,
    such as its bias or a norm, which are asked for with what follows and are there at once.

    Args:
        executions: Of each weight.
        layers: Ranges over the weights; together all of them, in order.
        pace: Of the device.
    """
    found, layer = [0.0] * len(layers), 0
    for number, execution in enumerate(executions):
        while layer + 1 < len(layers) and layers[layer + 1].stop <= number + 1:
            layer += 1
        found[layer] += pace.seconds(execution)
    return found
