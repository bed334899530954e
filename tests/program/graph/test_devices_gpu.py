"""Check that weights on an accelerator equal the file's, whatever the accelerator computes meanwhile."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from upriver.program.capture.prefix import capture
from upriver.program.graph.devices import PIECE_BYTES, copy_beside, moved
from upriver.program.graph.executor import Program

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_values_get_into_memory_of_any_form(dtype: torch.dtype) -> None:
    tensor = torch.randint(-9, 9, (70, 50)).to(dtype)
    whole = torch.zeros(100, 100, dtype=dtype, device=DEVICE)
    for there in (whole.t()[:70, :50], whole[5:75, :50], torch.zeros(70, 50, dtype=dtype, device=DEVICE)):
        copy_beside(tensor, there)
        assert torch.equal(there.cpu(), tensor)
    other = torch.zeros(70, 50, dtype=torch.complex128, device=DEVICE)
    copy_beside(tensor.t().contiguous().t(), other)
    assert torch.equal(other.cpu(), tensor.to(torch.complex128))


def test_memory_that_is_still_in_use_is_not_written() -> None:
    tensor = torch.randn(PIECE_BYTES)
    there = torch.empty_like(tensor, device=DEVICE)
    torch.cuda._sleep(10**9)
    there.fill_(1.0)
    copy_beside(tensor, there, after=torch.cuda.current_stream().record_event())
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), tensor)


def test_where_no_memory_may_be_locked_it_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refused(*size: int, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", refused)
    tensor = torch.randn(1000)
    assert torch.equal(moved(tensor, DEVICE).cpu(), tensor)


def test_many_threads_copy_at_once() -> None:
    tensors = [torch.randn(PIECE_BYTES // 2 + number) for number in range(8)]
    with ThreadPoolExecutor(len(tensors)) as pool:
        found = list(pool.map(lambda tensor: moved(tensor, DEVICE).cpu(), tensors))
    assert all(map(torch.equal, found, tensors))


def test_a_fresh_process_has_its_accelerator_ready_beside_the_rest() -> None:
    code = (
        "import threading, torch\n"
        "from upriver.program.graph.devices import make_ready, moved\n"
        "assert not torch.cuda.is_initialized()\n"
        "thread = threading.Thread(target=make_ready, args=(torch.device('cuda'),))\n"
        "thread.start(); there = moved(torch.arange(9), torch.device('cuda')); thread.join()\n"
        "assert torch.equal(there.cpu(), torch.arange(9)) and torch.cuda.is_initialized()\n"
        "make_ready(torch.device('cuda')); make_ready(torch.device('cpu'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
