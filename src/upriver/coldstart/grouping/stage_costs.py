"""Count the work of a program's stages with the weights that they wait for."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from upriver.coldstart.roofline import NOTHING, Execution
from upriver.program.graph.constants import Constants, names_read
from upriver.program.graph.operators import resolve
from upriver.program.graph.schedule import schedule
from upriver.program.graph.schema import Graph, Node, TensorSpec, Value, Weight, constants, references

_PICKS = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators that read no more of a table than they return."""


def stage_executions(graph: Graph, keys: Sequence[str]) -> dict[str, Execution]:
    """Return the work between the first use of each weight and that of the next one, for one sample.

    A stage begins when all weights that it is the first to read have arrived. So it counts with the last of
    them in file order. A stage that reads no new weight counts with the last weight before. Work before the
    first weight waits for none.
    """
    place = {key: number for number, key in enumerate(keys)}
    number_of = {weight.name: place[weight.key] for weight in graph.weights}
    plan, moved = schedule(graph), _Moved(graph)
    once = Constants(plan)
    found, last = dict.fromkeys(keys, NOTHING), -1
    for stage, nodes in zip(graph.stages, plan.stages, strict=True):
        names = names_read(nodes).union(stage.live)
        names |= names_read(once.before(names))
        last = max([last, *(number_of[name] for name in names if name in number_of)])
        if last >= 0:
            moved_bytes = sum(moved.of(node) for _, node in nodes)
            found[keys[last]] = found[keys[last]].plus(Execution(round(stage.flops), round(moved_bytes)))
    return found


class _Moved:
    """Count the bytes that nodes read and write, for one sample."""

    def __init__(self, graph: Graph) -> None:
        given: list[Value | Weight] = [*graph.inputs, *graph.weights]
        made = (output for node in graph.nodes for output in node.outputs if output is not None)
        self._specs: Mapping[str, TensorSpec] = {value.name: value.spec for value in (*given, *made)}
        self._samples = max(1, graph.micro_batch)
        weights = {weight.name for weight in graph.weights}
        self._same_for_all: Container[str] = weights | constants(graph.inputs, graph.nodes)

    def of(self, node: Node) -> float:
        """Return the bytes of one node. A view moves none."""
        if getattr(resolve(node.op), "is_view", False) or node.op == "_unsafe_view.default":
            return 0.0
        made = [output.name for output in node.outputs if output is not None]
        picks = node.op.partition(".")[0] in _PICKS
        read = made if picks else list(references([node.args, node.kwargs]))
        return sum(self._nbytes(name) for name in (*read, *made))

    def _nbytes(self, name: str) -> float:
        return self._specs[name].touched_bytes / (1 if name in self._same_for_all else self._samples)
