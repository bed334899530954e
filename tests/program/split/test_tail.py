"""Check what a tail hands to code in place of the tensors that it must not read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.program.nets import freeze
from upriver.program.split.module_trace import Shape
from upriver.program.split.split import split
from upriver.program.split.tail import _Feed, _Poison


def test_poison_is_kept_from_call_to_call_of_as_many_samples_on_one_device() -> None:
    feed, item = _Feed(keeps=True), _Poison(shape=Shape(dtype=torch.float32, base=(0, 3), slope=(1, 0)))

    def taken(samples: int, device: str = "cpu") -> torch.Tensor:
        feed.begin((torch.zeros(samples, device=device),), samples)
        found: torch.Tensor = feed.take(item)
        assert (found.shape, found.device.type) == ((samples, 3), device)
        return found

    first = taken(2)
    assert torch.isnan(first).all()
    assert taken(2).data_ptr() == first.data_ptr()
    assert taken(4).data_ptr() != first.data_ptr()
    taken(4, "meta")


class Flat(nn.Module):
    """Normalize, write into the result in place, and go on, as the first layers of ResNets do."""

    def __init__(self, *, by_module: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.block, self.head = nn.Conv2d(4, 4, 3), nn.Linear(4, 5)
        self.by_module = by_module
        for module in (self.conv, self.norm, self.block):
            freeze(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        x = self.relu(x) if self.by_module else functional.relu_(x)
        return self.head(self.block(x).mean((2, 3)))


@pytest.mark.parametrize("by_module", [True, False])
def test_poison_has_memory_only_where_the_tail_writes_into_it(
    by_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x, made = Flat(by_module=by_module), torch.randn(2, 3, 8, 8), list[_Poison]()
    of = _Poison.make
    monkeypatch.setattr(
        _Poison, "make", lambda self, samples, device: made.append(self) or of(self, samples, device)
    )
    cut = split(model, x)
    assert cut.program is not None, cut.why_not
    assert cut.boundary == "block"
    made.clear()
    with torch.no_grad():
        assert torch.equal(cut.tail(cut.program.run((x,), 0, cut.freeze)[0]), model(x))
    assert [item.dense for item in made].count(True) == (0 if by_module else 1)
