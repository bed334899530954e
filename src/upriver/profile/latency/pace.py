"""Derive a device's compute and read rates from its latency models, for cold starts.

A cold start knows how much a network computes, but not with which operators. So two rates stand for a device.
One is the operations per second of convolutions that most networks are made of. The other is the bytes per
second of a linear layer of one sample, which mostly reads its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from upriver.coldstart.roofline import DevicePace
from upriver.profile.latency.config_calls import convolution, linear
from upriver.profile.latency.config_sampling import Draw
from upriver.profile.latency.op_calls import OpCall
from upriver.profile.latency.op_features import OpWork
from upriver.profile.latency.op_kinds import works_of
from upriver.profile.latency.predictor import Predictor

_CONVOLUTIONS: tuple[Draw, ...] = tuple(
    {
        "window": (window, 1),
        "side": side,
        "padded": True,
        "in_channels": channels,
        "out_channels": channels,
        "batch": 1,
        "bias": False,
    }
    for window, side, channels in ((3, 56, 64), (1, 28, 256), (3, 14, 256))
)
"""Convolutions from the middle of ResNets, where most of their operations lie."""

_LINEAR: Draw = {"rows": 1, "inner": 4096, "outer": 4096, "bias": False}
"""VGG's second linear layer: 64 MiB, larger than caches."""


def pace_from(predictor: Predictor) -> DevicePace | None:
    """Return the rates of a device; None where its models do not cover these operators."""
    computing = [work for draw in _CONVOLUTIONS for work in _works(convolution(draw))]
    reading = _works(linear(_LINEAR))
    computing_s, reading_s = _seconds(predictor, computing), _seconds(predictor, reading)
    if not computing_s or not reading_s:
        return None
    # A product and its sum are one operation to a latency model, and two to torch.
    flops = 2 * sum(work.features["flops"] for work in computing)
    moved = sum(work.facts[name] for work in reading for name in ("bytes_in", "bytes_out", "weight_bytes"))
    return DevicePace(flops_per_s=flops / computing_s, moved_bytes_per_s=moved / reading_s)


def _works(call: OpCall | None) -> Sequence[OpWork]:
    return () if call is None else works_of(call)


def _seconds(predictor: Predictor, works: Sequence[OpWork]) -> float:
    """Return the seconds of all works together; 0 where a work has no model."""
    known = [seconds for seconds in predictor.work_seconds(works) if seconds is not None]
    return sum(known) if len(known) == len(works) else 0.0
