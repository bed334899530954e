"""Weights on an accelerator are those of the file, whatever computes there meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from upriver.program.capture import capture
from upriver.program.devices import PIECE_BYTES, moved
from upriver.program.program import Program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 5])
def test_bytes_arrive_beside_what_computes(nbytes: int) -> None:
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    busy = torch.randn(2000, 2000, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy
    there = moved(tensor, DEVICE)
    assert there.is_cuda and torch.equal(there.cpu(), tensor)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_types_stay(dtype: torch.dtype) -> None:
    tensor = torch.arange(50).to(dtype)
    there = moved(tensor, DEVICE)
    assert there.dtype is dtype and torch.equal(there.cpu(), tensor)


def test_what_is_there_stays_there() -> None:
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    assert moved(here, torch.device("cpu")) is here and moved(there, there.device) is there


def test_memory_that_is_given_back_is_taken_again() -> None:
    tensor = torch.ones(3 * PIECE_BYTES, dtype=torch.uint8)
    moved(tensor, DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        moved(tensor, DEVICE)
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before


def test_a_program_computes_as_its_model() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)).eval()
    x = torch.randn(4, 300)
    program = capture(model, x)
    there = Program.from_bytes(program.graph_bytes, program.weights_bytes, device="cuda")
    (found,) = there.run((x,), 0, there.num_stages)
    with torch.no_grad():
        assert torch.equal(found, model.cuda()(x.cuda()))


def test_stages_are_told_in_order_whether_weights_are_still_coming_or_not() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)).eval()
    x = torch.randn(4, 300)
    here = capture(model, x)
    there = Program.from_bytes(
        here.graph_bytes, here.weights_bytes, device="cuda", before_stage=lambda position, keys: None
    )
    told: list[tuple[int, float]] = []
    for _ in range(2):
        there.run((x,), 0, there.num_stages, on_stage=lambda *lap: told.append(lap))
        there.before_stage = None
    assert [position for position, _ in told] == [*range(1, there.num_stages + 1)] * 2
    assert all(seconds > 0 for _, seconds in told)
