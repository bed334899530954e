"""One work of a latency model: its kind, the paper's features of it, and our own facts.

What the letters mean, and where we depart from the paper, stands in `upriver.profile.latency.op_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from upriver.profile.latency.op_calls import OpCall, is_contiguous
from upriver.program.graph.schema import TensorSpec

UNKNOWN = "unknown"
"""Family of what no model is made for: it has to be measured, and never counts as nothing."""

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
    """What one operator call does, or one part of it.

    Attributes:
        kind: Family, and behind a dot which member of it: ``conv``, ``elementwise.add``.
        features: What the paper's models take, both columns of Table II.
        facts: What ours takes.
    """

    kind: str
    features: Numbers
    facts: Numbers

    @property
    def family(self) -> str:
        """What decides on features and facts."""
        return family_of(self.kind)

    @property
    def fused(self) -> bool:
        """Whether it is part of the same kernel as the work before it."""
        return self.facts.get("fused", 0.0) > 0


def family_of(kind: str) -> str:
    """The family of a kind."""
    return kind.partition(".")[0]


def features_of(kind: str, side: Side) -> tuple[str, ...]:
    """A row of Table II."""
    family = family_of(kind)
    return _DEPTHWISE[side] if family == "dwconv" else _TABLE_II.get(family, ("flops",))


def moved(call: OpCall) -> dict[str, float]:
    """What is read and written."""
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
    """A work of a kind whose one feature is its operations: as many as it gives elements, if not said."""
    found = moved(call)
    features = {"flops": found["elements"] if flops is None else float(flops)}
    return (OpWork(kind=kind, features=features, facts=found | facts),)


def fused_bias(made: TensorSpec) -> OpWork:
    """A bias that the kernel before it adds."""
    return OpWork(kind="bias", features={"flops": float(made.numel)}, facts={"fused": 1.0})


Maker: TypeAlias = Callable[[OpCall], "tuple[OpWork, ...] | None"]
"""The works of a call; None where the call is one that no model is made for."""
