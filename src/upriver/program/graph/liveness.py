"""Where a chain of operators may be cut, and what is alive there.

Any position can be cut: every tensor made before it and read after it crosses. A *stage* ends where that is
worth offering: where a module ends and the tensors alive share no computation. A residual block is one stage
because its input stays alive until the addition, and so is a dense block, while two towers beside each other
are not in each other's way. Operators that cost next to nothing (masks, reshapes) make no computation: what
they make from the inputs is a *side tensor*, which crosses but does not stand in the way of a cut. Operations
between two modules belong to the stage after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from upriver.program.graph.schema import Lifetimes, Node, Value, constants, references

Granularity: TypeAlias = Literal["module", "op", "end"]
"""Stages end with modules, with operators, or nowhere but at the end."""

FEW = 5
"""With fewer stages than this a planner has little to choose from, so more tensors may cross a cut."""

MANY = 64
"""No stage ends where more tensors than this are alive: such a cut serves nobody, and listing the names at
every position of a long chain would take time and memory in the square of its length."""

Place: TypeAlias = "tuple[tuple[str, str], ...]"
"""The module calls around an operator, outermost first, each as (name of the call, path of the module)."""

_HEAVY_PARTS = ("conv", "norm", "linear", "attention", "embedding", "einsum", "lstm", "gru", "rnn")
_HEAVY_NAMES = frozenset(
    {"matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "inner", "tensordot"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Operators in the order in which they run.

    Attributes:
        inputs: What the first operators read.
        nodes: The operators.
        places: For each of them the module calls that it ran in.
        outputs: Names of what the whole chain gives.
        weights: Names of what is read from the weights file.
    """

    inputs: Sequence[Value]
    nodes: Sequence[Node]
    places: Sequence[Place]
    outputs: Sequence[str]
    weights: Collection[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """A place for a cut: after node ``stop - 1``, named after the module or operator that ends there."""

    name: str
    stop: int
    live: tuple[str, ...]


def is_heavy(op: str) -> bool:
    """Whether an operator computes: a convolution, matrix product, attention, embedding or normalisation."""
    name = op.partition(".")[0]
    return name in _HEAVY_NAMES or any(part in name for part in _HEAVY_PARTS)


def boundaries(
    chain: Chain, *, granularity: Granularity = "module", also: Collection[int] = ()
) -> list[Boundary]:
    """The stage ends of a chain, its end always among them, in time linear in its length.

    Args:
        granularity: What a stage may end with.
        also: Positions at which a stage ends whatever is alive there.
    """
    lifetimes, fixed = _lifetimes(chain)
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


def _lifetimes(chain: Chain) -> tuple[Lifetimes, frozenset[str]]:
    """Where each value is alive, and which values are constants and so never are."""
    fixed = constants(chain.inputs, chain.nodes)
    return Lifetimes(chain.inputs, chain.nodes, chain.outputs, fixed | set(chain.weights)), fixed


def live_at(lifetimes: Lifetimes, positions: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Names alive at some positions, in the order in which they were made."""
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
    """For each position the sum over the values alive there."""
    change = [0] * (len(chain.nodes) + 2)
    for name, (first, last) in lifetimes.stretch.items():
        change[first] += weights[name]
        change[last + 1] -= weights[name]
    return list(accumulate(change))[:-1]


def progress(chain: Chain, fixed: frozenset[str] | None = None) -> list[int]:
    """How many operators that are no constants lie before each position.

    Args:
        fixed: Names of the constants, if they are known.
    """
    fixed = constants(chain.inputs, chain.nodes) if fixed is None else fixed
    return list(accumulate((not fixed.issuperset(_made(node)) for node in chain.nodes), initial=0))


def _distinct(stops: Sequence[int], busy: Sequence[int]) -> list[int]:
    """Without stages that only compute constants: a cut behind one would be the cut before it again."""
    kept: list[int] = []
    for stop in stops[:-1]:
        if busy[stop] > (busy[kept[-1]] if kept else 0):
            kept.append(stop)
    if kept and busy[kept[-1]] == busy[stops[-1]]:
        kept.pop()
    return [*kept, stops[-1]]


def _spans(places: Sequence[Place]) -> dict[str, tuple[int, int]]:
    """Each module call with its first and its last node."""
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
    return [output.name for output in node.outputs if output is not None]


def _read(node: Node) -> Iterator[str]:
    return references([node.args, node.kwargs])


# ------------------------------------------------------------------------------ shared computation


class _Components:
    """Which values come from one connected piece of computation, and how many of each piece are alive."""

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
    """For each position whether no two of the tensors read behind it come from one piece of computation.

    Side tensors, which only light operators have made from the inputs, belong to no piece. Nor does an answer
    that is finished count, though it crosses every cut up to the end.
    """
    components = _Components()
    piece_of: dict[str, int] = {}
    last = {name: index for index, node in enumerate(chain.nodes) for name in _read(node)}
    apart = [True]
    for index, node in enumerate(chain.nodes):
        piece = _piece(components, piece_of, node, fixed)
        if piece is not None:
            piece_of |= dict.fromkeys(_made(node), piece)
        for name in _made(node):
            if name in last and name in piece_of:
                components.count(piece_of[name], 1)
        for name in set(_read(node)):
            if last[name] == index and name in piece_of:
                components.count(piece_of[name], -1)
        apart.append(components.crowded == 0)
    return apart


def _piece(
    components: _Components, piece_of: Mapping[str, int], node: Node, fixed: frozenset[str]
) -> int | None:
    """The piece of computation that an operator belongs to, all that it reads from joined; None for none."""
    if all(name in fixed for name in _made(node)):
        return None
    pieces = [piece_of[name] for name in _read(node) if name in piece_of]
    if pieces:
        return components.join(pieces)
    return components.new() if is_heavy(node.op) else None


# ------------------------------------------------------------------------------------------- bytes


class ActivationMemory:
    """Bytes of activations alive at each position, and while each operator runs."""

    def __init__(self, chain: Chain, sizes: Mapping[str, int]) -> None:
        """Add up once.

        Args:
            sizes: Bytes of each value.
        """
        lifetimes, fixed = _lifetimes(chain)
        self.alive = _running_total(chain, lifetimes, sizes)
        made = [sum(sizes[name] for name in _made(node) if name not in fixed) for node in chain.nodes]
        self.running = [alive + new for alive, new in zip(self.alive, made, strict=False)]

    def peak(self, start: int, stop: int) -> int:
        """The most bytes alive at once while nodes [start, stop) run."""
        return max([self.alive[start], *self.running[start:stop]])
