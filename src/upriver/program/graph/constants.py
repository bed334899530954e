"""Compute constants once: the values that no input reaches.

Examples are a position table, a causal mask, and a cast of a weight. If all weights are in memory, constants
are computed when a program is made. If weights are still loading, a constant is computed at its first read.
Then no other constant is computed, and no other weight read, than that read needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from upriver.program.graph.schedule import Numbered, Schedule, Values, bind, schedule
from upriver.program.graph.schema import Graph, Node


class Constants:
    """Nodes that run once, and the results of those that have run.

    Attributes:
        values: Results by name. A result that no node will read is dropped.
    """

    def __init__(self, plan: Schedule) -> None:
        self.values: Values = {}
        self._left = dict(plan.constants)
        self._maker = {value.name: index for index, node in plan.constants for value in node.made}
        self._readers = Counter(name for numbered in plan.constants for name in names_read([numbered]))
        self._kept = plan.kept

    def before(self, names: Iterable[str]) -> list[Numbered]:
        """Return the nodes to run before any of these names is read, in order."""
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
            nodes: In order, each after the nodes that it reads from.
            weights: By name. Must include those that the nodes read.

        Raises:
            ProgramError: If an operator refuses its arguments.
        """
        for step, (index, node) in zip(bind(nodes, weights, device), nodes, strict=True):
            try:
                step.run(self.values)
            except Exception as error:
                raise step.refusal(error) from error
            del self._left[index]
            self._drop(node)

    def _drop(self, node: Node) -> None:
        """Drop the values that no remaining node reads after this one."""
        read = names_read([(0, node)])
        self._readers.subtract(read)
        for name in read.union(value.name for value in node.made) - self._kept:
            if not self._readers[name]:
                self.values.pop(name, None)


def names_read(nodes: Iterable[Numbered]) -> set[str]:
    """Return names of all values that some nodes read: inputs, weights, and results of other nodes."""
    return {name for _, node in nodes for name in node.reads()}


def keys_read(graph: Graph, stop: int, *, start: int = 0) -> frozenset[str]:
    """Return keys of the weights that stages [start, stop) read, directly or through constants."""
    plan = schedule(graph)
    names = names_read(numbered for nodes in plan.stages[start:stop] for numbered in nodes)
    names.update(name for stage in graph.stages[start:stop] for name in stage.live)
    names |= names_read(Constants(plan).before(names))
    return frozenset(weight.key for weight in graph.weights if weight.name in names)
