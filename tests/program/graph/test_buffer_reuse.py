"""Check that results overwrite their operand only where no reader can notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from upriver.program.capture.prefix import capture
from upriver.program.graph.buffer_reuse import overwritable
from upriver.program.graph.executor import Program
from upriver.program.graph.schema import Graph, references


class Net(nn.Module):
    """A stem of two layers, followed by the code that a test passes."""

    def __init__(self, rest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.rest = rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x)
        return self.rest(one, self.second(one))


def over(graph: Graph) -> list[str]:
    """Return the operators that write over their first operand."""
    return [graph.nodes[index].op for index in overwritable(graph)]


def program_of(rest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Program:
    torch.manual_seed(0)
    return capture(Net(rest), torch.randn(4, 6))


@pytest.mark.parametrize(
    ("rest", "wanted"),
    [
        (lambda one, two: two.relu(), ["relu.default"]),
        pytest.param(lambda one, two: two + one, ["add.Tensor"], marks=pytest.mark.full),
        (lambda one, two: (two + one).relu(), ["add.Tensor", "relu.default"]),
        pytest.param(
            lambda one, two: nn.functional.silu(two) * one,
            ["silu.default", "mul.Tensor"],
            marks=pytest.mark.full,
        ),
        # The value is read again, by the same operator or by another one.
        (lambda one, two: one.relu() + two, ["relu.default"][:0]),
        pytest.param(lambda one, two: (two + two).relu(), ["relu.default"], marks=pytest.mark.full),
        # A view is alive, or the overwritten value would be a view.
        (lambda one, two: two.t().relu(), []),
        pytest.param(lambda one, two: two.relu() + two[:1], [], marks=pytest.mark.full),
        # The result has another form.
        (lambda one, two: two[:1].clone() + one, []),
        pytest.param(lambda one, two: two + one.double(), [], marks=pytest.mark.full),
    ],
)
def test_it_writes_over_what_is_fresh_of_that_form_and_read_once(
    rest: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], wanted: list[str]
) -> None:
    program = program_of(rest)
    assert over(program.graph) == wanted


def test_every_stretch_leaves_what_it_was_given_as_it_was_and_gives_the_same_bits() -> None:
    program = program_of(lambda one, two: ((two + one).relu() * 3).relu())
    assert len(over(program.graph)) >= 3
    x = torch.randn(program.micro_batch, 6)
    crossing = [program.run((x,), 0, cut) for cut in range(program.num_stages + 1)]
    before = [[tensor.clone() for tensor in tensors] for tensors in crossing]
    for start in range(program.num_stages + 1):
        for stop in range(start, program.num_stages + 1):
            got = program.run(crossing[start], start, stop)
            for mine, wanted in zip(got, before[stop], strict=True):
                assert torch.equal(mine, wanted)
    for tensors, wanted_tensors in zip(crossing, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted_tensors, strict=True))


def test_what_no_input_has_a_part_in_is_never_written_over() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.table = nn.Buffer(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * (self.table + 1).relu()

    program = capture(Constant(), torch.randn(4, 6))
    x = torch.randn(program.micro_batch, 6)
    first = program.run((x,), 0, program.num_stages)
    for _ in range(3):
        assert all(map(torch.equal, first, program.run((x,), 0, program.num_stages)))


def test_what_may_be_written_over_is_read_once_in_the_graph() -> None:
    program = program_of(lambda one, two: ((two + one).relu() * one).relu())
    graph = program.graph
    reads = [name for node in graph.nodes for name in references([node.args, node.kwargs])]
    for name in overwritable(graph).values():
        assert reads.count(name) == 1
        assert name not in graph.stages[-1].live
