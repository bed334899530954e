"""Seconds of a work from its kind and its numbers: LoADPart's linear regression, and ours beside it.

**LoADPart's** (ICDCS 2022, section III-B): for each kind non-negative least squares without an intercept on
the features of Table II, so that nothing takes no time and more never takes less.

**Ours** is the same with an intercept (a call costs something), on what is computed and moved, each row by
one over its seconds, so that the relative error counts. What it leaves is smooth where configurations are
alike and no line at all (blocks of channels, sizes of caches), so the logarithm of what is left is
interpolated between calibrated configurations: simple kriging (Matheron 1963), which comes down to nothing
far from all of them. How far a fact reaches is what predicts each calibrated configuration best from the
others. Where the plain line predicts a quarter of the configurations, which it did not see, as well, the
plain line it is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from upriver.errors import ConfigError
from upriver.profile.latency.op_features import OpWork, Side, family_of, features_of
from upriver.types import require_finite

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST = 12
"""Configurations of a kind, below which no model is made for it."""

_ITERATIONS = 100
"""Of the solver, for each column; its own limit is 3, which some inputs reach."""


class TimedWork(NamedTuple):
    """A work that was measured."""

    work: OpWork
    seconds: float


def nnls_fit(rows: Array, seconds: Array) -> Array:
    """Coefficients, none negative, with which the rows come nearest to the seconds; no intercept.

    Args:
        rows: Features, a row for each measurement.
        seconds: Of each measurement.

    Raises:
        ConfigError: If scipy is not installed, the two have not one length, or a number is negative or not
            finite.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError("scipy is not installed; install 'upriver[calibrate]' to fit latency models")
    from scipy.optimize import nnls

    if rows.ndim != 2 or seconds.shape != rows.shape[:1] or not rows.size:
        raise ConfigError(f"rows of features for each of the seconds, got {rows.shape} and {seconds.shape}")
    for name, numbers in (("rows", rows), ("seconds", seconds)):
        require_finite(name, float(numbers.min()))
        require_finite(name, float(numbers.max()))
    # Features lie ten orders of magnitude apart, and the solver compares them with one tolerance.
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    most = float(seconds.max()) or 1.0
    found, _ = nnls(rows / scale, seconds / most, maxiter=_ITERATIONS * rows.shape[1])
    coefficients: Array = found / scale * most
    return coefficients


def by_kind(timed: Iterable[TimedWork]) -> dict[str, list[TimedWork]]:
    """Measurements of each kind."""
    found: dict[str, list[TimedWork]] = {}
    for each in timed:
        found.setdefault(each.work.kind, []).append(each)
    return found


# ------------------------------------------------------------------------------------- LoADPart's


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """LoADPart's models of one side.

    Attributes:
        coefficients: Kind to feature to seconds for one of it.
    """

    side: Side
    coefficients: Mapping[str, Mapping[str, float]]

    @classmethod
    def fit(cls, timed: Iterable[TimedWork], side: Side) -> PaperModel:
        """The model of what was measured; kinds with fewer than `FEWEST` configurations have none."""
        coefficients = {}
        for kind, points in by_kind(timed).items():
            if len(points) >= FEWEST:
                names = features_of(kind, side)
                rows = _columns([point.work.features for point in points], names)
                found = nnls_fit(rows, np.array([point.seconds for point in points]))
                coefficients[kind] = dict(zip(names, found.tolist(), strict=True))
        return cls(side=side, coefficients=coefficients)

    def seconds(self, works: Sequence[OpWork]) -> list[float | None]:
        """Of each work; None where no model was made for its kind."""
        found: list[float | None] = []
        for work in works:
            each = self.coefficients.get(work.kind)
            if each is None:
                found.append(None)
            else:
                found.append(sum(factor * work.features[name] for name, factor in each.items()))
        return found


# ------------------------------------------------------------------------------------------- ours

_MOVED = ("bytes_in", "bytes_out", "weight_bytes")

_AMOUNTS: dict[str, tuple[str, ...]] = {
    "conv": ("pointwise_macs", "few_channel_macs", "window_macs", *_MOVED),
    "group_conv": ("macs", *_MOVED),
    "conv_transpose": ("macs", *_MOVED),
    "dwconv": ("macs", *_MOVED),
    "matmul": ("macs", "right_bytes", "bytes_in", "bytes_out"),
    "bmm": ("macs", "right_bytes", "bytes_in", "bytes_out"),
    "attention": ("macs", "scores", *_MOVED),
    "max_pool": ("macs", *_MOVED),
    "avg_pool": ("macs", *_MOVED),
}
"""Facts that seconds grow with, by family; others go by what is moved."""

