"""Compile the stages of a program for this process, with ``torch.compile``.

Each stage is compiled alone, so it can be timed, and the program can still be cut after it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from upriver.errors import ProgramError
from upriver.program.graph.executor import Program
from upriver.program.graph.operators import resolve
from upriver.program.graph.schedule import Numbered, Values, first_line, schedule
from upriver.program.graph.schema import decode_argument, reference


def compile_stages(program: Program, tensors: Sequence[torch.Tensor]) -> str:
    """Let a program run compiled stages from now on, if all of them compile.

    Args:
        tensors: Values that cross cut 0, for a full micro-batch.

    Returns:
        Why it stays as it is, or nothing if it is compiled.
    """
    fixed, alive = program.fixed_values, [value.name for value in program.live(0)]
    compiled: dict[int, CompiledStage] = {}
    for position, nodes in enumerate(schedule(program.graph).stages, start=1):
        kept = [value.name for value in program.live(position)]
        if nodes:
            compiled[position] = CompiledStage(nodes, alive, kept, fixed, program.device, position)
        alive = kept
    before = program.replace_stages({position: [stage] for position, stage in compiled.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own parts
            program.run(tensors, 0, program.num_stages)
    except ProgramError as error:
        program.replace_stages(before)
        return _reason(error)
    return ""


class CompiledStage:
    """A stage as one compiled function, in the place of its operators."""

    def __init__(
        self,
        nodes: Sequence[Numbered],
        given: Sequence[str],
        kept: Sequence[str],
        fixed: Mapping[str, torch.Tensor],
        device: torch.device,
        position: int,
    ) -> None:
        """Prepare the function; it is compiled by its first run.

        Args:
            given: Names of the values that cross the cut before the stage.
            kept: Names of the values that cross the cut after it.
            fixed: Weights and constants.
        """
        read = {name for _, node in nodes for name in node.reads()}
        made = {value.name for _, node in nodes for value in node.made}
        self._inputs = [name for name in given if name in read]
        self._outputs = [name for name in kept if name in made]
        self._kept = frozenset(kept)
        self._where = f"stage {position}, compiled"
        traced = _traced(nodes, self._inputs, self._outputs, fixed, device)
        self._function: Callable[..., tuple[torch.Tensor, ...]] = torch.compile(
            traced, fullgraph=True, dynamic=False
        )

    def run(self, values: Values, borrowed: Container[str] = ()) -> None:
        """Run the stage, store its results, and drop the values that no later stage reads."""
        results = self._function(*[values[name] for name in self._inputs])
        values.update(zip(self._outputs, results, strict=True))
        for name in values.keys() - self._kept:
            del values[name]

    def refusal(self, error: Exception) -> Exception:
        """Return the error to raise for one of the function."""
        return ProgramError(f"{self._where}: {first_line(error)}")


def _traced(
    nodes: Sequence[Numbered],
    inputs: Sequence[str],
    outputs: Sequence[str],
    fixed: Mapping[str, torch.Tensor],
    device: torch.device,
) -> fx.GraphModule:
    """Return nodes as a module, with the weights and constants that they read as its buffers."""
    graph, root = fx.Graph(), nn.Module()
    known: dict[str, Any] = {name: graph.placeholder(f"given_{at}") for at, name in enumerate(inputs)}

    def value(argument: Any) -> Any:
        name = reference(argument)
        if name is None:
            if isinstance(argument, list):
                return [value(item) for item in argument]
            return decode_argument(argument, device)
        if name not in known:
            place = f"fixed_{len(known)}"
            root.register_buffer(place, fixed[name])
            known[name] = graph.get_attr(place)
        return known[name]

    for _, node in nodes:
        kwargs = {key: value(argument) for key, argument in node.kwargs.items()}
        result = graph.call_function(resolve(node.op), tuple(map(value, node.args)), kwargs)
        several = len(node.outputs) > 1 or str(resolve(node.op)._schema.returns[0].type) != "Tensor"
        for number, output in enumerate(node.outputs):
            if output is not None:
                part = graph.call_function(operator.getitem, (result, number)) if several else result
                known[output.name] = part
    graph.output(tuple(known[name] for name in outputs))
    return fx.GraphModule(root, graph)


def _reason(error: BaseException) -> str:
    """Return the first line of the error that a failed compilation began with."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return first_line(error)
