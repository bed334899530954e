"""Capture a job's frozen part at several micro-batches at once, for jobs whose low bits may differ.

A server with room and many samples needs less time for each sample if it runs more at once. With
``exact="numeric"`` a job may leave that choice to servers. The job captures its frozen part at two, four,
eight … times its micro-batch. It uploads these programs too, and names them in its requests. Responses are
divided into micro-batches as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from upriver.errors import UpriverError
from upriver.finetune.calibration.example_batch import example_of
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program
from upriver.program.split.resized import resized
from upriver.program.split.split import Split
from upriver.protocol import Caps

log = logging.getLogger("upriver")


@dataclass(frozen=True, kw_only=True, slots=True)
class LargerCaptures:
    """The frozen part at larger sizes.

    Attributes:
        programs: Captured programs, the smallest size first.
        left_out: (samples, reason) of each size that was not captured.
    """

    programs: tuple[Program, ...] = ()
    left_out: tuple[tuple[int, str], ...] = ()


def captured(
    model: nn.Module,
    direct: Dataset,
    parts: Split,
    options: JobOptions,
    *,
    caps: Caps,
    tell: Callable[[str], None],
) -> LargerCaptures:
    """Capture the frozen part at each larger size that a request can hold.

    Args:
        direct: The dataset, read by this process.
        parts: The split, at the job's own size.
    """
    programs: list[Program] = []
    left_out: list[tuple[int, str]] = []
    for size in options.larger_sizes:
        if (why_not := _too_large(size, options.micro_batch, caps)) != "":
            left_out.append((size, why_not))
            continue
        tell(f"capturing the frozen part for {size} samples at once")
        example = example_of(model, direct, replace(options, micro_batch=size))
        try:
            programs.append(resized(model, parts, example, autocast=options.autocast))
        except UpriverError as error:
            left_out.append((size, str(error)))
    return LargerCaptures(programs=tuple(programs), left_out=tuple(left_out))


def notes(taken: Sequence[Program], left_out: Sequence[tuple[int, str]]) -> list[str]:
    """Return the plan's notes on larger sizes.

    Args:
        taken: Programs that servers may choose.
        left_out: See `LargerCaptures.left_out`.
    """
    found = []
    if taken:
        sizes = " or ".join(str(program.micro_batch) for program in taken)
        found.append(f"servers may run {sizes} samples at once, which changes low bits")
    found += [f"not {size} samples at once: {why}" for size, why in left_out]
    return found


def _too_large(size: int, micro_batch: int, caps: Caps) -> str:
    """Return why no request can hold this many samples; empty if one can."""
    most = min(caps.samples, caps.tensors, caps.micro_batches * micro_batch)
    return "" if size <= most else f"a request has at most {most} samples there"
