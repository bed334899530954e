"""Features from two tiers: equal to the bit, or as near as ``exact="numeric"`` allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Exact = Literal["bitwise", "numeric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far two tiers' features may be apart: ``rtol`` of each value plus ``atol`` of the largest one.

    Whole numbers and flags have none: they are equal or they are not.
    """

    rtol: float
    atol: float

    def __str__(self) -> str:
        return f"{self.rtol:g} of each value plus {self.atol:g} of the largest"


FLOAT32 = Tolerance(rtol=1e-3, atol=1e-4)
"""What float32 convolutions of different instruction sets differ by after twenty layers, with room to
spare."""

COARSER = {
    torch.float16: Tolerance(rtol=1e-2, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=5e-2, atol=2e-2),
}
"""Where features were computed in fewer bits: a few units in the last place of those types."""


def tolerance(dtypes: Sequence[torch.dtype | None]) -> Tolerance:
    """The tolerance for features computed in these types (autocast's among them); the coarsest decides."""
    coarser = [COARSER[dtype] for dtype in dtypes if dtype in COARSER]
    return max(coarser, key=lambda allowed: allowed.rtol, default=FLOAT32)


def difference(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], allowed: Tolerance | None
) -> str:
    """What keeps these features from being the same; empty where nothing does.

    Args:
        ours: Every tensor that crosses the cut, as this side computed it.
        theirs: As the other side did.
        allowed: None asks for equal bits.
    """
    if len(ours) != len(theirs):
        return f"{len(theirs)} tensors instead of {len(ours)}"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        which = f" in tensor {number}" if len(ours) > 1 else ""
        b = b.to(a.device)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{_form(b)} instead of {_form(a)}{which}"
        if not _same(a, b, allowed):
            return f"{'other bits' if allowed is None else _apart(a, b)}{which}"
    return ""


def largest(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest difference of floating-point features, as a part of the largest value of its tensor."""
    pairs = [(a, b.to(a.device)) for a, b in zip(ours, theirs, strict=True) if a.is_floating_point()]
    return max((_distance(a, b) for a, b in pairs), default=0.0)


def _same(a: torch.Tensor, b: torch.Tensor, allowed: Tolerance | None) -> bool:
    if allowed is None or not a.is_floating_point():
        return _equal(a, b)
    scale = max(1.0, _magnitude(a))
    return torch.allclose(
        a.double(), b.double(), rtol=allowed.rtol, atol=allowed.atol * scale, equal_nan=True
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit: other than for ``torch.equal``, a NaN equals itself and zero is not minus zero."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def _apart(a: torch.Tensor, b: torch.Tensor) -> str:
    if not a.is_floating_point():
        return f"other values of {_type(a)}"
    return f"features that are {_distance(a, b):.2g} of the largest apart"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    return float((a.double() - b.double()).abs().nan_to_num(0.0).max()) / max(1.0, _magnitude(a))


def _magnitude(tensor: torch.Tensor) -> float:
    return float(tensor.double().abs().nan_to_num(0.0, 0.0).max()) if tensor.numel() else 0.0


def _form(tensor: torch.Tensor) -> str:
    return f"{_type(tensor)} of shape {tuple(tensor.shape)}"


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
