"""Predict the seconds of a work from its kind and numbers: LoADPart's linear regression, and our own model.

**LoADPart's** (ICDCS 2022, section III-B) fits, for each kind, non-negative least squares without an
intercept to the features of Table II. So no work takes no time, and more work never takes less.

**Ours** adds an intercept, since a call costs something. It uses the amounts computed and moved, and weights
each row by one over its seconds, so that the relative error counts. Its residual is smooth where
configurations are alike, but not linear (blocks of channels, sizes of caches). So the logarithm of the
residual is interpolated between calibrated configurations by simple kriging (Matheron 1963), which vanishes
far from all of them. The reach of each fact is chosen so that each calibrated configuration is best predicted
from the others. The correction is kept only if it predicts an unseen quarter of the configurations better
than the plain line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from upriver.errors import ConfigError
from upriver.extras import why_missing
from upriver.profile.latency.op_features import OpWork, Side, family_of, features_of
from upriver.types import require_finite

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST = 12
"""Fewest configurations of a kind that get a model."""

_ITERATIONS = 100
"""Solver iterations for each column; the solver's own limit is 3, which some inputs reach."""


class TimedWork(NamedTuple):
    """A measured work."""

    work: OpWork
    seconds: float


def check_scipy() -> None:
    """Check that scipy is installed, before minutes of measuring.

    Raises:
        ConfigError: If it is not; the message names the extra.
    """
    why = why_missing("calibration", "calibrate", "scipy")
    if why:
        raise ConfigError(why)


def nnls_fit(rows: Array, seconds: Array) -> Array:
    """Return non-negative coefficients that fit the rows to the seconds best; no intercept.

    Args:
        rows: Features, one row for each measurement.

    Raises:
        ConfigError: If scipy is not installed, the lengths differ, or a number is negative or not finite.
    """
    check_scipy()
    from scipy.optimize import nnls

    if rows.ndim != 2 or seconds.shape != rows.shape[:1] or not rows.size:
        raise ConfigError(f"rows of features for each of the seconds, got {rows.shape} and {seconds.shape}")
    for name, numbers in (("rows", rows), ("seconds", seconds)):
        require_finite(name, float(numbers.min()))
        require_finite(name, float(numbers.max()))
    # Features differ by ten orders of magnitude, and the solver compares them with one tolerance.
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    most = float(seconds.max()) or 1.0
    found, _ = nnls(rows / scale, seconds / most, maxiter=_ITERATIONS * rows.shape[1])
    coefficients: Array = found / scale * most
    return coefficients


def by_kind(timed: Iterable[TimedWork]) -> dict[str, list[TimedWork]]:
    """Group measurements by kind."""
    found: dict[str, list[TimedWork]] = {}
    for each in timed:
        found.setdefault(each.work.kind, []).append(each)
    return found


# ------------------------------------------------------------------------------------- LoADPart's


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """LoADPart's models of one side.

    Attributes:
        coefficients: Seconds for one unit of each feature, by kind and feature.
    """

    side: Side
    coefficients: Mapping[str, Mapping[str, float]]

    @classmethod
    def fit(cls, timed: Iterable[TimedWork], side: Side) -> PaperModel:
        """Fit the models to measurements; kinds with fewer than `FEWEST` configurations get none."""
        coefficients = {}
        for kind, points in by_kind(timed).items():
            if len(points) >= FEWEST:
                names = features_of(kind, side)
                rows = _columns([point.work.features for point in points], names)
                found = nnls_fit(rows, np.array([point.seconds for point in points]))
                coefficients[kind] = dict(zip(names, found.tolist(), strict=True))
        return cls(side=side, coefficients=coefficients)

    def seconds(self, works: Sequence[OpWork]) -> list[float | None]:
        """Return the seconds of each work; None where its kind has no model."""
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
"""Facts that seconds grow with, by family; other families go by the bytes moved."""

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
"""Facts that decide which configurations are alike, by family."""

_OF_COPIES = {"copy.cat": ("parts",), "copy.stack": ("parts",), "copy.clone": ("leap",)}


def amounts_of(kind: str) -> tuple[str, ...]:
    """Return the facts that seconds of a kind grow with."""
    return _AMOUNTS.get(family_of(kind), _MOVED)


