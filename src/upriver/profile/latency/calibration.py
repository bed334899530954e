"""Fit a device's latency models to operators timed one by one, and measure the models' errors.

Each configuration of `upriver.profile.latency.benchmark_configs` is timed on three occasions, minutes apart.
The shortest time counts: other work on a machine makes an operator slow, never fast. Kinds take turns, so a
calibration that runs out of time has some of each. Every fifth configuration of a kind is held out: the
models are not fitted to it, and their errors are measured on these alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeAlias

import numpy as np
import torch

from upriver.errors import ConfigError
from upriver.profile.latency.benchmark_configs import RANGES, SEED, sample
from upriver.profile.latency.op_benchmark import OpBenchmark, Timing
from upriver.profile.latency.op_calls import OpCall
from upriver.profile.latency.op_kinds import SIDES, OpWork, Side, works_of
from upriver.profile.latency.predictor import MODELS, KindError, ModelName, Predictor, place_of
from upriver.profile.latency.regression import FEWEST, OwnModel, PaperModel, TimedWork, check_scipy
from upriver.profile.profile_cache import TierIdentity
from upriver.types import require_finite

OCCASIONS = 3
"""Number of timings of each configuration."""

HELD_OUT = 5
"""One of this many configurations is held out."""

QUICK = 8
"""Divisor of each kind's configurations in a quick calibration."""

LONG_S = 50e-6
"""Duration from which an operator counts as long: below, a call costs as much as its work."""

