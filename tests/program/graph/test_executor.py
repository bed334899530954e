"""Check that a program waits for each weight once, when a stage first reads the weight."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.examples import some
from tests.program.nets import Small
from upriver.errors import StoreError
from upriver.program.capture.prefix import capture
from upriver.program.graph.constants import Constants, keys_read
from upriver.program.graph.executor import BeforeStage, Program
from upriver.program.graph.schedule import schedule
from upriver.program.graph.weights_file import WeightsFile


class Late(nn.Module):
    """Compute one value from the first and the last weight; two layers read this value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (rows, 6)."""
        both = torch.exp(self.first.weight.sum(0) * self.scale)
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x * both))
        return x + both


def captured(name: str) -> tuple[Program, torch.Tensor]:
    torch.manual_seed(3)
    if name == "late":
        x = torch.randn(4, 6)
        return capture(Late().eval(), (x,), granularity="op"), x
    x = torch.randn(2, 3, 16, 16)
    return capture(Small().eval(), (x,), autocast=torch.bfloat16), x


def told(program: Program, before_stage: BeforeStage) -> Program:
    return Program(program.graph, WeightsFile(program.weight_tensors), before_stage=before_stage)


@pytest.mark.parametrize("name", some(1, ["late", "small"]))
def test_each_weight_is_asked_for_once_and_each_stage_each_time(name: str) -> None:
    program, x = captured(name)
    asked: list[tuple[int, frozenset[str]]] = []
    cold = told(program, lambda position, keys: asked.append((position, keys)))
    assert not cold._weights and not cold._constants.values
    stages = program.num_stages
    expected = program.run((x,), 0, stages)
    for _ in range(2):
        assert torch.equal(cold.run((x,), 0, stages)[0], expected[0])
    assert [position for position, _ in asked] == [*range(1, stages + 1)] * 2
    keys = [key for _, some in asked for key in some]
    assert len(keys) == len(set(keys)) and set(keys) == set(program.weight_tensors)
    for position in range(stages + 1):
        assert keys_read(program.graph, position) == {key for _, some in asked[:position] for key in some}
    cold.before_stage = None
    assert torch.equal(cold.run((x,), 0, stages)[0], expected[0])
    assert len(asked) == 2 * stages


@pytest.mark.parametrize("name", some(1, ["late", "small"]))
def test_stretches_may_run_in_any_order(name: str) -> None:
    program, x = captured(name)
    stages = program.num_stages
    between = [program.run((x,), 0, cut) for cut in range(stages + 1)]
    asked: list[str] = []
    cold = told(program, lambda position, keys: asked.extend(keys))
    for stage in reversed(range(stages)):
        found = cold.run(between[stage], stage, stage + 1)
        assert all(torch.equal(a, b) for a, b in zip(found, between[stage + 1], strict=True))
    assert sorted(asked) == sorted(program.weight_tensors)
    assert cold._constants.values.keys() == program._constants.values.keys()


def test_what_does_not_come_is_asked_for_again() -> None:
    program, x = captured("late")
    asked: list[frozenset[str]] = []

    def refuses(position: int, keys: frozenset[str]) -> None:
        asked.append(keys)
        if position == 2:
            raise StoreError("it broke")

    cold = told(program, refuses)
    for _ in range(2):
        with pytest.raises(StoreError, match="it broke"):
            cold.run((x,), 0, program.num_stages)
    assert asked[1] == asked[3] and not asked[2]


def test_two_at_once_bind_a_stage_once() -> None:
    program, x = captured("late")
    meet = threading.Barrier(2)
    cold = told(program, lambda position, keys: meet.wait(60))
    found: list[torch.Tensor] = []
    callers = [
        threading.Thread(target=lambda: found.append(cold.run((x,), 0, program.num_stages)[0]))
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    expected = program.run((x,), 0, program.num_stages)[0]
    assert len(found) == 2 and all(torch.equal(each, expected) for each in found)


def test_what_nothing_will_read_is_dropped() -> None:
    program, _ = captured("late")
    plan = schedule(program.graph)
    fixed = Constants(plan)
    weights = program._weights
    fixed.compute(fixed.before(plan.kept), weights, torch.device("cpu"))
    assert fixed.values.keys() == plan.kept
    assert not fixed.before(plan.kept)
