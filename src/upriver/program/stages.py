"""Where a chain may be cut: stages that end where a module ends and one tensor is alive.

A residual block is one stage because its input stays alive until the addition; so is a dense block.
Operations between two modules belong to the stage after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from upriver.program.graph import Node, TensorSpec
from upriver.program.trace import Call


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """A legal place for a cut: after node ``stop - 1``, at the end of module ``name``."""

    name: str
    stop: int
    live: tuple[str, ...]


def boundaries(
    calls: Sequence[Call],
    last_node: Mapping[tuple[str, int], int],
    live: Sequence[frozenset[str]],
    outputs: Sequence[str],
) -> list[Boundary]:
    """Positions at which a module ends and exactly one tensor is alive, and the end of the graph.

    Args:
        calls: Module calls in the order in which they ended.
        last_node: (path, number of the call) to the index of its last node, for calls that have nodes.
        live: What is alive at each position.
        outputs: What the whole graph gives.
    """
    ends = _ends(calls, last_node)
    found: list[Boundary] = []
    previous = 0
    for stop in sorted({end for _, _, end in ends} | {len(live) - 1}):
        last = stop == len(live) - 1
        if stop == 0 or (not last and len(live[stop]) != 1):
            continue
        inside = [call.path for call, start, end in ends if end == stop and start >= previous and call.path]
        alive = tuple(outputs) if last else tuple(live[stop])
        found.append(Boundary(name=inside[-1] if inside else "output", stop=stop, live=alive))
        previous = stop
    return found


def _ends(calls: Sequence[Call], last_node: Mapping[tuple[str, int], int]) -> list[tuple[Call, int, int]]:
    """Each call with the positions at which it starts and ends; a call without nodes ends where it starts."""
    events = sorted(
        [(call.enter, False, call) for call in calls] + [(call.exit, True, call) for call in calls],
        key=lambda e: e[0],
    )
    position = 0
    starts: dict[int, int] = {}
    ends: list[tuple[Call, int, int]] = []
    for index, leaving, call in events:
        if not leaving:
            starts[index] = position
            continue
        position = max(position, last_node.get((call.path, call.number), -1) + 1)
        ends.append((call, starts[call.enter], position))
    return ends


def peak_bytes(
    nodes: Sequence[Node],
    live: Sequence[frozenset[str]],
    specs: Mapping[str, TensorSpec],
    start: int,
    stop: int,
) -> int:
    """Most bytes of activations alive at once while nodes [start, stop) run."""
    peak = sum(specs[name].nbytes for name in live[start])
    for index in range(start, stop):
        made = {output.name for output in nodes[index].outputs if output is not None}
        peak = max(peak, sum(specs[name].nbytes for name in live[index] | made))
    return peak
