"""List every cut of a model with its costs, and the reason where a cut is not legal.

Unlike a program, a survey also covers models with operators that no program may hold. Cut ``c`` is legal if
no such operator lies before it. If only a part of the model can be captured, the survey covers that part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from upriver.errors import CaptureError, ConfigError
from upriver.program.capture.lowering import Recording, record
from upriver.program.capture.prefix import weights_read
from upriver.program.example_inputs import Example, Inputs, TensorSource
from upriver.program.graph.liveness import Boundary, Granularity, boundaries, progress
from upriver.program.graph.schema import TensorSpec
from upriver.program.split.freeze_point import FreezePoint, find
from upriver.program.split.module_trace import Shape, trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One row: a place at which a model may be cut.

    Attributes:
        cut: Number of the cut. Cut 0 lies before the first operator.
        bytes_per_sample: Bytes of the tensors that cross it, per sample.
        param_bytes_before: Bytes of the weights that are read before it, each once.
        flops_before: Floating-point operations before it, per sample.
    """

    cut: int
    after: str
    bytes_per_sample: float
    tensors: int
    param_bytes_before: int
    flops_before: float
    legal: bool = True
    why_not: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """All cuts of a model.

    Attributes:
        captured_by: Capture method, and how far it got, in words.
        why: Reason why the capture ended early. Empty if the whole model could be captured.
    """

    rows: tuple[Cut, ...]
    captured_by: str
    why: str = ""


def survey(
    model: nn.Module,
    example: Inputs,
    *,
    granularity: Granularity = "module",
    freeze_to: str | None = None,
    autocast: torch.dtype | None = None,
) -> Survey:
    """List every cut of a model in eval. Leave the model unchanged.

    A survey does not find operators that mix samples. Only a proof does.

    Args:
        example: Inputs of the model, with as many samples as a micro-batch holds.
        freeze_to: The last frozen module. The operators that it needs come first, and no cut after it is
            legal.

    Raises:
        ConfigError: If the model does not call ``freeze_to``.
        ModelError: If the model cannot be called with such inputs.
    """
    given = Example.of(example)
    first = answers_of(model, given, freeze_to, autocast) if freeze_to is not None else []
    try:
        recording = record(model, given, first=first, autocast=autocast)
    except CaptureError as error:
        return _in_part(model, given, granularity, freeze_to, first, autocast, str(error))
    rows = _rows(recording, granularity, freeze_to)
    return Survey(rows=tuple(rows), captured_by="torch.export")


def answers_of(
    model: nn.Module, example: Inputs, path: str, autocast: torch.dtype | None = None
) -> list[TensorSource]:
    """Return the tensors that the last call of a module returns.

    Raises:
        ConfigError: If the module is not called, or returns no tensor.
        ModelError: If the model cannot be called with such inputs.
    """
    try:
        calls = trace(model, Example.of(example), autocast=autocast).of(path)
    except CaptureError:
        return [TensorSource(path=path)]  # the capture will report the error
    sources = calls[-1].sources() if calls else []
    if not sources:
        raise ConfigError(
            f"module {path!r} is not called, or gives no tensor; it cannot be the last frozen one"
        )
    return sources


# -------------------------------------------------------------------------------------------- rows


def _rows(recording: Recording, granularity: Granularity, freeze_to: str | None) -> list[Cut]:
    chain, samples = recording.chain, recording.micro_batch
    cuts = boundaries(chain, granularity=granularity, also=(recording.first,) if freeze_to else ())
    rows = [_input_row(sum(value.spec.nbytes for value in chain.inputs), len(chain.inputs), samples)]
    trouble, run = _Trouble.of(recording), progress(chain)
    read: dict[str, int] = {}
    start, flops = 0, 0.0
    for number, cut in enumerate(cuts, start=1):
        read |= weights_read(recording, start, cut.stop)
        flops += sum(recording.flops[start : cut.stop])
        start = cut.stop
        late = freeze_to is not None and run[cut.stop] > run[recording.first]
        why_not = trouble.before(cut) or (f"lies after the freeze point {freeze_to!r}" if late else "")
        rows.append(
            Cut(
                cut=number,
                after=cut.name,
                bytes_per_sample=sum(recording.sizes[value] for value in cut.live) / samples,
                tensors=len(cut.live),
                param_bytes_before=sum(read.values()),
                flops_before=flops / samples,
                legal=not why_not,
                why_not=why_not,
            )
        )
    return rows


