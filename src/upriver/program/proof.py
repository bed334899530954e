"""Proof before use: prefix + tail against the whole model, to the bit, before a job starts.

Outputs and the gradients of every trainable parameter are compared with ``torch.equal`` on random inputs of
one micro-batch; the prefix is compared stage by stage as it runs (a run keeps nothing but what crosses each
cut, so a right answer proves every cut). Then other rows are changed: a row whose features move with its
neighbours shows a model that mixes samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from upriver.errors import CaptureError
from upriver.program.capture import tensors_in
from upriver.program.freeze import keep_in_eval
from upriver.program.program import Program
from upriver.program.tail import Tail
from upriver.program.trace import no_fast_path


def prove(
    model: nn.Module, program: Program, tail: Tail, units: list[str], *, inputs: int = 2, seed: int = 0
) -> None:
    """Compare the split model with the whole one.

    Args:
        units: The model's frozen units; they run in eval.
        inputs: How many random micro-batches to compare.

    Raises:
        CaptureError: Naming what differed; the job then runs unsplit.
    """
    generator = torch.Generator().manual_seed(seed)
    first = _random_input(program, generator)
    for number in range(inputs):
        given = first if number == 0 else _random_input(program, generator)
        features = program.run((given,), 0, program.num_stages)
        _same_answers(model, tail, units, given, features[0])
    _rows_are_independent(program, first, generator)


def _random_input(program: Program, generator: torch.Generator) -> torch.Tensor:
    spec = program.graph.inputs[0].spec
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype).to(program.device)
    return torch.randint(0, 100, spec.shape, generator=generator).to(dtype).to(program.device)


def _same_answers(
    model: nn.Module, tail: Tail, units: list[str], given: torch.Tensor, features: torch.Tensor
) -> None:
    with buffers_kept(model), no_fast_path():
        whole, whole_gradients = _answer(model, model, units, given)
    with buffers_kept(model), no_fast_path():
        try:
            split, split_gradients = _answer(model, tail, units, features)
        except Exception as error:  # the user's forward, on a model of which a part is missing
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CaptureError(f"the model cut after {tail.boundary!r} does not run: {reason}") from error
    if len(whole) != len(split) or not all(_equal(a, b) for a, b in zip(whole, split, strict=True)):
        raise CaptureError(f"the model cut after {tail.boundary!r} gives another answer than the whole one")
    for name, gradient in whole_gradients.items():
        other = split_gradients[name]
        if (gradient is None) != (other is None) or (gradient is not None and not _equal(gradient, other)):
            raise CaptureError(f"the model cut after {tail.boundary!r} gives another gradient of {name!r}")


def _equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    # NaN equals NaN here: a network that gives one whole must give it when split, too.
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0))
    )


def _answer(
    model: nn.Module, run: nn.Module, units: list[str], given: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    keep_in_eval(model, units)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    devices = [given.device] if given.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(0)
        answers = [t for t in tensors_in(run(given)) if t.requires_grad]
        # Squares, so that a gradient depends on the values; scaled, so that it stays finite in half
        # precision.
        loss = sum((t.float() / 16).square().mean() for t in answers if t.is_floating_point())
        if not isinstance(loss, torch.Tensor):
            raise CaptureError("the model's answer does not depend on its trainable parameters")
        gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return [t.detach() for t in answers], dict(zip(trainable, gradients, strict=True))


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Leave running statistics as they were."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if not torch.equal(buffer, before[name]):
                    buffer.copy_(before[name])


def _rows_are_independent(program: Program, given: torch.Tensor, generator: torch.Generator) -> None:
    """Change every row but the first half: the features of that half must not move."""
    if program.micro_batch == 1:
        return
    kept = program.micro_batch // 2
    changed = given.clone()
    changed[kept:] = _random_input(program, generator)[kept:]
    padded = given.clone()
    padded[kept:] = 0
    reference = program.run((given,), 0, program.num_stages)[0]
    for other in (changed, padded):
        features: Any = program.run((other,), 0, program.num_stages)[0]
        if features.shape[0] != program.micro_batch:
            raise CaptureError("the features do not have the samples in their first dimension")
        if not torch.equal(features[:kept], reference[:kept]):
            raise CaptureError(
                "samples influence each other in the frozen part: the answer for one row depends on others"
            )
