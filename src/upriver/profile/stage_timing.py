"""Measure seconds of every stage as (fixed per call, per sample), at two or more micro-batch sizes.

A stage costs something for each call and for each sample. One size cannot separate these costs, two can. Each
program runs several times. The programs take turns, so that a machine that slows down does so for all of
them. The median of each stage and size counts, and a line without negative parts is fitted to the medians.
The first size is the size of the job: there the line equals the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol

from upriver.errors import ConfigError
from upriver.types import require_finite

if TYPE_CHECKING:
    import torch

Seconds = tuple[float, float]
"""Fixed seconds per call, and seconds per sample."""

REPEATS = 5
"""Counted runs: the median of five survives two disturbed ones."""

WARM_UPS = 1
"""Uncounted first runs, which pay for lazy set-up and cold caches."""


class Named(Protocol):
    """Required interface of a stage."""

    @property
    def name(self) -> str:
        """Name in tables."""


class Runnable(Protocol):
    """Required interface of a program."""

    @property
    def micro_batch(self) -> int:
        """Samples per run."""

    @property
    def stages(self) -> Sequence[Named]:
        """The program's stages."""

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        start: int,
        stop: int,
        *,
        on_stage: Callable[[int, float], None] | None = None,
    ) -> Sequence[torch.Tensor]:
        """Run stages [start, stop), and report the seconds of each once its device has finished it."""


def sizes(micro_batch: int) -> tuple[int, int]:
    """Return the job's micro-batch and one four times larger or smaller, so that fixed costs show."""
    return micro_batch, micro_batch // 4 if micro_batch >= 8 else 4 * micro_batch


def measure_stages(
    programs: Sequence[Runnable],
    inputs: Sequence[Sequence[torch.Tensor]],
    *,
    repeats: int = REPEATS,
    warm_ups: int = WARM_UPS,
) -> tuple[Seconds, ...]:
    """Return the seconds of each common stage, in order, of programs for different micro-batches.

    Args:
        programs: The same network at two or more micro-batch sizes, the job's size first.
        inputs: For each program the model's inputs, in its micro-batch size.

    Raises:
        ConfigError: If there are fewer than two sizes, the programs have different stages, or ``repeats`` or
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
    """Return the median seconds of each stage of one program, in order."""
    require_finite("repeats", repeats, at_least=1)
    require_finite("warm_ups", warm_ups)
    runs = [_run(program, tensors) for _ in range(warm_ups + repeats)][warm_ups:]
    return tuple(median(spent) for spent in zip(*runs, strict=True))


def through_first(points: Sequence[tuple[int, float]]) -> Seconds:
    """Return the line of :func:`fit`, scaled to pass through the first point.

    Two points need the scaling only where the line between them has a negative part.
    """
    fixed, slope = fit(points)
    samples, seconds = points[0]
    there = fixed + slope * samples
    factor = seconds / there if there > 0 else 0.0
    return fixed * factor, slope * factor


def fit(points: Sequence[tuple[int, float]]) -> Seconds:
    """Return the line ``fixed + per_sample * samples`` of least squared error without negative parts.

    Args:
        points: (samples, seconds); a number of samples may appear more than once.

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
    # The error is convex. If the free optimum lies outside, the best allowed line lies on the border: one
    # part is 0, and the other is the best for that case.
    proportional = sum(n * s for n, s in points) / sum(n * n for n, _ in points)
    return min(((0.0, proportional), (mean_s, 0.0)), key=lambda line: _error(line, points))


def _error(line: Seconds, points: Sequence[tuple[int, float]]) -> float:
    fixed, slope = line
    return sum((fixed + slope * samples - seconds) ** 2 for samples, seconds in points)


def _run(program: Runnable, tensors: Sequence[torch.Tensor]) -> list[float]:
    """Run a program once; return the seconds of each stage in order."""
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