_CONVOLUTION = (
    "batch",
    "in_channels",
    "out_channels",
    "pixels",
    "kernel",
    "stride",
    "groups",
    "bias",
    "strided",
)
_PRODUCT = ("copies", "rows", "inner", "outer", "by_rows", "strided")
_POOLING = ("maps", "pixels", "kernel", "stride", "whole", "bytes_in", "strided")
_USUAL = ("elements", "bytes_in", "in_place", "strided")
_ROWS = (*_USUAL, "row")

_COORDINATES: dict[str, tuple[str, ...]] = {
    "conv": _CONVOLUTION,
    "group_conv": _CONVOLUTION,
    "conv_transpose": _CONVOLUTION,
    "dwconv": _CONVOLUTION,
    "matmul": _PRODUCT,
    "bmm": _PRODUCT,
    "attention": ("heads", "length", "keys", "head_width", "masked", "causal", "strided"),
    "max_pool": _POOLING,
    "avg_pool": _POOLING,
    "bias": (*_USUAL, "run"),
    "elementwise": (*_USUAL, "run"),
    "batch_norm": _ROWS,
    "layer_norm": _ROWS,
    "rms_norm": _ROWS,
    "group_norm": _ROWS,
    "instance_norm": _ROWS,
    "softmax": (*_ROWS, "behind"),
    "log_softmax": (*_ROWS, "behind"),
    "embedding": (*_ROWS, "table"),
    "reduction": (*_ROWS, "behind"),
    "interpolation": (*_USUAL, "scale", "maps", "width"),
    "copy": (*_USUAL, "run"),
}
"""Facts that say which configurations are alike, by family."""

_OF_COPIES = {"copy.cat": ("parts",), "copy.stack": ("parts",), "copy.clone": ("leap",)}


def amounts_of(kind: str) -> tuple[str, ...]:
    """The facts that seconds of a kind grow with."""
    return _AMOUNTS.get(family_of(kind), _MOVED)


