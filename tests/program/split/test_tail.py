"""Check what a tail hands to code in place of the tensors that it must not read."""

from __future__ import annotations

import torch

from upriver.program.split.module_trace import Shape
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
