"""Find the first operator that another side computes with other bits, and how its difference grows.

Both sides run a program stage after stage. A stage's *own* difference is the one from equal inputs: those of
this side. Its *accumulated* difference is the one from each side's own results so far, as at a cut after the
stage. The first stage with an own difference is also the first with an accumulated one: before it, all inputs
are equal. That stage is run again operator by operator.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from upriver.errors import Overloaded, ProtocolError
from upriver.program.graph.alignment import as_shipped
from upriver.program.graph.constants import Constants, names_read
from upriver.program.graph.executor import Program
from upriver.program.graph.schedule import Numbered, schedule
from upriver.program.graph.schema import DTYPES, TensorSpec
from upriver.protocol import RunRequest
from upriver.rpc.client import ServerClient
from upriver.rpc.server_verification import MEASURE_S, bring, only
from upriver.rpc.tolerance import Deviation, Tolerance, difference
from upriver.types import MicroBatch

RunStages: TypeAlias = Callable[[Program, Sequence[torch.Tensor], int, int], Sequence[torch.Tensor]]
"""Run stages [start, stop) of a program on the other side."""

OnStage: TypeAlias = Callable[[str, int, int], object]
"""Called before each stage with its name, the number of finished stages, and the number of stages."""

LEAST_PAUSE_S = 0.1
"""Shortest pause before a busy server is asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDiff:
    """One stage on both sides.

    Attributes:
        cut: Position after the stage.
        name: Name of the stage; an operator's is ``MODULE: OPERATOR``.
        kind: Class of the module.
        operators: Its operators, in order.
        constants: Operators whose results it reads although they depend on no input. Each side computes these
            once, and they may be the cause of a difference.
        reads: Tensors from before the stage that its operators read, weights included.
        gives: Its results that are read after it.
        own: Difference of these results from equal inputs.
        accumulated: Difference of all that crosses the cut, from each side's own results.
    """

    cut: int
    name: str
    kind: str
    operators: tuple[str, ...]
    constants: tuple[str, ...]
    reads: tuple[TensorSpec, ...]
    gives: tuple[TensorSpec, ...]
    own: Deviation
    accumulated: Deviation


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramDiff:
    """A whole program on both sides.

    Attributes:
        stages: All stages, in order.
        operators: Operators of the first stage with a difference, up to the first operator with one. Empty
            if no stage has one.
        answer: Difference of the results of one whole run, as a job's canary compares them.
        excess: How that difference exceeds the tolerance of ``exact="numeric"``; empty if it does not.
    """

    stages: tuple[StageDiff, ...]
    operators: tuple[StageDiff, ...]
    answer: Deviation
    excess: str

    @property
    def equal(self) -> bool:
        """Return whether both sides give the same bits, in each stage and in one whole run."""
        return self.answer.equal and self.first_stage is None

    @property
    def first_stage(self) -> StageDiff | None:
        """The first stage that gives other bits from equal inputs."""
        return _first(self.stages)

    @property
    def first_operator(self) -> StageDiff | None:
        """The first operator that gives other bits from equal inputs."""
        return _first(self.operators)


def diff_program(
    program: Program,
    inputs: Sequence[torch.Tensor],
    run: RunStages,
    *,
    allowed: Tolerance,
    by_operators: Callable[[], Program],
    on_stage: OnStage,
) -> ProgramDiff:
    """Run a program on this side and on another one, and compare.

    Args:
        inputs: Tensors of one micro-batch.
        run: Runs stages on the other side.
        allowed: Tolerance for the answer.
        by_operators: Returns the same program with a stage for each operator. Called if a stage differs.

    Raises:
        UpriverError: If a side cannot run it.
    """
    stages = tuple(compare_stages(program, inputs, run, on_stage=on_stage))
    first = _first(stages)
    operators: Sequence[StageDiff] = ()
    if first is not None:
        operators = _operators(program, first.cut, by_operators(), inputs, run, on_stage)
    ours = program.run(as_shipped(inputs), 0, program.num_stages)
    theirs = run(program, inputs, 0, program.num_stages)
    return ProgramDiff(
        stages=stages,
        operators=tuple(operators),
        answer=Deviation.between(ours, theirs),
        excess=difference(ours, theirs, allowed),
    )


def compare_stages(
    program: Program,
    ours: Sequence[torch.Tensor],
    run: RunStages,
    *,
    start: int = 0,
    stop: int | None = None,
    on_stage: OnStage,
) -> Iterator[StageDiff]:
    """Yield stages [start, stop) of a program on both sides.

    Args:
        ours: Tensors at ``start``.
        stop: None for the program's end.
    """
    stop = program.num_stages if stop is None else stop
    describe = _Describer(program)
    apart: Sequence[torch.Tensor] | None = None  # the other side's results so far, if they differ
    for position in range(start, stop):
        on_stage(program.stages[position].name, position - start, stop - start)
        # Both sides compute from copies with equal strides and alignment, which decide low bits.
        given = as_shipped(ours)
        ours, theirs = program.run(given, position, position + 1), run(program, given, position, position + 1)
        made = describe.made(position)
        own = Deviation.between([ours[each] for each in made], [theirs[each] for each in made])
        if apart is not None:
            theirs = run(program, apart, position, position + 1)
        accumulated = Deviation.between(ours, theirs)
        apart = None if accumulated.equal else theirs
        yield describe(position, own, accumulated)


