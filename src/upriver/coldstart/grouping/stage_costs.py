"""Count the work of a program's stages with the weights that they wait for."""

from __future__ import annotations

from collections.abc import Sequence

from upriver.coldstart.roofline import NOTHING, Execution
from upriver.program.graph.constants import Constants, names_read
from upriver.program.graph.operators import resolve
from upriver.program.graph.schedule import schedule
from upriver.program.graph.schema import Graph, Node, Value, Weight, constants, references

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
    plan, nbytes = schedule(graph), _sizes(graph)
    once = Constants(plan)
    found, last = dict.fromkeys(keys, NOTHING), -1
    for stage, nodes in zip(graph.stages, plan.stages, strict=True):
        names = names_read(nodes).union(stage.live)
        names |= names_read(once.before(names))
        last = max([last, *(number_of[name] for name in names if name in number_of)])
        if last >= 0:
            moved_bytes = sum(nbytes[name] for _, node in nodes for name in _moved(node))
            found[keys[last]] = found[keys[last]].plus(Execution(round(stage.flops), round(moved_bytes)))
    return found


def _sizes(graph: Graph) -> dict[str, float]:
    """Return the bytes of each value that nodes read or write, for one sample."""
    given: list[Value | Weight] = [*graph.inputs, *graph.weights]
    made = (output for node in graph.nodes for output in node.outputs if output is not None)
    same_for_all = {weight.name for weight in graph.weights} | constants(graph.inputs, graph.nodes)
    samples = max(1, graph.micro_batch)
    return {
        value.name: value.spec.touched_bytes / (1 if value.name in same_for_all else samples)
        for value in (*given, *made)
    }


def _moved(node: Node) -> list[str]:
    """Return the names of the values that a node reads and writes. A view moves none."""
    if getattr(resolve(node.op), "is_view", False) or node.op == "_unsafe_view.default":
        return []
    made = [output.name for output in node.outputs if output is not None]
    picks = node.op.partition(".")[0] in _PICKS
    return [*(made if picks else references([node.args, node.kwargs])), *made]
