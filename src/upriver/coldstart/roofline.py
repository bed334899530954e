"""Predict the seconds of a model's work between the first uses of its weights.

This is the E of PISeL's problem (Jafari et al., CIKM 2024, section 3.1). The publisher runs the model without
data and counts its work. A loader converts the work to seconds with two rates of its machine, as a roofline
does (Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009):

    E = max(flops / ``flops_per_s``, moved bytes / ``moved_bytes_per_s``) / `CAUTION`

A roofline is for one operator. This one is for all work that a weight starts, and is never longer than the
sum over the operators. Bytes count besides operations, because a linear layer of one sample does little with
each weight but read it.

``upriver calibrate`` stores the rates of a device. The defaults are those of `CORE` or `ACCELERATOR`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch

from upriver.cache import Cache
from upriver.program.graph.schema import Count

SCHEMA: Literal["upriver.pace/1"] = "upriver.pace/1"

MOST_S = 3600.0
"""Upper bound for the work of one weight. Counts come from any client that may write to a store."""

CAUTION = 2.0
"""Factor by which a plan assumes the machine to be faster than its rates. A plan for a faster machine loses
little. A plan for a slower one loses much: small groups, each of which costs a latency, then seem to be
hidden behind layers that in truth end soon."""

_Rate = Annotated[float, msgspec.Meta(ge=1e6, le=1e18)]
"""Rate of a device. A value outside is no rate, or the device is broken."""


class Execution(NamedTuple):
    """Work between a weight's first use and that of the next one.

    Attributes:
        flops: Floating-point operations, as torch counts them: two for a product and its sum.
    """

    flops: Count
    moved_bytes: Count

    def plus(self, other: Execution) -> Execution:
        """Return the sum of both."""
        return Execution(self.flops + other.flops, self.moved_bytes + other.moved_bytes)


NOTHING = Execution(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePace:
    """Rates of a device, both above 0."""

    flops_per_s: float
    moved_bytes_per_s: float

    def seconds(self, execution: Execution) -> float:
        """Return the predicted seconds of some work, divided by `CAUTION`."""
        flops, moved_bytes = execution
        seconds = max(flops / self.flops_per_s, moved_bytes / self.moved_bytes_per_s) / CAUTION
        return min(MOST_S, seconds)


CORE = DevicePace(flops_per_s=75e9, moved_bytes_per_s=15e9)
"""Rates of a good core with 256-bit vectors and of its memory: three quarters of the data sheets' values."""

ACCELERATOR = DevicePace(flops_per_s=6e12, moved_bytes_per_s=240e9)
"""Rates of a small accelerator: three quarters of its data sheet's values."""


def pace_of(device: torch.device) -> DevicePace:
    """Return the rates of a device of this machine, as calibrated or else by default."""
    if (kept := _kept(device)) is not None:
        return DevicePace(flops_per_s=kept.flops_per_s, moved_bytes_per_s=kept.moved_bytes_per_s)
    if device.type != "cpu":
        return ACCELERATOR
    return replace(CORE, flops_per_s=CORE.flops_per_s * torch.get_num_threads())


_PACES = Cache("paces")


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a device's cache file."""

    schema: Literal["upriver.pace/1"]
    flops_per_s: _Rate
    moved_bytes_per_s: _Rate


def _kept(device: torch.device) -> _Kept | None:
    return _PACES.load(_name_of(device, torch.get_num_threads()), msgspec.json.Decoder(_Kept).decode)


def keep_pace(device: torch.device, pace: DevicePace, *, threads: int) -> None:
    """Store the rates of a device for a number of computing threads.

    Raises:
        OSError: If the cache folder cannot be written.
    """
    kept = _Kept(schema=SCHEMA, **asdict(pace))
    _PACES.write(_name_of(device, threads), msgspec.json.encode(kept).decode() + "\n")


def _name_of(device: torch.device, threads: int) -> str:
    facts = [platform.node(), device.type, threads if device.type == "cpu" else 0]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def layer_seconds(executions: Sequence[Execution], layers: Sequence[range], pace: DevicePace) -> list[float]:
    """Return the seconds to run each layer.

    The work of a weight counts with the last layer that has ended by then. Small weights follow a layer, such
    as its bias or a norm. They are requested with the next layer and arrive at once.
    """
    found, layer = [0.0] * len(layers), 0
    for number, execution in enumerate(executions):
        while layer + 1 < len(layers) and layers[layer + 1].stop <= number + 1:
            layer += 1
        found[layer] += pace.seconds(execution)
    return found
