"""Prepare the nodes of a graph: look up operators and resolve arguments once, not in each run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from upriver.errors import ProgramError
from upriver.program.graph.buffer_reuse import in_place
from upriver.program.graph.operators import resolve
from upriver.program.graph.schema import Graph, Node, constants, decode_argument, reference

Numbered: TypeAlias = tuple[int, Node]
Values: TypeAlias = dict[str, torch.Tensor]
Fill: TypeAlias = Callable[[Values], Any]
"""Function that makes an argument from the values of a run."""


class ScheduledNode:
    """One node, bound to a device and to the values that are the same in each run.

    Attributes:
        done: Names of the values that are not needed after this step.
        where: The node in words, for messages.
    """

    __slots__ = (
        "_args",
        "_fill",
        "_kwargs",
        "_kwfill",
        "_names",
        "_only",
        "_operator",
        "_over",
        "_write_over",
        "done",
        "where",
    )

    def __init__(
        self,
        index: int,
        node: Node,
        fixed: Mapping[str, torch.Tensor],
        device: torch.device,
        over: str | None = None,
    ) -> None:
        """Resolve everything that does not change between runs.

        Args:
            fixed: Weights and constants.
            over: The operand that the result may overwrite, if any.

        Raises:
            ProgramError: If the operator is not allowed, or an argument has no known form.
        """
        self.where = f"node {index} ({node.op})"
        self.done: tuple[str, ...] = ()
        self._operator = resolve(node.op)
        self._over = over if over not in fixed else None
        self._write_over = in_place(node.op) if self._over is not None else None
        self._names = [output.name if output is not None else None for output in node.outputs]
        returns = self._operator._schema.returns
        alone = len(returns) == len(self._names) == 1 and str(returns[0].type) == "Tensor"
        self._only = self._names[0] if alone else None  # name of the only result
        args = [_prepare(argument, fixed, device) for argument in node.args]
        kwargs = {key: _prepare(argument, fixed, device) for key, argument in node.kwargs.items()}
        self._args = [value for value, _ in args]
        self._fill = [(place, fill) for place, (_, fill) in enumerate(args) if fill is not None]
        self._kwargs = {key: value for key, (value, _) in kwargs.items()}
        self._kwfill = [(key, fill) for key, (_, fill) in kwargs.items() if fill is not None]

    def arguments(self, values: Values) -> tuple[list[Any], dict[str, Any]]:
        """Return the operator's arguments."""
        args = self._args.copy()
        for place, fill in self._fill:
            args[place] = fill(values)
        kwargs = self._kwargs
        if self._kwfill:
            kwargs = kwargs | {key: fill(values) for key, fill in self._kwfill}
        return args, kwargs

    def call(self, values: Values) -> Sequence[torch.Tensor]:
        """Call the operator and return its results."""
        args, kwargs = self.arguments(values)
        results = self._operator(*args, **kwargs)
        return (results,) if isinstance(results, torch.Tensor) else results

    def store(self, values: Values, results: Sequence[torch.Tensor]) -> None:
        """Add results to ``values`` and drop the values that are no longer needed."""
        for name, result in zip(self._names, results, strict=True):
            if name is not None:
                values[name] = result
        for name in self.done:
            del values[name]

    def run(self, values: Values, borrowed: Container[str] = ()) -> None:
        """Call the operator and store its results.

        Args:
            borrowed: Names of values that belong to the caller, so that no operator may overwrite them.
        """
        # Inlined: calls here would slow a small operator by a fifth.
        args = self._args.copy()
        for place, fill in self._fill:
            args[place] = fill(values)
        if self._only is None or self._kwfill:
            return self.store(values, self.call(values))
        operator = self._operator
        if self._over is not None and self._over not in borrowed:
            operator = self._write_over
        values[self._only] = operator(*args, **self._kwargs)
        for name in self.done:
            del values[name]
        return None

    def refusal(self, error: Exception) -> Exception:
        """Return the error to raise for an operator's error, which names no node and may have any type.

        Data can cause such errors (a token out of range). So can a few cases that tensors without data do not
        show. An out-of-memory error is not the program's fault, and is returned unchanged.
        """
        if isinstance(error, ProgramError | MemoryError | torch.OutOfMemoryError) or "can't allocate" in str(
            error
        ):
            return error
        return ProgramError(f"{self.where}: {first_line(error)}")


def _prepare(
    argument: Any, fixed: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[Any, Fill | None]:
    """Return an argument's value if it is the same in each run, else the function that makes it."""
    name = reference(argument)
    if name is not None:
        return (fixed[name], None) if name in fixed else (None, itemgetter(name))
    if isinstance(argument, list):
        parts = [_prepare(item, fixed, device) for item in argument]
        if all(fill is None for _, fill in parts):
            return [value for value, _ in parts], None
        return None, lambda values: [value if fill is None else fill(values) for value, fill in parts]
    return decode_argument(argument, device), None


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Order in which nodes run, each with its index in the graph.

    Attributes:
        constants: Nodes that no input reaches. They run once, when a program is bound.
        kept: Names of their results that a stage reads or the program outputs.
        stages: The other nodes, stage by stage.
    """

    constants: Sequence[Numbered]
    kept: frozenset[str]
    stages: Sequence[Sequence[Numbered]]


def schedule(graph: Graph) -> Schedule:
    """Divide a graph into nodes that run once and nodes that run for each micro-batch."""
    fixed = constants(graph.inputs, graph.nodes)
    apart = fixed | {weight.name for weight in graph.weights}
    first: list[Numbered] = []
    rest: list[list[Numbered]] = []
    start = 0
    for stage in graph.stages:
        rest.append([])
        for index in range(start, stage.stop):
            node = graph.nodes[index]
            once = apart.issuperset(node.reads())
            (first if once else rest[-1]).append((index, node))
        start = stage.stop
    read = {name for nodes in rest for _, node in nodes for name in node.reads()}
    kept = fixed & (read | set(graph.stages[-1].live))
    return Schedule(constants=first, kept=kept, stages=rest)


def bind(
    nodes: Sequence[Numbered],
    fixed: Mapping[str, torch.Tensor],
    device: torch.device,
    over: Mapping[int, str] | None = None,
) -> list[ScheduledNode]:
    """Return steps for these nodes.

    ``over`` has the operands that may be overwritten (see `buffer_reuse`).
    """
    over = over or {}
    return [ScheduledNode(index, node, fixed, device, over.get(index)) for index, node in nodes]


def mark_last_uses(steps: Sequence[ScheduledNode], nodes: Sequence[Numbered], keep: Iterable[str]) -> None:
    """Mark the values that each step drops because no later step reads them. This frees memory early.

    Args:
        keep: Names that are needed afterwards, or belong to no run.
    """
    needed = set(keep)
    for step, (_, node) in zip(reversed(steps), reversed(nodes), strict=True):
        touched = {*node.reads(), *(value.name for value in node.made)}
        step.done = tuple(sorted(touched - needed))
        needed |= touched


def first_line(error: BaseException) -> str:
    """Return an error's first line, at most 200 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
