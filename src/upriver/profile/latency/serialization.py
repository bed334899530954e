"""Read and write latency models as JSON, ``upriver.latency/1``, and keep those of this machine.

Reading is strict: an unknown or missing field, a value of the wrong kind or a number that is not finite is an
error that names the field. Kept models that cannot be read count as missing; `upriver calibrate` makes new
ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from upriver.coldstart.roofline import keep_pace
from upriver.errors import ConfigError
from upriver.profile.latency.kept_models import MODELS, SCHEMA, name_of
from upriver.profile.latency.op_features import SIDES, Side, features_of
from upriver.profile.latency.pace import pace_from
from upriver.profile.latency.predictor import KindError, ModelName, Predictor, place_of
from upriver.profile.latency.regression import (
    Correction,
    OperatorModel,
    OwnModel,
    PaperModel,
    amounts_of,
    coordinates_of,
)
from upriver.profile.profile_cache import TierIdentity
from upriver.text import printable
from upriver.types import require_finite


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object with exactly the declared fields."""


class _Place(_Strict):
    host: str
    device: str
    threads: int
    workers: int
    versions: dict[str, str]


class _Correction(_Strict):
    names: list[str]
    reach: list[float]
    points: list[list[float]]
    weights: list[float]
    most: float


class _Line(_Strict):
    factors: dict[str, float]
    fixed_s: float
    correction: _Correction | None


class _Error(_Strict):
    kind: str
    model: ModelName
    count: int
    rmse_us: float
    mape_percent: float
    count_long: int
    mape_long_percent: float | None


class _File(_Strict):
    schema: Literal["upriver.latency/1"]
    place: _Place
    fitted_at: str
    configurations: int
    papers: dict[Side, dict[str, dict[str, float]]]
    ours: dict[str, _Line]
    errors: list[_Error]


def predictor_to_json(predictor: Predictor) -> str:
    """Write latency models; `predictor_from_json` returns ones that predict the same."""
    file = _File(
        schema=SCHEMA,
        place=_Place(**{**asdict(predictor.place), "versions": dict(predictor.place.versions)}),
        fitted_at=predictor.fitted_at,
        configurations=predictor.configurations,
        papers={
            side: {kind: dict(each) for kind, each in model.coefficients.items()}
            for side, model in predictor.papers.items()
        },
        ours={kind: _line_to(line) for kind, line in predictor.ours.lines.items()},
        errors=[_Error(**asdict(error)) for error in predictor.errors],
    )
    return msgspec.json.encode(file).decode()


def _line_to(line: OperatorModel) -> _Line:
    correction = line.correction
    return _Line(
        factors=dict(line.factors),
        fixed_s=line.fixed_s,
        correction=None
        if correction is None
        else _Correction(
            names=list(correction.names),
            reach=correction.reach.tolist(),
            points=correction.points.tolist(),
            weights=correction.weights.tolist(),
            most=correction.most,
        ),
    )


def predictor_from_json(text: str | bytes) -> Predictor:
    """Read latency models.

    Raises:
        ConfigError: If the text holds none; the message names the field.
    """
    try:
        # The standard parser lets a NaN through, so that the error can name its field.
        file = msgspec.convert(json.loads(text), _File)
        for name, number in _numbers(msgspec.to_builtins(file), ""):
            require_finite(name, number, at_least=-math.inf if name.endswith(".weights") else 0.0)
        return _predictor_from(file)
    except (ValueError, OverflowError, RecursionError) as error:  # a ConfigError is a ValueError
        raise ConfigError(f"not a valid {SCHEMA} file: {error}") from None


def _predictor_from(file: _File) -> Predictor:
    if missing := set(SIDES) - file.papers.keys():
        raise ConfigError(f"papers.{min(missing)} is missing")
    for side, kinds in file.papers.items():
        for kind, coefficients in kinds.items():
            _require_known(f"papers.{side}.{kind}", coefficients, features_of(kind, side))
    return Predictor(
        place=TierIdentity(**msgspec.to_builtins(file.place)),
        fitted_at=file.fitted_at,
        configurations=file.configurations,
        papers={side: PaperModel(side=side, coefficients=each) for side, each in file.papers.items()},
        ours=OwnModel(lines={kind: _line_from(kind, line) for kind, line in file.ours.items()}),
        errors=tuple(KindError(**msgspec.to_builtins(error)) for error in file.errors),
    )


def _line_from(kind: str, line: _Line) -> OperatorModel:
    _require_known(f"ours.{kind}.factors", line.factors, amounts_of(kind))
    require_finite(f"ours.{kind}.fixed_s", line.fixed_s, positive=True)
    found = line.correction
    if found is None:
        return OperatorModel(factors=line.factors, fixed_s=line.fixed_s)
    where, width, height = f"ours.{kind}.correction", len(found.names), len(found.weights)
    _require_known(f"{where}.names", found.names, coordinates_of(kind))
    for reach in found.reach:
        require_finite(f"{where}.reach", reach, positive=True)
    rows = {len(row) for row in found.points}
    if len(found.reach) != width or len(found.points) != height or rows - {width}:
        raise ConfigError(
            f"{where} has {width} names and {height} weights, {len(found.reach)} reaches and "
            f"{len(found.points)} points of {sorted(rows)} numbers"
        )
    return OperatorModel(
        factors=line.factors,
        fixed_s=line.fixed_s,
        correction=Correction(
            names=tuple(found.names),
            reach=np.array(found.reach, dtype=np.float64),
            points=np.array(found.points, dtype=np.float64).reshape(height, width),
            weights=np.array(found.weights, dtype=np.float64),
            most=found.most,
        ),
    )


def _require_known(where: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a model that needs numbers which works of its kind do not have."""
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: {printable(name, 40)!r} is none of {', '.join(known)}")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a document with its path."""
    match value:
        case bool() | str() | None:
            return
        case int() | float():
            yield name, value
        case dict():
            for key, item in value.items():
                yield from _numbers(item, f"{name}.{key}" if name else str(key))
        case list():
            for item in value:
                yield from _numbers(item, name)


# --------------------------------------------------------------------------------------------- kept


def keep(predictor: Predictor) -> Path:
    """Keep a device's models in place of earlier ones, and its rates for cold starts.

    Raises:
        OSError: If the cache folder cannot be written.
    """
    path = MODELS.write(name_of(predictor.place), predictor_to_json(predictor) + "\n")
    if (pace := pace_from(predictor)) is not None:
        keep_pace(torch.device(predictor.place.device), pace, threads=predictor.place.threads)
    return path


def kept(device: str | torch.device = "cpu") -> Predictor | None:
    """Return the models kept for a device of this machine in its present state; None where there are none.

    Raises:
        ConfigError: If torch cannot compute on the device.
    """
    place = place_of(device)
    predictor = MODELS.load(name_of(place), predictor_from_json)
    return predictor if predictor is not None and predictor.place == place else None