TABLE_III: dict[str, Mapping[Side, tuple[float, float]]] = {
    "conv": {"edge": (401.81, 16.71), "device": (41325.68, 40.09)},
    "dwconv": {"edge": (11.95, 41.58), "device": (712.79, 36.64)},
    "matmul": {"edge": (3.41, 5.33), "device": (420.71, 8.54)},
    "avg_pool": {"edge": (6.90, 13.56), "device": (635.26, 19.29)},
    "max_pool": {"edge": (6.19, 34.23), "device": (2375.42, 20.25)},
    "bias": {"edge": (4.60, 7.40), "device": (690.55, 4.80)},
    "elementwise.add": {"edge": (1.47, 6.37), "device": (1232.25, 4.82)},
    "batch_norm": {"edge": (24.34, 10.97), "device": (2023.16, 9.36)},
    "activation.relu": {"edge": (4.52, 12.59), "device": (1451.52, 17.67)},
}
"""Errors of LoADPart's models on its own machines (ICDCS 2022, Table III): RMSE in microseconds, MAPE in
percent."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Callback with the timed kind, the number of finished timings, and the number of all timings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredConfig:
    """A timed configuration.

    Attributes:
        works: Works of its call: one, or two with a bias that the call adds.
        seconds: Shortest time of the call.
        held_out: Whether no model is fitted to it.
    """

    works: tuple[OpWork, ...]
    seconds: float
    held_out: bool


def calibrate(
    device: str | torch.device = "cpu",
    *,
    minutes: float = 10.0,
    quick: bool = False,
    kinds: Sequence[str] | None = None,
    seed: int = SEED,
    timing: Timing | None = None,
    progress: Progress | None = None,
) -> Predictor:
    """Time operators on a device and fit the device's latency models.

    Args:
        device: Device to calibrate; nothing else should run there meanwhile.
        minutes: Time limit, drawing and fitting excluded.
        quick: Whether to measure only an eighth of the configurations.
        kinds: Kinds of operators; all kinds with a range if None.

    Raises:
        ConfigError: If scipy is not installed, torch cannot compute on the device, a kind has no range, or
            ``minutes`` is not above 0 or too short for any model.
    """
    check_scipy()
    require_finite("minutes", minutes, positive=True)
    place, bench = place_of(device), OpBenchmark(device)
    measured = measure(plan(quick=quick, kinds=kinds, seed=seed), bench, minutes, timing, progress)
    return fit(measured, place)


def plan(
    *, quick: bool = False, kinds: Sequence[str] | None = None, seed: int = SEED
) -> list[tuple[OpCall, bool]]:
    """Return the configurations in timing order, each with a flag that marks it as held out."""
    found: list[tuple[float, OpCall, bool]] = []
    for kind in RANGES if kinds is None else kinds:
        count = RANGES[kind].count if kind in RANGES else 1
        calls = sample(kind, max(math.ceil(count / QUICK), 2 * FEWEST) if quick else count, seed)
        found += [
            ((place + 0.5) / len(calls), call, place % HELD_OUT == HELD_OUT - 1)
            for place, call in enumerate(calls)
        ]
    found.sort(key=lambda each: each[0])
    return [(call, held_out) for _, call, held_out in found]


def measure(
    planned: Sequence[tuple[OpCall, bool]],
    bench: OpBenchmark,
    minutes: float,
    timing: Timing | None = None,
    progress: Progress | None = None,
) -> list[MeasuredConfig]:
    """Time configurations until all are done on every occasion, or time runs out."""
    until = time.monotonic() + 60 * minutes
    works = [works_of(call) for call, _ in planned]
    shortest: dict[int, float] = {}
    total = OCCASIONS * len(planned)
    for number in range(total):
        if time.monotonic() > until:
            break
        place = number % len(planned)
        seconds = bench.seconds(planned[place][0], timing)
        shortest[place] = min(seconds, shortest.get(place, math.inf))
        if progress is not None:
            progress(works[place][0].kind, number + 1, total)
    return [
        MeasuredConfig(works=works[place], seconds=seconds, held_out=planned[place][1])
        for place, seconds in shortest.items()
    ]


def fit(measured: Sequence[MeasuredConfig], place: TierIdentity) -> Predictor:
    """Fit the latency models of a device to its measurements.

    LoADPart's models are fitted to calls of a single work: its convolutions add no bias.

    Raises:
        ConfigError: If there are too few measurements for any model.
    """
    fitted = [each for each in measured if not each.held_out]
    ours = OwnModel.fit(TimedWork(each.works[0], each.seconds) for each in fitted)
    if not ours.lines:
        raise ConfigError(
            f"no kind has {FEWEST} configurations that were timed: {len(fitted)} in all; give it more minutes"
        )
    alone = [TimedWork(each.works[0], each.seconds) for each in fitted if len(each.works) == 1]
    predictor = Predictor(
        place=place,
        fitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        configurations=len(fitted),
        papers={side: PaperModel.fit(alone, side) for side in SIDES},
        ours=ours,
    )
    held_out = [each for each in measured if each.held_out]
    return replace(predictor, errors=tuple(errors(predictor, held_out)))


def errors(predictor: Predictor, measured: Iterable[MeasuredConfig]) -> list[KindError]:
    """Return the errors of each model by kind, in the order of `RANGES`."""
    by_kind: dict[str, list[MeasuredConfig]] = {}
    for each in measured:
        by_kind.setdefault(each.works[0].kind, []).append(each)
    order = [kind for kind in RANGES if kind in by_kind]
    found = []
    for kind in order:
        for model in MODELS:
            alone = [each for each in by_kind[kind] if model == "ours" or len(each.works) == 1]
            error = _error(predictor, kind, model, alone)
            if error is not None:
                found.append(error)
    return found


def _error(
    predictor: Predictor, kind: str, model: ModelName, measured: Sequence[MeasuredConfig]
) -> KindError | None:
    every = predictor.work_seconds([each.works[0] for each in measured], model)
    known = [seconds for seconds in every if seconds is not None]
    if not measured or len(known) < len(measured):
        return None
    predicted, truth = np.array(known), np.array([each.seconds for each in measured])
    off = np.abs(predicted / truth - 1) * 100
    long = truth >= LONG_S
    return KindError(
        kind=kind,
        model=model,
        count=len(truth),
        rmse_us=float(np.sqrt(np.square(predicted - truth).mean())) * 1e6,
        mape_percent=float(off.mean()),
        count_long=int(long.sum()),
        mape_long_percent=float(off[long].mean()) if long.any() else None,
    )
