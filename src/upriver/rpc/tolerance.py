"""Compare results of two tiers, and decide once for a job whether they must be equal to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from upriver._threads.forks import ForkSafeLock
from upriver.engine.fingerprint import float32_precisions
from upriver.program.graph.executor import Program

Mode = Literal["bitwise", "numeric"]
"""Whether features of two tiers must be equal to the bit, or within a tolerance."""

Exact = Literal["auto", "bitwise", "numeric"]
"""A mode, or ``auto``: bit for bit if any server proves it, else within the tolerance."""

EXACT: tuple[Exact, ...] = ("auto", "bitwise", "numeric")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Allowed difference of two tiers' features: ``rtol`` of each value plus ``atol`` of the largest one.

    Integers and booleans have no tolerance: they must be equal.
    """

    rtol: float
    atol: float

    def __str__(self) -> str:
        return f"{self.rtol:g} of each value plus {self.atol:g} of the largest"


FLOAT32 = Tolerance(rtol=1e-3, atol=1e-4)
"""Difference of float32 convolutions of different instruction sets after twenty layers, with a margin."""

COARSER = {
    torch.float16: Tolerance(rtol=1e-2, atol=2e-3),
    torch.bfloat16: Tolerance(rtol=5e-2, atol=2e-2),
}
"""Tolerances for features computed in fewer bits: a few units in the last place of those types."""

AS_COARSE = {"tf32": torch.float16, "bf16": torch.bfloat16}
"""Types with as many significant bits as a precision in which float32 operators are computed.

Convolutions in TF32 give features of ResNet-50 that are 0.0016 of the largest apart from those in float32.
"""

INT8 = Tolerance(rtol=1e-1, atol=5e-2)
"""Tolerance for features of layers that multiply 8-bit integers. Where low bits round a value to the next
integer, later layers round others: two tiers may differ by as much as rounding itself."""


def tolerance(dtypes: Sequence[torch.dtype | None]) -> Tolerance:
    """Return the tolerance for features computed in these types, autocast's included.

    The coarsest type decides.
    """
    coarser = [COARSER[dtype] for dtype in dtypes if dtype in COARSER]
    return max(coarser, key=lambda allowed: allowed.rtol, default=FLOAT32)


def tolerance_of(program: Program) -> Tolerance:
    """Return the tolerance for features of a program, larger if it computes in fewer than 32 bits."""
    if "_int_mm.default" in program.graph.operators:
        return INT8
    crossing = {value.spec.dtype for cut in range(program.num_stages + 1) for value in program.live(cut)}
    names = crossing | {getattr(program.graph, "autocast", None) or "float32"}
    return tolerance([getattr(torch, name) for name in names])


def tolerance_between(*fingerprints: Mapping[str, str]) -> Tolerance:
    """Return the tolerance for float32 features of tiers with these fingerprints."""
    precisions = frozenset[str]().union(*map(float32_precisions, fingerprints))
    return tolerance([AS_COARSE.get(precision) for precision in precisions])


