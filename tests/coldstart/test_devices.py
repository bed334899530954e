"""Check that a model's weights arrive on the device that the model will run on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from upriver.coldstart.format.checkpoint import TensorLocation
from upriver.coldstart.model.assignment import memories, move

on_accelerator = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 4))
        self.tied = self.table
        self.register_buffer("head", self.table.detach()[:3], persistent=False)
        self.register_buffer("turned", self.table.detach().t(), persistent=False)
        self.register_buffer("own", torch.arange(5.0), persistent=False)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=[pytest.mark.gpu, on_accelerator])])
def test_what_shares_memory_shares_it_there(device: str) -> None:
    model = move(Sharing(), torch.device(device))
    assert model.table.device.type == device
    for view, stride in ((model.tied, (4, 1)), (model.head, (4, 1)), (model.turned, (1, 4))):
        assert view.untyped_storage()._cdata == model.table.untyped_storage()._cdata
        assert view.stride() == stride and view.storage_offset() == 0
    assert model.own.device.type == device
    if device == "cuda":
        assert torch.equal(model.own.cpu(), torch.arange(5.0))


@pytest.mark.gpu
@on_accelerator
def test_what_an_accelerator_was_asked_before_does_not_end_in_weights() -> None:
    value = torch.randn(1 << 20)
    placed = TensorLocation(name="w", dtype="float32", shape=(1 << 20,), path="a", start=0, stop=value.nbytes)
    old = torch.empty(1 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    old.fill_(1.0)
    place = old.data_ptr()
    del old
    target = torch.empty(1 << 20, device="cuda")
    assert target.data_ptr() == place
    (memory,) = memories([placed], [[target]])
    memory.room()[:] = value.numpy().tobytes()
    memory.settle()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), value)
