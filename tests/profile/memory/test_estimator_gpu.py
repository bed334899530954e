"""Check estimates of peak memory against torch's allocator on an accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from upriver.profile.memory.estimator import stretch_peak, tail_peak
from upriver.program.capture.prefix import capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

BATCH = 16


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64 * 32 * 32, 64),
    ).cuda()


def peak_beside(run: Callable[[], object], held: int) -> int:
    """Return the peak bytes allocated during ``run``, plus ``held``, minus those allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + held


def test_forward_takes_no_more_than_the_high_end() -> None:
    x = torch.randn(BATCH, 3, 64, 64, device="cuda")
    program = capture(network().eval(), x)
    estimate = stretch_peak(program, 0, program.num_stages)
    taken = peak_beside(lambda: program.run((x,), 0, program.num_stages), x.nbytes)
    assert estimate.low_bytes <= taken <= estimate.high_bytes


def test_training_takes_no_more_than_the_high_end() -> None:
    model, x = network(), torch.randn(BATCH, 3, 64, 64, device="cuda")
    estimate = tail_peak(model, [x], samples=BATCH)
    optimizer = torch.optim.Adam(model.parameters())

    def iterate() -> None:
        for _ in range(2):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    taken = peak_beside(iterate, x.nbytes)
    assert estimate.low_bytes <= taken <= estimate.high_bytes