def _input_row(nbytes: int, tensors: int, samples: int) -> Cut:
    return Cut(
        cut=0,
        after="input",
        bytes_per_sample=nbytes / samples,
        tensors=tensors,
        param_bytes_before=0,
        flops_before=0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trouble:
    """First operator that no program may hold.

    Attributes:
        index: Index of its node. One past the last node if there is none.
        again: Index of the last node of the module whose state it changes. -1 if it changes none.
    """

    index: int
    why_not: str = ""
    again: int = -1

    @classmethod
    def of(cls, recording: Recording) -> _Trouble:
        if not recording.problems:
            return cls(index=len(recording.chain.nodes))
        index = min(recording.problems)
        module = recording.mutated.get(index)
        inside = (
            number
            for number, place in enumerate(recording.chain.places)
            if any(path == module for _, path in place)
        )
        return cls(index=index, why_not=recording.problems[index], again=max(inside, default=-1))

    def before(self, cut: Boundary) -> str:
        """Return why the part before a cut cannot be a program. Empty if it can."""
        if self.index >= cut.stop:
            return ""
        both = ", and that module is called on both sides" if self.again >= cut.stop else ""
        return self.why_not + both


# ------------------------------------------------------------------------------------ part of a model


def _in_part(
    model: nn.Module,
    example: Example,
    granularity: Granularity,
    freeze_to: str | None,
    first: Sequence[TensorSource],
    autocast: torch.dtype | None,
    why: str,
) -> Survey:
    """Survey the part that can be captured, and add the model's result with the reason."""
    point, answer = _reachable(model, example, autocast)
    outputs = [ship.source for ship in point.ships]
    orders: list[Sequence[TensorSource]] = [first, ()] if first else [()]
    for chained in orders if outputs else ():
        try:
            recording = record(model, example, outputs=outputs, first=chained, autocast=autocast)
        except CaptureError:
            continue  # the freeze point lies after that part
        rows = _rows(recording, granularity, freeze_to if chained else None)
        rows[-1] = replace(rows[-1], after=point.name)
        last = _answer_row(model, rows[-1], answer, why)
        return Survey(rows=(*rows, last), captured_by=f"torch.export, up to {point.name!r}", why=why)
    nbytes = sum(TensorSpec.of(tensor).nbytes for tensor in example.tensors)
    row = _input_row(nbytes, len(example.tensors), example.samples)
    return Survey(rows=(row, _answer_row(model, row, answer, why)), captured_by="nothing", why=why)


def _reachable(
    model: nn.Module, example: Example, autocast: torch.dtype | None
) -> tuple[FreezePoint, Sequence[Shape]]:
    """Return the end of the part before any branch on data, and the tensors of the model's result."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in flags:
            parameter.requires_grad_(False)
        calls = trace(model, example, autocast=autocast)
        answer = [leaf for leaf in calls.whole.leaves if isinstance(leaf, Shape)]
        return find(model, calls, before_branches=True), answer
    except CaptureError as error:
        return FreezePoint(why_not=str(error)), ()
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def _answer_row(model: nn.Module, before: Cut, answer: Sequence[Shape], why: str) -> Cut:
    parameters = {id(tensor): tensor.nbytes for tensor in model.parameters()}
    return replace(
        before,
        cut=before.cut + 1,
        after="output",
        bytes_per_sample=float(sum(math.prod(shape.at(1)) * shape.dtype.itemsize for shape in answer)),
        tensors=len(answer),
        param_bytes_before=sum(parameters.values()),
        legal=False,
        why_not=why,
    )
