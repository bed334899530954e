"""Give a job the faster prefix that it asks for, and measure its error on the canary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from upriver.engine.engine import Engine
from upriver.errors import ConfigError, NotExact, ProgramError
from upriver.finetune.calibration.local_canary import LocalCanary
from upriver.finetune.options import JobOptions
from upriver.pipeline import Dataset
from upriver.program.graph.executor import Program
from upriver.program.rewrite.compiled import compile_stages
from upriver.program.rewrite.faster import FasterPrefix, rewritten
from upriver.program.split.split import Split
from upriver.rpc.tolerance import Deviation, tolerance_of

log = logging.getLogger("upriver")


def with_faster_prefix(
    parts: Split, direct: Dataset, options: JobOptions, tell: Callable[[str], None]
) -> Split:
    """Return the split with the prefix that the options ask for; the same split if it has no program.

    Args:
        direct: The dataset, read by this process.

    Raises:
        ConfigError: If the frozen part cannot run so.
        NotExact: If its features are too far from those of the model as it is written.
    """
    kind, program = options.prefix, parts.program
    if kind is None or program is None:
        return parts
    tell(f"making the frozen part faster: {kind}")
    faster = rewritten(program, kind)
    canary = LocalCanary(
        engine=Engine(chain=direct.chain, program=program, micro_batch=options.micro_batch),
        dataset=direct,
        ids=options.order(0).micro_batches[0],
        freeze=parts.freeze,
        seed=options.seed,
        on_bad_sample=options.sampling.on_bad_sample,
    )
    given = canary.inputs().tensors
    written = program.run(given, 0, program.num_stages)
    note = ""
    if kind == "compiled":
        tell("compiling the frozen part")
        note = _compiled(faster, given)
    try:
        error = error_of(written, parts.tail.values.as_read(faster.run(given, 0, faster.num_stages)))
    except ProgramError as refusal:  # a kernel may refuse what its rule for shapes takes
        raise ConfigError(f"the frozen part does not run with prefix={kind!r}: {refusal}") from refusal
    largest = tolerance_of(faster).rtol
    if not error <= largest:
        raise NotExact(
            f"with prefix={kind!r}, features of the job's first micro-batch are {error:.2g} of the largest "
            f"value from those of the model as it is written; at most {largest:g} is accepted. "
            "Give another prefix, or leave it out"
        )
    return replace(
        parts,
        program=faster,
        faster=FasterPrefix(kind=kind, captured=program, error=error, note=note),
    )


def _compiled(program: Program, given: Sequence[torch.Tensor]) -> str:
    """Compile a program for this process, and return what to say about it."""
    why_not = compile_stages(program, given)
    if why_not:
        log.warning("the frozen part is not compiled: %s", why_not)
        return f"but is not compiled: {why_not}"
    return "and is compiled where this process runs it; servers run it as it is"


def error_of(written: Sequence[torch.Tensor], faster: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of features, relative to the largest value of their tensor.

    It is infinite if numbers that are not floating-point differ, or one side alone is not finite.
    """
    whole = [pair for pair in zip(written, faster, strict=True) if not pair[0].is_floating_point()]
    if not all(torch.equal(a, b) for a, b in whole):
        return float("inf")
    pairs = [pair for pair in zip(written, faster, strict=True) if pair[0].is_floating_point()]
    return max((Deviation.between([a], [b]).relative for a, b in pairs), default=0.0)
