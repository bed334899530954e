"""Check the cuts of a chain, and the values alive there, against brute-force definitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import often
from upriver.program.graph.liveness import (
    MANY,
    ActivationMemory,
    Boundary,
    Chain,
    Granularity,
    boundaries,
    is_heavy,
    separable,
)
from upriver.program.graph.schema import Node, TensorSpec, Value, references

HEAVY, LIGHT = "linear.default", "relu.default"
SPEC = TensorSpec(dtype="float32", shape=[2], stride=[1])


Steps: TypeAlias = "list[tuple[str, Sequence[str], str]]"
"""Each step: the operator, the names it reads, the name it makes."""


def value(name: str) -> Value:
    return Value(name=name, spec=SPEC)


def node(op: str, reads: Sequence[str], makes: Sequence[str]) -> Node:
    args = [{"tensor": name} for name in reads]
    return Node(op=op, args=args, kwargs={}, outputs=[value(name) for name in makes])


def chain_of(
    steps: Sequence[tuple[str, Sequence[str], str]],
    *,
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = (),
) -> Chain:
    """Return a chain with one operator per step, each in a module named after its result."""
    return Chain(
        inputs=[value(name) for name in inputs],
        nodes=[node(op, reads, [made]) for op, reads, made in steps],
        places=[((made, made),) for _, _, made in steps],
        outputs=tuple(outputs) or (steps[-1][2],),
        weights=frozenset({"w"}),
    )


def cuts_of(chain: Chain, granularity: Granularity = "module") -> dict[str, tuple[str, ...]]:
    return {cut.name: cut.live for cut in boundaries(chain, granularity=granularity)}


# --------------------------------------------------------------------------------------- the oracle


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    inputs = [f"x{number}" for number in range(draw(st.integers(1, 3)))]
    names = [*inputs, "w"]
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.sampled_from(names), max_size=3))
        made = [f"n{index}_{part}" for part in range(draw(st.integers(1, 2)))]
        nodes.append(node(draw(st.sampled_from([HEAVY, LIGHT])), reads, made))
        names += made
    calls = draw(st.lists(st.integers(0, 4), min_size=len(nodes), max_size=len(nodes)))
    made = [name for name in names if name.startswith("n")]
    return Chain(
        inputs=[value(name) for name in inputs],
        nodes=nodes,
        places=[((f"call {call}", f"module{call}"),) for call in sorted(calls)],
        outputs=tuple(draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))),
        weights=frozenset({"w"}),
    )


def makers(chain: Chain) -> dict[str, int]:
    return {name: index for index, step in enumerate(chain.nodes) for name in made_by(step)}


def made_by(step: Node) -> list[str]:
    return [output.name for output in step.outputs if output is not None]


def read_by(step: Node) -> set[str]:
    return set(references([step.args, step.kwargs]))


def depends_on_input(chain: Chain, name: str) -> bool:
    if name in {given.name for given in chain.inputs}:
        return True
    if name not in makers(chain):
        return False
    return any(depends_on_input(chain, read) for read in read_by(chain.nodes[makers(chain)[name]]))


def alive_at(chain: Chain, position: int, *, outputs: bool = True) -> list[str]:
    """Return the values made before a position and read at or after it, or part of the answer.

    Weights and constants are excluded.
    """
    before = [given.name for given in chain.inputs]
    before += [name for step in chain.nodes[:position] for name in made_by(step)]
    wanted = {name for step in chain.nodes[position:] for name in read_by(step)}
    wanted |= set(chain.outputs) if outputs else set()
    return [name for name in before if name in wanted and depends_on_input(chain, name)]


def pieces_at(chain: Chain, position: int) -> dict[str, int]:
    """Map each value made before a position to the number of its connected piece of computation."""
    piece: dict[str, int] = {}
    for index, step in enumerate(chain.nodes[:position]):
        if not any(depends_on_input(chain, name) for name in made_by(step)):
            continue
        joined = {piece[name] for name in read_by(step) if name in piece}
        if not joined and not is_heavy(step.op):
            continue
        piece = {name: index if old in joined else old for name, old in piece.items()}
        piece |= dict.fromkeys(made_by(step), index)
    return piece


@given(chains())
def test_live_sets_are_those_of_the_definition(chain: Chain) -> None:
    for cut in boundaries(chain, granularity="op")[:-1]:
        assert list(cut.live) == alive_at(chain, cut.stop)
    assert boundaries(chain)[-1].live == chain.outputs


@given(chains())
def test_every_position_behind_an_operator_is_a_stage_with_granularity_op(chain: Chain) -> None:
    busy = [any(depends_on_input(chain, name) for name in made_by(step)) for step in chain.nodes]
    stops = [cut.stop for cut in boundaries(chain, granularity="op")]
    wanted = [index + 1 for index, works in enumerate(busy) if works]
    assert stops == [*wanted[:-1], len(chain.nodes)]


@given(chains())
def test_pieces_of_computation_are_those_of_the_definition(chain: Chain) -> None:
    fixed = frozenset(name for name in makers(chain) if not depends_on_input(chain, name))
    for position, apart in enumerate(separable(chain, fixed)):
        piece = pieces_at(chain, position)
        crossing = [piece[name] for name in alive_at(chain, position, outputs=False) if name in piece]
        assert apart == (len(crossing) == len(set(crossing)))


@given(chains(), st.data())
def test_memory_is_the_most_that_is_alive_at_once(chain: Chain, data: st.DataObject) -> None:
    names = [given.name for given in chain.inputs] + list(makers(chain))
    sizes = {name: data.draw(st.integers(0, 9), label=name) for name in names}
    memory = ActivationMemory(chain, sizes)
    for start, stop in pairwise([0, *(cut.stop for cut in boundaries(chain))]):
        during = [sum(sizes[name] for name in alive_at(chain, start))]
        for index in range(start, stop):
            made = {name for name in made_by(chain.nodes[index]) if depends_on_input(chain, name)}
            during.append(sum(sizes[name] for name in made | set(alive_at(chain, index))))
        assert memory.peak(start, stop) == max(during)


@given(chains(), st.sampled_from(["module", "op", "end"]))
def test_stages_cover_the_chain_and_no_cut_comes_twice(chain: Chain, granularity: Granularity) -> None:
    cuts = boundaries(chain, granularity=granularity)
    stops = [cut.stop for cut in cuts]
    assert stops == sorted(set(stops))
    assert stops[-1] == len(chain.nodes)
    busy = {
        index
        for index, step in enumerate(chain.nodes)
        if any(depends_on_input(chain, name) for name in made_by(step))
    }
    for start, stop in pairwise([0, *stops]):
        assert len(cuts) == 1 or busy & set(range(start, stop))


# ------------------------------------------------------------------------------------------- shapes


def straight(length: int, prefix: str = "s", start: str = "x") -> Steps:
    names = [start, *(f"{prefix}{number}" for number in range(length))]
    return [(HEAVY, (before, "w"), after) for before, after in pairwise(names)]


def test_a_residual_branch_is_one_stage() -> None:
    steps: Steps = [
        *straight(4),
        (HEAVY, ("s3",), "branch"),
        (LIGHT, ("branch", "s3"), "sum"),
        (HEAVY, ("sum",), "y"),
    ]
    assert list(cuts_of(chain_of(steps))) == ["s0", "s1", "s2", "s3", "sum", "y"]


def test_two_towers_are_cut_though_both_are_alive() -> None:
    steps: Steps = [*straight(3, "a", "x"), *straight(3, "b", "y"), (LIGHT, ("a2", "b2"), "sum")]
    cuts = cuts_of(chain_of(steps, inputs=("x", "y")))
    assert list(cuts) == ["a0", "a1", "a2", "b0", "b1", "b2", "sum"]
    assert cuts["a1"] == ("y", "a1")
    assert cuts["b1"] == ("a2", "b1")


def test_a_mask_that_every_layer_reads_crosses_and_stops_no_cut() -> None:
    steps: Steps = [(LIGHT, ("mask",), "bias")]
    names = ["x", *(f"s{number}" for number in range(6))]
    steps += [(HEAVY, (before, "bias"), after) for before, after in pairwise(names)]
    cuts = cuts_of(chain_of(steps, inputs=("x", "mask")))
    assert list(cuts) == ["bias", "s0", "s1", "s2", "s3", "s4", "s5"]
    assert cuts["s2"] == ("bias", "s2")


def test_a_mask_made_by_a_heavy_operator_is_a_piece_of_its_own() -> None:
    steps: Steps = [(HEAVY, ("mask",), "table"), (LIGHT, ("table",), "cos"), (LIGHT, ("table",), "sin")]
    steps += [(HEAVY, ("x", "cos"), "a"), (HEAVY, ("a", "sin"), "b"), *straight(5, start="b")]
    chain = chain_of(steps, inputs=("x", "mask"))
    assert list(cuts_of(chain)) == ["table", "b", "s0", "s1", "s2", "s3", "s4"]


def test_constants_are_never_alive_and_end_no_stage() -> None:
    steps: Steps = [
        (HEAVY, ("w",), "table"),
        *straight(5),
        (LIGHT, ("s4", "table"), "y"),
        (LIGHT, ("w",), "late"),
    ]
    chain = chain_of(steps, outputs=("y", "late"))
    cuts = boundaries(chain)
    assert [cut.name for cut in cuts] == ["s0", "s1", "s2", "s3", "s4", "late"]
    assert [cut.live for cut in cuts[-2:]] == [("s4",), ("y", "late")]


def test_a_finished_answer_stops_no_cut() -> None:
    chain = chain_of(straight(6), outputs=("s1", "s3", "s5"))
    assert cuts_of(chain)["s2"] == ("s1", "s2")
    assert list(cuts_of(chain)) == [f"s{number}" for number in range(6)]


def test_with_few_stages_every_end_of_a_module_is_one() -> None:
    steps: Steps = [
        (HEAVY, ("x",), "a"),
        (HEAVY, ("a",), "b"),
        (LIGHT, ("a", "b"), "c"),
        (HEAVY, ("c",), "d"),
    ]
    assert cuts_of(chain_of(steps)) == {
        "a": ("a",),
        "b": ("a", "b"),
        "c": ("c",),
        "d": ("d",),
    }


def test_a_stage_is_named_after_the_outermost_module_that_lies_inside_it() -> None:
    chain = chain_of(straight(5))
    places = [
        (("net", "net"), ("a", "net.a")),
        (("net", "net"), ("b", "net.b"), ("inner", "net.b.inner")),
        (("net", "net"), ("a@1", "net.a")),
        (("net", "net"),),
        (),
    ]
    named = Chain(
        inputs=chain.inputs, nodes=chain.nodes, places=places, outputs=chain.outputs, weights=chain.weights
    )
    assert [cut.name for cut in boundaries(named)] == ["net.a", "net.b", "net.a", "net", "output"]
    assert [cut.name for cut in boundaries(named, granularity="op")] == [
        "net.a: linear",
        "net.b.inner: linear",
        "net.a: linear",
        "net: linear",
        "linear",
    ]
    assert [cut.stop for cut in boundaries(named, granularity="end")] == [5]


def test_a_stage_ends_where_it_is_told_to() -> None:
    steps: Steps = [*straight(5), (HEAVY, ("s4",), "branch"), (LIGHT, ("s4", "branch"), "y")]
    chain = chain_of(steps)
    assert [cut.stop for cut in boundaries(chain, also=(6,))] == [1, 2, 3, 4, 5, 6, 7]
    assert [cut.stop for cut in boundaries(chain, granularity="end", also=(6,))] == [6, 7]


# ------------------------------------------------------------------------------------- long chains

LONG = 20_000


@pytest.mark.parametrize("granularity", often(["module", "op"], "op"))
def test_a_long_chain_is_cut_everywhere(granularity: Granularity) -> None:
    cuts = boundaries(chain_of(straight(LONG)), granularity=granularity)
    assert [(cut.stop, cut.live) for cut in cuts] == [(n + 1, (f"s{n}",)) for n in range(LONG)]


@pytest.mark.full
def test_a_long_chain_whose_values_all_stay_alive_is_cut_where_few_are() -> None:
    steps = straight(LONG)
    steps.append((HEAVY, tuple(made for _, _, made in steps), "y"))
    cuts: list[Boundary] = boundaries(chain_of(steps))
    assert [cut.stop for cut in cuts] == [*range(1, MANY + 1), LONG + 1]
    assert len(cuts[MANY - 1].live) == MANY
