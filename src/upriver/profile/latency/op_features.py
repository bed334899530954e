"""Describe one work of a latency model: its kind, the paper's features, and our own facts.

`upriver.profile.latency.op_kinds` explains the symbols and the departures from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from upriver.profile.latency.op_calls import OpCall, is_contiguous
from upriver.program.graph.schema import TensorSpec

UNKNOWN = "unknown"
"""Family without a model: such a work must be measured, and never counts as free."""

Numbers: TypeAlias = Mapping[str, float]

Side: TypeAlias = Literal["edge", "device"]
"""Column of Table II."""

SIDES: tuple[Side, ...] = ("edge", "device")

_CONVOLUTION = ("flops", "s_f", "h_in_s_f", "c_out_s_f")
_PRODUCT = ("flops", "n_c_in", "n_c_out", "c_in_c_out")
_POOLING = ("flops", "n_c_h_w_in", "n_c_h_w_out", "h_w_out")

_TABLE_II: dict[str, tuple[str, ...]] = {
    "conv": _CONVOLUTION,
    "group_conv": _CONVOLUTION,
    "conv_transpose": _CONVOLUTION,
    "matmul": _PRODUCT,
    "bmm": _PRODUCT,
    "avg_pool": _POOLING,
    "max_pool": _POOLING,
}
_DEPTHWISE: dict[Side, tuple[str, ...]] = {
    "edge": ("flops", "s_f", "padded_size"),
    "device": ("flops", "n_c_out_s_f"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpWork:
    """The work of one operator call, or of a part of it.

    Attributes:
        kind: Family, and after a dot the member: ``conv``, ``elementwise.add``.
        features: Inputs of the paper's models, both columns of Table II.
        facts: Inputs of our model.
    """

    kind: str
    features: Numbers
    facts: Numbers

    @property
    def family(self) -> str:
        """Family of the kind, which decides the features and facts."""
        return family_of(self.kind)

    @property
    def fused(self) -> bool:
        """Return whether the work is part of the same kernel as the previous work."""
        return self.facts.get("fused", 0.0) > 0


def family_of(kind: str) -> str:
    """Return the family of a kind."""
    return kind.partition(".")[0]


def features_of(kind: str, side: Side) -> tuple[str, ...]:
    """Return the feature names of a kind: a row of Table II."""
    family = family_of(kind)
    return _DEPTHWISE[side] if family == "dwconv" else _TABLE_II.get(family, ("flops",))


def moved(call: OpCall) -> dict[str, float]:
    """Return the facts about bytes read and written."""
    given = [call.specs[name] for name in call.read if name not in call.fixed]
    weights = [call.specs[name] for name in call.read if name in call.fixed]
    return {
        "elements": float(sum(spec.numel for spec in call.made)),
        "bytes_in": float(sum(spec.touched_bytes for spec in given)),
        "bytes_out": float(sum(spec.touched_bytes for spec in call.made)),
        "weight_bytes": float(sum(spec.touched_bytes for spec in weights)),
        "strided": float(any(not is_contiguous(spec) for spec in given)),
        "in_place": float(call.in_place),
    }


def one(kind: str, call: OpCall, flops: float | None = None, **facts: float) -> tuple[OpWork, ...]:
    """Return a work of a kind with operations as its only feature; by default one for each result element."""
    found = moved(call)
    features = {"flops": found["elements"] if flops is None else float(flops)}
    return (OpWork(kind=kind, features=features, facts=found | facts),)


def fused_bias(made: TensorSpec) -> OpWork:
    """Return the work of a bias that the previous kernel adds."""
    return OpWork(kind="bias", features={"flops": float(made.numel)}, facts={"fused": 1.0})


Maker: TypeAlias = Callable[[OpCall], "tuple[OpWork, ...] | None"]
"""Function that returns the works of a call; None where no model covers the call."""
