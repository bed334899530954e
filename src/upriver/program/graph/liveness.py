"""Find the positions at which a chain of operators may be cut, and the values alive there.

Any position can be cut: every tensor made before it and read after it crosses. A *stage* ends at a cut worth
offering: a module ends there, and the tensors alive share no computation. A residual block is one stage,
because its input stays alive until the addition. A dense block is one stage too. Two parallel towers do not
block each other's cuts. Operators of negligible cost (masks, reshapes) do not count as computation. A tensor
that they make from the inputs is a *side tensor*: it crosses, but does not block a cut. Operations between
two modules belong to the stage after them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

from upriver.program.graph.schema import Lifetimes, Node, Value, constants

Granularity: TypeAlias = Literal["op", "module", "end"]
"""Stages end with operators, with modules, or only at the end."""

GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
"""All granularities, the one with the most cuts first."""

FEW = 5
"""Below this number of stages a planner has few choices, so more tensors may cross a cut."""

MANY = 64
"""No stage ends where more tensors than this are alive. Such a cut is useless. Listing the names at every
position of a long chain would take time and memory quadratic in its length."""

Place: TypeAlias = "tuple[tuple[str, str], ...]"
"""Module calls around an operator, outermost first, each as (name of the call, path of the module)."""

_HEAVY_PARTS = ("conv", "norm", "linear", "attention", "embedding", "einsum", "lstm", "gru", "rnn")
_HEAVY_NAMES = frozenset(
    {"matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "inner", "tensordot"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Operators in the order in which they run.

    Attributes:
        places: For each operator, the module calls that it ran in.
        outputs: Names of the chain's outputs.
        weights: Names of the values read from the weights file.
    """

    inputs: Sequence[Value]
    nodes: Sequence[Node]
    places: Sequence[Place]
    outputs: Sequence[str]
    weights: Collection[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """Position of a cut: after node ``stop - 1``, named after the module or operator that ends there."""

    name: str
    stop: int
    live: tuple[str, ...]


def is_heavy(op: str) -> bool:
    """Return whether an operator is a convolution, matrix product, attention, embedding, RNN or norm."""
    name = op.partition(".")[0]
    return name in _HEAVY_NAMES or any(part in name for part in _HEAVY_PARTS)


def boundaries(
    chain: Chain, *, granularity: Granularity = "module", also: Collection[int] = ()
) -> list[Boundary]:
    """Return the stage ends of a chain, always including its end, in time linear in its length.

    Args:
        also: Positions at which a stage ends regardless of the values alive there.
    """
    lifetimes, fixed = lifetimes_of(chain)
    crossing = _running_total(chain, lifetimes, dict.fromkeys(lifetimes.stretch, 1))
    narrow = [tensors <= MANY for tensors in crossing]
    stops = _distinct(_stops(chain, granularity, also, fixed, narrow), progress(chain, fixed))
    live = live_at(lifetimes, stops[:-1])
    alive = [*(live[stop] for stop in stops[:-1]), tuple(chain.outputs)]
    names = _names(chain, stops, granularity)
    return [
        Boundary(name=name, stop=stop, live=names_alive)
        for name, stop, names_alive in zip(names, stops, alive, strict=True)
    ]


def lifetimes_of(chain: Chain) -> tuple[Lifetimes, frozenset[str]]:
    """Return the lifetimes of all values, and the constants, which are never alive."""
    fixed = constants(chain.inputs, chain.nodes)
    return Lifetimes(chain.inputs, chain.nodes, chain.outputs, fixed | set(chain.weights)), fixed


def live_at(lifetimes: Lifetimes, positions: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Return names alive at some positions, in the order in which they were made."""
    wanted = set(positions)
    return {position: tuple(alive) for position, alive in lifetimes.walk() if position in wanted}


def _stops(
    chain: Chain,
    granularity: Granularity,
    also: Collection[int],
    fixed: frozenset[str],
    narrow: Sequence[bool],
) -> list[int]:
    end = len(chain.nodes)
    forced = {*also, end}
    if granularity == "end":
        return sorted(forced)
    if granularity == "op":
        return sorted({stop for stop in range(1, end) if narrow[stop]} | forced)
    ends = {last + 1 for _, last in _spans(chain.places).values() if narrow[last + 1]}
    apart = separable(chain, fixed)
    chosen = {stop for stop in ends if apart[stop]} | forced
    return sorted(chosen if len(chosen) >= FEW else ends | forced)


def _running_total(chain: Chain, lifetimes: Lifetimes, weights: Mapping[str, int]) -> list[int]:
    """Return, for each position, the sum of `weights` over the values alive there."""
    change = [0] * (len(chain.nodes) + 2)
    for name, (first, last) in lifetimes.stretch.items():
        change[first] += weights[name]
        change[last + 1] -= weights[name]
    return list(accumulate(change))[:-1]


def progress(chain: Chain, fixed: frozenset[str] | None = None) -> list[int]:
    """Return the number of operators before each position, without those that make constants."""
    fixed = constants(chain.inputs, chain.nodes) if fixed is None else fixed
    return list(accumulate((not fixed.issuperset(_made(node)) for node in chain.nodes), initial=0))


def _distinct(stops: Sequence[int], busy: Sequence[int]) -> list[int]:
    """Drop stages that only compute constants: a cut after one would equal the cut before it."""
    kept: list[int] = []
    for stop in stops[:-1]:
        if busy[stop] > (busy[kept[-1]] if kept else 0):
            kept.append(stop)
    if kept and busy[kept[-1]] == busy[stops[-1]]:
        kept.pop()
    return [*kept, stops[-1]]


def _spans(places: Sequence[Place]) -> dict[str, tuple[int, int]]:
    """Return the first and last node of each module call."""
    spans: dict[str, tuple[int, int]] = {}
    for index, place in enumerate(places):
        for call, _ in place:
            spans[call] = (spans[call][0] if call in spans else index, index)
    return spans


def _names(chain: Chain, stops: Sequence[int], granularity: Granularity) -> list[str]:
    spans = _spans(chain.places)
    names: list[str] = []
    previous = 0
    for stop in stops:
        place = chain.places[stop - 1] if stop else ()
        if granularity == "op":
            names.append(_operator_name(place, chain.nodes[stop - 1]) if stop else "output")
        else:
            ending = [(call, path) for call, path in place if spans[call][1] == stop - 1]
            inside = [path for call, path in ending if spans[call][0] >= previous]
            names.append(inside[0] if inside else ending[-1][1] if ending else "output")
        previous = stop
    return names


def _operator_name(place: Place, node: Node) -> str:
    operator = node.op.partition(".")[0]
    return f"{place[-1][1]}: {operator}" if place else operator


def _made(node: Node) -> list[str]:
    return [value.name for value in node.made]


# ------------------------------------------------------------------------------ shared computation


class _Components:
    """Track the connected components of the computation, and the number of values alive in each."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._alive: list[int] = []
        self.crowded = 0

    def new(self) -> int:
        self._parent.append(len(self._parent))
        self._alive.append(0)
        return len(self._parent) - 1

    def find(self, piece: int) -> int:
        while self._parent[piece] != piece:
            self._parent[piece] = self._parent[self._parent[piece]]
            piece = self._parent[piece]
        return piece

    def join(self, pieces: Sequence[int]) -> int:
        first, *rest = {self.find(piece) for piece in pieces}
        for other in rest:
            alive = self._alive[other]
            self.count(other, -alive)
            self.count(first, alive)
            self._parent[other] = first
        return first

    def count(self, piece: int, change: int) -> None:
        root = self.find(piece)
        self.crowded -= self._alive[root] > 1
        self._alive[root] += change
        self.crowded += self._alive[root] > 1


def separable(chain: Chain, fixed: frozenset[str]) -> list[bool]:
    """Return, for each position, whether all tensors read after it come from separate components.

    Side tensors, which only light operators made from the inputs, belong to no component. A finished output
    does not count either, though it crosses every cut up to the end.
    """
    components = _Components()
    piece_of: dict[str, int] = {}
    last = {name: index for index, node in enumerate(chain.nodes) for name in node.reads()}
    apart = [True]
    for index, node in enumerate(chain.nodes):
        piece = _piece(components, piece_of, node, fixed)
        if piece is not None:
            piece_of |= dict.fromkeys(_made(node), piece)
        for name in _made(node):
            if name in last and name in piece_of:
                components.count(piece_of[name], 1)
        for name in set(node.reads()):
            if last[name] == index and name in piece_of:
                components.count(piece_of[name], -1)
        apart.append(components.crowded == 0)
    return apart


def _piece(
    components: _Components, piece_of: Mapping[str, int], node: Node, fixed: frozenset[str]
) -> int | None:
    """Join the components of all values an operator reads, and return the result. None if it has none."""
    if all(name in fixed for name in _made(node)):
        return None
    pieces = [piece_of[name] for name in node.reads() if name in piece_of]
    if pieces:
        return components.join(pieces)
    return components.new() if is_heavy(node.op) else None


# ------------------------------------------------------------------------------------------- bytes


class ActivationMemory:
    """Bytes of activations alive at each position, and while each operator runs."""

    def __init__(self, chain: Chain, sizes: Mapping[str, int]) -> None:
        """Add up the bytes once.

        Args:
            sizes: Bytes of each value.
        """
        lifetimes, fixed = lifetimes_of(chain)
        self.alive = _running_total(chain, lifetimes, sizes)
        made = [sum(sizes[name] for name in _made(node) if name not in fixed) for node in chain.nodes]
        self.running = [alive + new for alive, new in zip(self.alive, made, strict=False)]

    def peak(self, start: int, stop: int) -> int:
        """Return the maximum of bytes alive at once while nodes [start, stop) run."""
        return max([self.alive[start], *self.running[start:stop]])