def server_run(server: ServerClient, process: str | None) -> RunStages:
    """Return a function that runs stages on a server, to which it sends programs that the server lacks.

    Args:
        process: The server process that must answer; None accepts any.
    """
    known = set[str]()

    def run(
        program: Program, tensors: Sequence[torch.Tensor], start: int, stop: int
    ) -> tuple[torch.Tensor, ...]:
        if program.digest not in known:
            bring(server, program)
            known.add(program.digest)
        until = time.monotonic() + MEASURE_S
        while True:
            try:
                return _asked(server, process, program, tensors, start, stop)
            except Overloaded as error:
                pause_s = max(error.retry_after_s, LEAST_PAUSE_S)
                if time.monotonic() + pause_s > until:
                    raise
                time.sleep(pause_s)

    return run


def _asked(
    server: ServerClient,
    process: str | None,
    program: Program,
    tensors: Sequence[torch.Tensor],
    start: int,
    stop: int,
) -> tuple[torch.Tensor, ...]:
    """Send one request, and return the tensors of its answer.

    Raises:
        ProtocolError: If the answer has another form than the program's.
    """
    ids = tuple(range(program.micro_batch))
    request = RunRequest(
        micro_batches=(ids,),
        start=start,
        stop=stop,
        micro_batch=program.micro_batch,
        program=program.digest,
    )
    sent = MicroBatch(ids=ids, position=start, tensors=tuple(tensor.cpu() for tensor in tensors))
    batch, _ = only(server.run(request, [sent], process=process), MEASURE_S, url=server.url)
    got = [(tensor.dtype, tuple(tensor.shape)) for tensor in batch.tensors]
    if got != [(DTYPES[value.spec.dtype], tuple(value.spec.shape)) for value in program.live(stop)]:
        raise ProtocolError(f"{server.url}: its answer at cut {stop} is not of the form of the program's")
    return tuple(batch.tensors)


def _operators(
    program: Program,
    cut: int,
    finer: Program,
    inputs: Sequence[torch.Tensor],
    run: RunStages,
    on_stage: OnStage,
) -> list[StageDiff]:
    """Return the operators of the stage before ``cut``, up to the first that gives other bits."""
    ends = [stage.stop for stage in finer.stages]
    # A cut may lie behind operators that make constants, of which the finer program needs no stage.
    start, stop = (bisect_right(ends, _node(program, position)) for position in (cut - 1, cut))
    ours = finer.run(as_shipped(inputs), 0, start)
    found = []
    for operator in compare_stages(finer, ours, run, start=start, stop=stop, on_stage=on_stage):
        found.append(operator)
        if not operator.own.equal:
            break
    return found


def _first(stages: Sequence[StageDiff]) -> StageDiff | None:
    return next((stage for stage in stages if not stage.own.equal), None)


def _node(program: Program, position: int) -> int:
    """Return the number of nodes before a position."""
    return program.stages[position - 1].stop if position else 0


class _Describer:
    """Describe the stages of a program from its graph."""

    def __init__(self, program: Program) -> None:
        graph = program.graph
        self._program, self._plan = program, schedule(graph)
        self._constants = Constants(self._plan)
        self._specs = {value.name: value.spec for node in graph.nodes for value in node.made}
        self._specs |= {value.name: value.spec for value in graph.inputs}
        self._specs |= {weight.name: weight.spec for weight in graph.weights}

    def __call__(self, position: int, own: Deviation, accumulated: Deviation) -> StageDiff:
        stage, nodes = self._program.stages[position], self._plan.stages[position]
        live = self._program.live(position + 1)
        return StageDiff(
            cut=position + 1,
            name=stage.name,
            kind=stage.kind,
            operators=_names(nodes),
            constants=_names(self._constants.before(names_read(nodes))),
            reads=tuple(self._specs[name] for name in self._reads(nodes)),
            gives=tuple(live[each].spec for each in self.made(position)),
            own=own,
            accumulated=accumulated,
        )

    def made(self, position: int) -> list[int]:
        """Return the indices of a stage's own results among the tensors that cross the cut after it."""
        made = _made(self._plan.stages[position])
        live = self._program.live(position + 1)
        return [each for each, value in enumerate(live) if value.name in made]

    def _reads(self, nodes: Sequence[Numbered]) -> list[str]:
        made = _made(nodes)
        read = dict.fromkeys(name for _, node in nodes for name in node.reads())
        return [name for name in read if name not in made]


def _made(nodes: Sequence[Numbered]) -> set[str]:
    return {value.name for _, node in nodes for value in node.made}


def _names(nodes: Sequence[Numbered]) -> tuple[str, ...]:
    return tuple(node.op for _, node in nodes)
