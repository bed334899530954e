"""Check that the search names exactly the operator that another side computes with other bits."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.program.nets import Encoder, frozen_small
from tests.rpc.scripted_http import Exchange, scripted
from upriver.errors import Overloaded, ProtocolError
from upriver.program.capture.prefix import capture
from upriver.program.graph.alignment import as_shipped
from upriver.program.graph.executor import Program
from upriver.program.graph.liveness import Granularity
from upriver.program.graph.schema import DTYPES, Node, Value, constants
from upriver.protocol import End
from upriver.rpc.client import ServerClient
from upriver.rpc.program_diff import ProgramDiff, diff_program, server_run
from upriver.rpc.tolerance import FLOAT32, Deviation
from upriver.types import MicroBatch, Timings


class Positions(nn.Module):
    """Add a table that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.sin(torch.arange(6, dtype=torch.float32))
        answer: torch.Tensor = self.last(torch.tanh(self.first(x)) + table)
        return answer


class Dense(nn.Module):
    """Concatenate each layer's result with its input: one tensor is alive across many operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 + 2 * number, 2) for number in range(4))
        self.head = nn.Linear(14, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.tanh(layer(x))], 1)
        answer: torch.Tensor = self.head(x)
        return answer


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (frozen_small, (2, 3, 16, 16)),
    "encoder": (Encoder, (2, 5, 16)),
    "positions": (Positions, (2, 6)),
    "dense": (Dense, (2, 6)),
}


@functools.cache
def captured(name: str) -> tuple[torch.Tensor, dict[Granularity, Program]]:
    """Return an input of a network, and its program by granularity."""
    build, shape = NETS[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(shape)
    both: tuple[Granularity, ...] = ("module", "op")
    return x, {granularity: capture(model, x, granularity=granularity) for granularity in both}


def skewed(program: Program, index: int, by: float) -> Program:
    """Return a program that adds a number to the results of one of its nodes."""
    graph = program.graph
    node = graph.nodes[index]
    value = node.made[0]
    exact = Value(name=f"{value.name}_exact", spec=value.spec)
    outputs = [exact if output is value else output for output in node.outputs]
    off = Node(op="add.Tensor", args=[{"tensor": exact.name}, by], kwargs={}, outputs=[value])
    nodes = [*graph.nodes[:index], msgspec.structs.replace(node, outputs=outputs), off]
    stages = [
        msgspec.structs.replace(stage, stop=stage.stop + (stage.stop > index)) for stage in graph.stages
    ]
    changed = msgspec.structs.replace(graph, nodes=[*nodes, *graph.nodes[index + 1 :]], stages=stages)
    return Program(changed, program.weights_bytes)


def skewed_side(
    index: int, by: float
) -> Callable[[Program, Sequence[torch.Tensor], int, int], Sequence[torch.Tensor]]:
    """Return a side that is off in one node of any program that it runs."""
    made = functools.cache(lambda program: skewed(program, index, by))
    return lambda program, tensors, start, stop: made(program).run(as_shipped(tensors), start, stop)


def diff(name: str, run: Callable[..., Sequence[torch.Tensor]]) -> ProgramDiff:
    x, programs = captured(name)
    return diff_program(
        programs["module"],
        [x],
        run,
        allowed=FLOAT32,
        by_operators=lambda: programs["op"],
        on_stage=lambda *_: None,
    )


def real_nodes(program: Program) -> list[int]:
    """Return indices of the nodes that compute real numbers from the input."""
    fixed = constants(program.graph.inputs, program.graph.nodes)
    return [
        index
        for index, node in enumerate(program.graph.nodes)
        if node.made and node.made[0].name not in fixed and DTYPES[node.made[0].spec.dtype].is_floating_point
    ]


@pytest.mark.full
@given(data=st.data(), name=st.sampled_from(sorted(NETS)), by=st.sampled_from([1.0, -0.5, 1e-3]))
def test_search_names_exactly_the_operator_that_is_off(data: st.DataObject, name: str, by: float) -> None:
    x, programs = captured(name)
    program, finer = programs["module"], programs["op"]
    index = data.draw(st.sampled_from(real_nodes(program)))
    found = diff(name, skewed_side(index, by))
    other = skewed(program, index, by)
    wanted = [
        Deviation.between(program.run([x], 0, cut), other.run([x], 0, cut))
        for cut in range(1, program.num_stages + 1)
    ]
    assert [stage.accumulated for stage in found.stages] == wanted
    assert found.answer == wanted[-1]
    assert found.first_stage is not None and found.first_operator is not None
    assert found.first_stage.cut == 1 + bisect_right([stage.stop for stage in program.stages], index)
    assert found.first_operator.cut == 1 + bisect_right([stage.stop for stage in finer.stages], index)
    assert program.graph.nodes[index].op in found.first_operator.operators
    assert found.first_operator is found.operators[-1]
    assert all(operator.own.equal for operator in found.operators[:-1])
    assert [stage.cut for stage in found.stages if not stage.own.equal] == [found.first_stage.cut]


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.full
def test_every_operator_that_is_off_is_found_where_nothing_hides_it(name: str) -> None:
    """A cut lies behind each operator, so no later one hides a difference."""
    x, programs = captured(name)
    finer = programs["op"]
    for index in real_nodes(finer):
        found = diff_program(
            finer,
            [x],
            skewed_side(index, 1.0),
            allowed=FLOAT32,
            by_operators=lambda: finer,
            on_stage=lambda *_: None,
        )
        assert found.first_operator is not None
        assert found.first_operator.cut == 1 + bisect_right([stage.stop for stage in finer.stages], index)


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.full
def test_equal_sides_need_no_program_by_operators(name: str) -> None:
    x, programs = captured(name)
    steps = list[tuple[str, int, int]]()

    def no_operators() -> Program:
        raise AssertionError("nothing differs")

    found = diff_program(
        programs["module"],
        [x],
        lambda program, tensors, start, stop: program.run(tensors, start, stop),
        allowed=FLOAT32,
        by_operators=no_operators,
        on_stage=lambda *step: steps.append(step),
    )
    stages = programs["module"].stages
    assert found.equal and found.first_stage is None and found.first_operator is None and not found.excess
    assert {each.relative for stage in found.stages for each in (stage.own, stage.accumulated)} == {0.0}
    assert steps == [(stage.name, number, len(stages)) for number, stage in enumerate(stages)]
    assert [stage.cut for stage in found.stages] == list(range(1, len(stages) + 1))


def test_operator_is_described_by_what_it_reads_and_gives() -> None:
    _, programs = captured("residual")
    [index] = [
        number for number, stage in enumerate(programs["op"].stages) if stage.name.startswith("block2.conv1")
    ]
    found = diff("residual", skewed_side(programs["op"].stages[index].stop - 1, 1.0)).first_operator
    assert found is not None and found.name == "block2.conv1: conv2d" and found.kind == "Conv2d"
    assert found.operators == ("conv2d.default",) and found.constants == ()
    assert [spec.shape for spec in found.reads] == [[2, 8, 8, 8], [8, 8, 3, 3]]
    assert [(spec.dtype, spec.shape) for spec in found.gives] == [("float32", [2, 8, 8, 8])]
    assert found.own.num_different == found.own.num_elements == 2 * 8 * 8 * 8
    assert found.accumulated.num_elements == 2 * found.own.num_elements  # the block's input crosses, too


def test_constant_that_is_off_is_named_with_its_reader() -> None:
    _, programs = captured("positions")
    [sine] = [number for number, node in enumerate(programs["op"].graph.nodes) if node.op == "sin.default"]
    found = diff("positions", skewed_side(sine, 1e-3)).first_operator
    assert found is not None and found.operators == ("add.Tensor",)
    assert found.constants[-1] == "sin.default"


@pytest.mark.full
def test_difference_that_only_a_whole_run_shows_is_no_operators() -> None:
    def run(
        program: Program, tensors: Sequence[torch.Tensor], start: int, stop: int
    ) -> Sequence[torch.Tensor]:
        found = program.run(tensors, start, stop)
        return found if stop - start == 1 else [tensor + 1 for tensor in found]

    found = diff("dense", run)
    assert not found.equal and found.first_stage is None and found.operators == ()
    assert found.answer.num_different == found.answer.num_elements and found.excess


def test_difference_that_no_operator_shows_alone_is_the_stages() -> None:
    _, programs = captured("dense")

    def run(
        program: Program, tensors: Sequence[torch.Tensor], start: int, stop: int
    ) -> Sequence[torch.Tensor]:
        found = program.run(tensors, start, stop)
        return found if program is programs["op"] else [tensor + 1 for tensor in found]

    found = diff("dense", run)
    assert found.first_stage is not None and found.first_stage.cut == 1
    assert found.first_operator is None
    assert len(found.operators) == bisect_right(
        [stage.stop for stage in programs["op"].stages], programs["module"].stages[0].stop
    )


# ----------------------------------------------------------------------------------------- over the wire


def answer_of(program: Program, x: torch.Tensor, stop: int) -> MicroBatch:
    return MicroBatch(ids=(0, 1), position=stop, tensors=program.run([x], 0, stop))


def test_busy_server_is_asked_again() -> None:
    x, programs = captured("dense")
    program, asked = programs["module"], list[str]()

    def respond(exchange: Exchange) -> None:
        asked.append(exchange.method)
        if asked.count("POST") == 1 and exchange.method == "POST":
            exchange.plain(503, b'{"error": {"code": "overloaded", "message": "full"}}', Retry_After="0")
        elif exchange.method == "POST":
            exchange.frames(answer_of(program, x, 1), Timings(), End())
        else:
            exchange.plain(200)

    with scripted(respond) as url, ServerClient(url) as client:
        run = server_run(client, None)
        for _ in range(2):
            assert all(map(torch.equal, run(program, [x], 0, 1), program.run([x], 0, 1)))
    assert asked == ["HEAD", "POST", "POST", "POST"]


def test_server_that_stays_busy_for_longer_than_a_canary_is_given_up() -> None:
    x, programs = captured("dense")

    def respond(exchange: Exchange) -> None:
        if exchange.method == "POST":
            exchange.plain(503, b'{"error": {"code": "overloaded", "message": "full"}}', Retry_After="3600")
        else:
            exchange.plain(200)

    with scripted(respond) as url, ServerClient(url) as client, pytest.raises(Overloaded, match="full"):
        server_run(client, None)(programs["module"], [x], 0, 1)


def test_answer_of_another_form_is_refused() -> None:
    x, programs = captured("dense")

    def respond(exchange: Exchange) -> None:
        if exchange.method == "POST":
            wrong = MicroBatch(ids=(0, 1), position=1, tensors=(torch.ones(2, 3),))
            exchange.frames(wrong, Timings(), End())
        else:
            exchange.plain(200)

    with scripted(respond) as url, ServerClient(url) as client, pytest.raises(ProtocolError) as raised:
        server_run(client, None)(programs["module"], [x], 0, 1)
    assert str(raised.value) == f"{url}: its answer at cut 1 is not of the form of the program's"
