"""What no input has a part in: a position table, a causal mask, a cast of a weight. Computed once.

That is when a program is made, if its weights are there. Where they still arrive it is when something first
reads it, and no more is computed, and no other weight read, than that takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from upriver.program.graph.schedule import Numbered, Schedule, Values, bind, schedule
from upriver.program.graph.schema import Graph, Node, references


class Constants:
    """The nodes that run once, and what came of those that have.

    Args:
        plan: The graph's.

    Attributes:
        values: By name; what nothing will read any more is dropped.
    """

    def __init__(self, plan: Schedule) -> None:
        self.values: Values = {}
        self._left = dict(plan.constants)
        self._maker = {name: index for index, node in plan.constants for name in _made(node)}
        self._readers = Counter(name for numbered in plan.constants for name in names_read([numbered]))
        self._kept = plan.kept

    def before(self, names: Iterable[str]) -> list[Numbered]:
        """What has to be computed before any of these is read, in the order in which it has to be."""
        found: dict[int, Node] = {}
        asked = list(names)
        while asked:
            index = self._maker.get(asked.pop(), -1)
            if index in self._left and index not in found:
                found[index] = self._left[index]
                asked += names_read([(index, found[index])])
        return sorted(found.items())

    def compute(
        self, nodes: Sequence[Numbered], weights: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        """Run some of the nodes.

        Args:
            nodes: In their order, each behind those that make what it reads.
            weights: By name, those at least that they read.

        Raises:
            ProgramError: If an operator refuses what it is given.
        """
        for step, (index, node) in zip(bind(nodes, weights, device), nodes, strict=True):
            try:
                step.run(self.values)
            except Exception as error:
                raise step.refusal(error) from error
            del self._left[index]
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Let go of what only nodes that have run, this one being the last of them, had use for."""
        read = names_read([(0, node)])
        self._readers.subtract(read)
        for name in read.union(_made(node)) - self._kept:
            if not self._readers[name]:
                self.values.pop(name, None)


def names_read(nodes: Iterable[Numbered]) -> set[str]:
    """Names of all that some nodes read: inputs, weights, and what other nodes make."""
    return {name for _, node in nodes for name in references([node.args, node.kwargs])}


def keys_read(graph: Graph, stop: int, *, start: int = 0) -> frozenset[str]:
    """Keys of the weights that stages [start, stop) read, also by way of what is computed once."""
    plan = schedule(graph)
    names = names_read(numbered for nodes in plan.stages[start:stop] for numbered in nodes)
    names.update(name for stage in graph.stages[start:stop] for name in stage.live)
    names |= names_read(Constants(plan).before(names))
    return frozenset(weight.key for weight in graph.weights if weight.name in names)


def _made(node: Node) -> list[str]:
    return [output.name for output in node.outputs if output is not None]