def widest(*allowed: Tolerance) -> Tolerance:
    """Return the tolerance that allows the most."""
    return max(allowed, key=lambda each: each.rtol)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Distance between two tiers' features.

    Attributes:
        relative: Largest difference, relative to the largest value of its tensor. Infinite where one side
            alone has a NaN or an infinity, or where all values of this side are zero.
        num_different: Elements with other bits.
        num_elements: All elements.
    """

    relative: float
    num_different: int
    num_elements: int

    @classmethod
    def between(cls, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Deviation:
        """Compare tensors of the same forms, in order."""
        pairs = [(a, b.to(a.device)) for a, b in zip(ours, theirs, strict=True)]
        differs = [_bits(a) != _bits(b) for a, b in pairs]
        return cls(
            relative=max(
                (_relative(*pair, at) for pair, at in zip(pairs, differs, strict=True)), default=0.0
            ),
            num_different=sum(int(at.sum()) for at in differs),
            num_elements=sum(a.numel() for a in ours),
        )

    @property
    def equal(self) -> bool:
        """Return whether all bits are equal."""
        return self.num_different == 0


class Agreement:
    """Decide once how far results of two tiers may differ, and keep to it. Thread-safe.

    Args:
        exact: The mode, or ``auto``.
        tolerance: The tolerance of mode ``numeric``.

    Attributes:
        exact: As given.
    """

    def __init__(self, exact: Exact, tolerance: Tolerance) -> None:
        self.exact, self._tolerance, self._least = exact, tolerance, tolerance
        self._settled = False
        self._lock = ForkSafeLock()
        self._mode: Mode | None = None if exact == "auto" else exact
        self._why = ""

    @property
    def mode(self) -> Mode | None:
        """The mode; None with ``auto`` before a server took part."""
        return self._mode

    @property
    def why(self) -> str:
        """Reason for which ``auto`` accepted a tolerance; empty if it did not."""
        return self._why

    @property
    def allowed(self) -> Tolerance | None:
        """Return by how much features may differ; None asks for equal bits, as is tried first."""
        tried = self._mode is None and self._why
        return self._tolerance if self._mode == "numeric" or tried else None

    def prove(self) -> None:
        """Record that a server passed, by equal bits or, where that is tried, within the tolerance."""
        with self._lock:
            self._mode = self._mode or ("numeric" if self._why else "bitwise")
            self._settled = True

    def widen(self, needed: Tolerance) -> None:
        """Allow at least this in mode ``numeric``, unless a server has passed: later ones keep to the rule.

        Args:
            needed: What the arithmetic of a server and of this process asks for.
        """
        with self._lock:
            if not self._settled:
                self._tolerance = widest(self._tolerance, needed)

    def try_tolerance(self, why: str) -> bool:
        """Try the tolerance if nothing is decided yet; return whether features may differ by it.

        The first server that passes decides for it. Call :meth:`withdraw` if none does.

        Args:
            why: How servers differ.
        """
        with self._lock:
            if self._mode is None:
                self._why = why
            return self._mode != "bitwise"

    def withdraw(self) -> None:
        """Ask for equal bits again if no server passed within the tolerance."""
        with self._lock:
            if self._mode is None:
                self._why, self._tolerance = "", self._least

    def decided(self, mode: Mode | None, why: str, allowed: Tolerance | None) -> None:
        """Take over what another process decided."""
        with self._lock:
            self._mode, self._why = self._mode or mode, self._why or why
            self._tolerance = allowed or self._tolerance

    def resume(self, mode: Mode) -> bool:
        """Keep to the mode of an earlier job; return False if servers took part that it does not allow."""
        with self._lock:
            if self._mode == mode or (self.exact == "auto" and (self._mode, mode) != ("numeric", "bitwise")):
                self._settled = self._settled and self._mode == mode
                self._mode = mode
                return True
            return False

    def __str__(self) -> str:
        match self._mode:
            case "bitwise":
                return "bit for bit"
            case "numeric":
                reason = f", since {self._why}" if self._why else ""
                return f"within {self._tolerance}{reason}"
        return "bit for bit so far: no server took part"


def difference(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], allowed: Tolerance | None
) -> str:
    """Return how two tiers' features differ; empty if they are the same.

    Args:
        ours: Every tensor that crosses the cut, as computed locally.
        theirs: The same tensors, as computed by the server.
        allowed: The tolerance; None asks for equal bits.
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
    """Return the largest difference of floating-point features, relative to its tensor's largest value."""
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
    """Return whether all bits are equal.

    Unlike in ``torch.equal``, a NaN equals itself and zero differs from minus zero.
    """
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are equal where all bits of the given one's are."""
    if not tensor.is_floating_point():
        return tensor
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(word)


def _relative(a: torch.Tensor, b: torch.Tensor, differs: torch.Tensor) -> float:
    """Return the largest difference of some elements, relative to the largest value of ``a``."""
    ours, theirs = a[differs].double(), b[differs].double()
    apart = (ours - theirs).abs().masked_fill(ours.isnan() & theirs.isnan(), 0.0)
    if not apart.any():  # zero and minus zero, or NaNs with other bits
        return 0.0
    largest = _magnitude(a)
    return float(apart.nan_to_num(math.inf, math.inf).max()) / largest if largest else math.inf


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
