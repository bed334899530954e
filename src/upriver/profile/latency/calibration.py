"""A device's latency models from operators timed on it one by one, and how far they are off.

Each configuration of `upriver.profile.latency.benchmark_configs` is timed on three occasions, minutes apart,
and the shortest time counts: other work on a machine makes an operator slow, never fast. Kinds take turns, so
a calibration that runs out of time has some of each. Every fifth configuration of a kind is held out: the
models are not fitted to it, and what they are off is told by these alone.
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
from upriver.profile.latency.regression import FEWEST, OwnModel, PaperModel, TimedWork
from upriver.profile.profile_cache import TierIdentity
from upriver.types import require_finite

OCCASIONS = 3
"""Times that each configuration is timed."""

HELD_OUT = 5
"""Of so many configurations one is held out."""

QUICK = 8
"""By what a quick calibration divides the configurations of each kind."""

LONG_S = 50e-6
"""From here on an operator counts as long: below, a call costs as much as its work."""

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
"""What LoADPart's models were off on its own machines (ICDCS 2022, Table III): RMSE in microseconds, MAPE in
percent."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told the kind that was timed, how many timings are done, and how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredConfig:
    """A configuration that was timed.

    Attributes:
        works: Of its call: one, or two with the bias that it adds.
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
    """Time operators on a device and fit its latency models.

    Args:
        device: Where to; nothing else should run there meanwhile.
        minutes: How long it may take, drawing and fitting aside.
        quick: Whether an eighth of the configurations will do.
        kinds: Of operators; all that there are ranges for, if not given.
        seed: Decides the configurations.
        timing: How each is timed.
        progress: Called after each timing.

    Raises:
        ConfigError: If torch cannot compute on the device, a kind has no range, ``minutes`` is not above 0 or
            was too little for any model.
    """
    require_finite("minutes", minutes, positive=True)
    place, bench = place_of(device), OpBenchmark(device)
    measured = measure(plan(quick=quick, kinds=kinds, seed=seed), bench, minutes, timing, progress)
    return fit(measured, place)


def plan(
    *, quick: bool = False, kinds: Sequence[str] | None = None, seed: int = SEED
) -> list[tuple[OpCall, bool]]:
    """The configurations in the order in which they are timed, each with whether it is held out."""
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
    """Time configurations until all are done on every occasion, or the time is over."""
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
    """Latency models of what was measured on a device.

    LoADPart's are fitted to calls of one work alone: its convolutions add no bias.

    Raises:
        ConfigError: If it is too little for any model.
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
    """How far each model is off, kind by kind, in the order of `RANGES`."""
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