def coordinates_of(kind: str) -> tuple[str, ...]:
    """The facts by which configurations of a kind are alike."""
    return (*_COORDINATES.get(family_of(kind), _USUAL), *_OF_COPIES.get(kind, ()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """What a line leaves, as a smooth function of some facts.

    Attributes:
        names: The facts.
        reach: For each of them how many octaves apart configurations still say something of each other.
        points: The calibrated configurations: a row of facts for each.
        weights: What each of them adds to the logarithm of the seconds where it is met.
        most: The most that the logarithm may be off: what was seen.
    """

    names: tuple[str, ...]
    reach: Array
    points: Array
    weights: Array
    most: float

    def __call__(self, facts: Array) -> Array:
        """What to add to the logarithm of the seconds, for each row of facts."""
        rows, points = _octaves(facts) / self.reach, _octaves(self.points) / self.reach
        found: Array = _likeness(rows, points) @ self.weights
        return np.clip(found, -self.most, self.most)

    @classmethod
    def fit(cls, names: Sequence[str], facts: Array, left: Array) -> Correction | None:
        """The correction for what is left at some configurations; None where they are all alike.

        The squares of what is left at these very configurations never add up to more than before.

        Args:
            names: Of the facts.
            facts: A row for each configuration.
            left: Logarithm of measured over predicted seconds.
        """
        differs = np.ptp(facts, axis=0) > 0
        if not differs.any():
            return None
        kept = tuple(name for name, varies in zip(names, differs, strict=True) if varies)
        points = facts[:, differs]
        reach, noise = _best_reach(_octaves(points), left)
        alike = _likeness(_octaves(points) / reach, _octaves(points) / reach)
        weights: Array = np.linalg.solve(alike + noise * np.eye(len(left)), left).astype(np.float64)
        return cls(names=kept, reach=reach, points=points, weights=weights, most=float(np.abs(left).max()))


REACHES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Octaves that are tried for each fact."""

NOISES = (0.003, 0.03, 0.1, 0.3)
"""Parts of what is left that are taken for chance, tried likewise."""

ROUNDS = 2
"""Times that all facts are gone through."""


def _best_reach(octaves: Array, left: Array) -> tuple[Array, float]:
    """Reach of each fact and part of chance with which the others predict each configuration best."""
    squares = [np.square(column[:, None] - column[None, :]) for column in octaves.T]
    reach, noise = np.full(len(squares), 2.0), NOISES[1]
    total: Array = np.sum([square / r**2 for square, r in zip(squares, reach, strict=True)], axis=0)
    best = _left_out(total, noise, left)
    for _ in range(ROUNDS):
        for position, square in enumerate(squares):
            others = total - square / reach[position] ** 2
            for tried in REACHES:
                error = _left_out(others + square / tried**2, noise, left)
                if error < best:
                    best, reach[position] = error, tried
            total = others + square / reach[position] ** 2
        for chance in NOISES:
            error = _left_out(total, chance, left)
            if error < best:
                best, noise = error, chance
    return reach, noise


def _left_out(squares: Array, noise: float, left: Array) -> float:
    """Mean error at each configuration of a correction that has not seen it (Dubrule 1983)."""
    inverse = np.linalg.inv(_of_distance(squares) + noise * np.eye(len(left)))
    return float(np.abs(inverse @ left / np.diag(inverse)).mean())


def _likeness(rows: Array, points: Array) -> Array:
    """How alike configurations are, for each row and each point."""
    squares = (rows**2).sum(1)[:, None] + (points**2).sum(1)[None, :] - 2 * rows @ points.T
    return _of_distance(squares)


def _of_distance(squares: Array) -> Array:
    """Matérn's function with 3/2: smooth, and not so smooth that a jump makes waves."""
    distance = np.sqrt(3 * np.maximum(squares, 0.0))  # rounding may leave a little less than nothing
    alike: Array = (1 + distance) * np.exp(-distance)
    return alike


def _octaves(facts: Array) -> Array:
    """Logarithms of base 2, of counts that may be 0."""
    found: Array = np.log2(1 + facts)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorModel:
    """Our model of one kind.

    Attributes:
        factors: Fact to seconds for one of it.
        fixed_s: What a call takes at least.
        correction: What to multiply by; None for the plain line.
    """

    factors: Mapping[str, float]
    fixed_s: float
    correction: Correction | None = None

    @classmethod
    def fit(cls, kind: str, points: Sequence[TimedWork]) -> OperatorModel:
        """The line of some measurements, corrected if that predicts what it has not seen better."""
        seen = [point for place, point in enumerate(points) if place % 4]
        unseen = points[::4]
        plain, corrected = cls.plain(kind, seen), cls.corrected(kind, seen)
        better = corrected.error(unseen) < plain.error(unseen)
        return cls.corrected(kind, points) if better else cls.plain(kind, points)

    @classmethod
    def plain(cls, kind: str, points: Sequence[TimedWork]) -> OperatorModel:
        """Without a correction."""
        names = amounts_of(kind)
        seconds = np.array([point.seconds for point in points])
        rows = np.column_stack([_columns([p.work.facts for p in points], names), np.ones(len(points))])
        *factors, fixed = nnls_fit(rows / seconds[:, None], np.ones(len(points))).tolist()
        # Never nothing: no call is free.
        return cls(
            factors=dict(zip(names, factors, strict=True)), fixed_s=max(fixed, float(seconds.min()) / 10)
        )

    @classmethod
    def corrected(cls, kind: str, points: Sequence[TimedWork]) -> OperatorModel:
        """With one."""
        plain, names = cls.plain(kind, points), coordinates_of(kind)
        facts = [point.work.facts for point in points]
        left = np.log([point.seconds for point in points]) - np.log(plain.seconds(facts))
        correction = Correction.fit(names, _columns(facts, names), left)
        return cls(factors=plain.factors, fixed_s=plain.fixed_s, correction=correction)

    def seconds(self, facts: Sequence[Mapping[str, float]]) -> Array:
        """Of each work by its facts."""
        rows = _columns(facts, tuple(self.factors))
        found: Array = rows @ np.array(list(self.factors.values())) + self.fixed_s
        if self.correction is not None:
            found = found * np.exp(self.correction(_columns(facts, self.correction.names)))
        return found

    def error(self, points: Sequence[TimedWork]) -> float:
        """Mean relative error."""
        measured = np.array([point.seconds for point in points])
        predicted = self.seconds([point.work.facts for point in points])
        return float(np.abs(predicted / measured - 1).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModel:
    """Our models of one device.

    Attributes:
        lines: Kind to its model.
    """

    lines: Mapping[str, OperatorModel] = field(default_factory=dict)

    @classmethod
    def fit(cls, timed: Iterable[TimedWork]) -> OwnModel:
        """The model of what was measured; kinds with fewer than `FEWEST` configurations have none."""
        kinds = by_kind(timed).items()
        return cls(
            lines={kind: OperatorModel.fit(kind, points) for kind, points in kinds if len(points) >= FEWEST}
        )

    def seconds(self, works: Sequence[OpWork]) -> list[float | None]:
        """Of each work, 0 where it is part of the kernel before it; None where there is no model of its kind.

        All works of a kind are worked out at once.
        """
        found: list[float | None] = [None] * len(works)
        places: dict[str, list[int]] = {}
        for place, work in enumerate(works):
            if work.fused:
                found[place] = 0.0
            elif work.kind in self.lines:
                places.setdefault(work.kind, []).append(place)
        for kind, where in places.items():
            predicted = self.lines[kind].seconds([works[place].facts for place in where])
            for place, seconds in zip(where, predicted.tolist(), strict=True):
                found[place] = seconds
        return found


def _columns(numbers: Sequence[Mapping[str, float]], names: Sequence[str]) -> Array:
    """A row of these numbers for each work."""
    return np.array([[each[name] for name in names] for each in numbers], dtype=np.float64).reshape(
        len(numbers), len(names)
    )