def coordinates_of(kind: str) -> tuple[str, ...]:
    """Return the facts by which configurations of a kind are alike."""
    return (*_COORDINATES.get(family_of(kind), _USUAL), *_OF_COPIES.get(kind, ()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """Residual of a line as a smooth function of some facts.

    Attributes:
        reach: For each fact, the distance in octaves over which configurations inform each other.
        points: The calibrated configurations, one row of facts each.
        weights: Contribution of each configuration to the logarithm of the seconds at its own facts.
        most: Largest correction of the logarithm: the largest residual seen.
    """

    names: tuple[str, ...]
    reach: Array
    points: Array
    weights: Array
    most: float

    def __call__(self, facts: Array) -> Array:
        """Return the correction of the logarithm of the seconds, for each row of facts."""
        rows, points = _octaves(facts) / self.reach, _octaves(self.points) / self.reach
        found: Array = _likeness(rows, points) @ self.weights
        return np.clip(found, -self.most, self.most)

    @classmethod
    def fit(cls, names: Sequence[str], facts: Array, left: Array) -> Correction | None:
        """Fit the correction to the residuals of some configurations; None where all are alike.

        The sum of squared residuals at these configurations never grows.

        Args:
            facts: One row for each configuration.
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
"""Reaches tried for each fact, in octaves."""

NOISES = (0.003, 0.03, 0.1, 0.3)
"""Shares of the residual taken for chance, tried likewise."""

ROUNDS = 2
"""Passes over all facts."""


def _best_reach(octaves: Array, left: Array) -> tuple[Array, float]:
    """Return the reaches and share of chance that predict each configuration best from the others."""
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
    """Return the mean error at each configuration of a correction fitted without it (Dubrule 1983)."""
    inverse = np.linalg.inv(_of_distance(squares) + noise * np.eye(len(left)))
    return float(np.abs(inverse @ left / np.diag(inverse)).mean())


def _likeness(rows: Array, points: Array) -> Array:
    """Return the similarity of each row to each point."""
    squares = (rows**2).sum(1)[:, None] + (points**2).sum(1)[None, :] - 2 * rows @ points.T
    return _of_distance(squares)


def _of_distance(squares: Array) -> Array:
    """Return Matérn's function with 3/2: smooth, but not so smooth that a jump makes waves."""
    distance = np.sqrt(3 * np.maximum(squares, 0.0))  # rounding may leave slightly less than 0
    alike: Array = (1 + distance) * np.exp(-distance)
    return alike


def _octaves(facts: Array) -> Array:
    """Return logarithms to base 2 of counts that may be 0."""
    found: Array = np.log2(1 + facts)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorModel:
    """Our model of one kind.

    Attributes:
        factors: Seconds for one unit of each fact.
        fixed_s: Least seconds of a call.
        correction: Factor on the line; None for the plain line.
    """

    factors: Mapping[str, float]
    fixed_s: float
    correction: Correction | None = None

    @classmethod
    def fit(cls, kind: str, points: Sequence[TimedWork]) -> OperatorModel:
        """Fit a line to measurements, with a correction if that predicts unseen measurements better."""
        seen = [point for place, point in enumerate(points) if place % 4]
        unseen = points[::4]
        plain, corrected = cls.plain(kind, seen), cls.corrected(kind, seen)
        better = corrected.error(unseen) < plain.error(unseen)
        return cls.corrected(kind, points) if better else cls.plain(kind, points)

    @classmethod
    def plain(cls, kind: str, points: Sequence[TimedWork]) -> OperatorModel:
        """Fit a line without a correction."""
        names = amounts_of(kind)
        seconds = np.array([point.seconds for point in points])
        rows = np.column_stack([_columns([p.work.facts for p in points], names), np.ones(len(points))])
        *factors, fixed = nnls_fit(rows / seconds[:, None], np.ones(len(points))).tolist()
        # Never 0: no call is free.
        return cls(
            factors=dict(zip(names, factors, strict=True)), fixed_s=max(fixed, float(seconds.min()) / 10)
        )

    @classmethod
    def corrected(cls, kind: str, points: Sequence[TimedWork]) -> OperatorModel:
        """Fit a line with a correction."""
        plain, names = cls.plain(kind, points), coordinates_of(kind)
        facts = [point.work.facts for point in points]
        left = np.log([point.seconds for point in points]) - np.log(plain.seconds(facts))
        correction = Correction.fit(names, _columns(facts, names), left)
        return cls(factors=plain.factors, fixed_s=plain.fixed_s, correction=correction)

    def seconds(self, facts: Sequence[Mapping[str, float]]) -> Array:
        """Return the seconds of each work from its facts."""
        rows = _columns(facts, tuple(self.factors))
        found: Array = rows @ np.array(list(self.factors.values())) + self.fixed_s
        if self.correction is not None:
            found = found * np.exp(self.correction(_columns(facts, self.correction.names)))
        return found

    def error(self, points: Sequence[TimedWork]) -> float:
        """Return the mean relative error."""
        measured = np.array([point.seconds for point in points])
        predicted = self.seconds([point.work.facts for point in points])
        return float(np.abs(predicted / measured - 1).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModel:
    """Our models of one device, by kind."""

    lines: Mapping[str, OperatorModel] = field(default_factory=dict)

    @classmethod
    def fit(cls, timed: Iterable[TimedWork]) -> OwnModel:
        """Fit the models to measurements; kinds with fewer than `FEWEST` configurations get none."""
        kinds = by_kind(timed).items()
        return cls(
            lines={kind: OperatorModel.fit(kind, points) for kind, points in kinds if len(points) >= FEWEST}
        )

    def seconds(self, works: Sequence[OpWork]) -> list[float | None]:
        """Return the seconds of each work; None where its kind has no model.

        A work fused into the previous kernel takes 0. All works of a kind are computed at once.
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
    """Return one row of these numbers for each work."""
    return np.array([[each[name] for name in names] for each in numbers], dtype=np.float64).reshape(
        len(numbers), len(names)
    )
