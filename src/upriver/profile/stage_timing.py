"""Seconds of every stage as (fixed per call, per sample), from runs at two sizes of micro-batch or more.

A stage costs something for being called and something for each sample. One size cannot tell these apart, two
can: each program runs some times over, the programs take turns so that a machine that slows down does so for
all of them, the median of each stage and size counts, and a line with no negative part is laid through them.
Of these sizes the first is the one that is meant: there the line says what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch

from upriver.errors import ConfigError
from upriver.types import require_finite

Seconds = tuple[float, float]
"""(fixed per call, per sample)."""

REPEATS = 5
"""Runs that count: the median of five stands two that were disturbed."""

WARM_UPS = 1
"""Runs before them, which pay for lazy set-up and cold caches."""


class Named(Protocol):
    """What is needed of a stage."""

    @property
    def name(self) -> str:
        """What tables call it."""


class Runnable(Protocol):
    """What is needed of a program."""

    @property
    def micro_batch(self) -> int:
        """Samples a run takes."""

    @property
    def stages(self) -> Sequence[Named]:
        """The stages it runs."""

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        start: int,
        stop: int,
        *,
        on_stage: Callable[[int, float], None] | None = None,
    ) -> Sequence[torch.Tensor]:
        """Run stages [start, stop), telling the seconds of each once its device is done with it."""


def sizes(micro_batch: int) -> tuple[int, int]:
    """The micro-batch that is meant, and another one four times off, so that fixed costs show."""
    return micro_batch, micro_batch // 4 if micro_batch >= 8 else 4 * micro_batch


def measure_stages(
    programs: Sequence[Runnable],
    inputs: Sequence[Sequence[torch.Tensor]],
    *,
    repeats: int = REPEATS,
    warm_ups: int = WARM_UPS,
) -> tuple[Seconds, ...]:
    """Measure the stages that some programs have in common, each made for another micro-batch.

    Args:
        programs: The same network at two sizes of micro-batch or more, the one that is meant first.
        inputs: For each of them the model's inputs, of its own micro-batch.
        repeats: Runs of each that count.
        warm_ups: Runs of each before those.

    Returns:
        Seconds of each stage, in order.

    Raises:
        ConfigError: If there are not two sizes, the programs have not the same stages, or ``repeats`` or
            ``warm_ups`` is too small.
    """
    require_finite("repeats", repeats, at_least=1)
    require_finite("warm_ups", warm_ups)
    _check_alike(programs)
    num_stages = len(programs[0].stages)
    spent: list[list[list[float]]] = [[[] for _ in range(num_stages)] for _ in programs]
    for turn in range(warm_ups + repeats):
        for program, tensors, of_stages in zip(programs, inputs, spent, strict=True):
            took = _run(program, tensors)
            if turn >= warm_ups:
                for seconds, of_stage in zip(took, of_stages, strict=True):
                    of_stage.append(seconds)
    return tuple(
        through_first(
            [
                (program.micro_batch, median(of_stages[position]))
                for program, of_stages in zip(programs, spent, strict=True)
            ]
        )
        for position in range(num_stages)
    )


def stage_medians(
    program: Runnable, tensors: Sequence[torch.Tensor], *, repeats: int = REPEATS, warm_ups: int = WARM_UPS
) -> tuple[float, ...]:
    """Seconds of each stage of one program, in order: medians of some runs.

    Args:
        program: At the one size that is of interest.
        tensors: The model's inputs.
        repeats: Runs that count.
        warm_ups: Runs before those.

    Raises:
        ConfigError: If ``repeats`` or ``warm_ups`` is too small.
    """
    require_finite("repeats", repeats, at_least=1)
    require_finite("warm_ups", warm_ups)
    runs = [_run(program, tensors) for _ in range(warm_ups + repeats)][warm_ups:]
    return tuple(median(spent) for spent in zip(*runs, strict=True))


def through_first(points: Sequence[tuple[int, float]]) -> Seconds:
    """The line of :func:`fit`, stretched so that it goes through the first point.

    Two points need it only where the line between them had a negative part.

    Raises:
        ConfigError: As :func:`fit`.
    """
    fixed, slope = fit(points)
    samples, seconds = points[0]
    there = fixed + slope * samples
    factor = seconds / there if there > 0 else 0.0
    return fixed * factor, slope * factor


def fit(points: Sequence[tuple[int, float]]) -> Seconds:
    """The line ``fixed + per_sample * samples`` with the least squared error and no negative part.

    Args:
        points: (samples, seconds); seconds of the same number of samples may stand there more than once.

    Raises:
        ConfigError: If there are fewer than two numbers of samples, or a number is negative or not finite.
    """
    for samples, seconds in points:
        require_finite("samples", samples, at_least=1)
        require_finite("seconds", seconds)
    if len({samples for samples, _ in points}) < 2:
        raise ConfigError(f"a line needs at least two numbers of samples, got {[n for n, _ in points]}")
    mean_n = sum(n for n, _ in points) / len(points)
    mean_s = sum(s for _, s in points) / len(points)
    slope = sum((n - mean_n) * (s - mean_s) for n, s in points) / sum((n - mean_n) ** 2 for n, _ in points)
    fixed = mean_s - slope * mean_n
    if slope >= 0 and fixed >= 0:
        return fixed, slope
    # The error is convex, so with the free optimum outside the best allowed line lies on the border: one part
    # is 0, and the other the best that it can be alone.
    proportional = sum(n * s for n, s in points) / sum(n * n for n, _ in points)
    return min(((0.0, proportional), (mean_s, 0.0)), key=lambda line: _error(line, points))


def _error(line: Seconds, points: Sequence[tuple[int, float]]) -> float:
    fixed, slope = line
    return sum((fixed + slope * samples - seconds) ** 2 for samples, seconds in points)


def _run(program: Runnable, tensors: Sequence[torch.Tensor]) -> list[float]:
    """One run; seconds of each stage in order."""
    took = [0.0] * len(program.stages)

    def note(position: int, seconds: float) -> None:
        took[position - 1] = seconds

    program.run(tensors, 0, len(program.stages), on_stage=note)
    return took


def _check_alike(programs: Sequence[Runnable]) -> None:
    sizes = [program.micro_batch for program in programs]
    if len(set(sizes)) < 2:
        raise ConfigError(f"programs of at least two micro-batch sizes are needed, got {sizes}")
    names = [[stage.name for stage in program.stages] for program in programs]
    if any(other != names[0] for other in names[1:]):
        counts = [len(each) for each in names]
        raise ConfigError(
            f"the programs for micro-batches of {sizes} must have the same stages, got {counts} unlike ones"
        )
