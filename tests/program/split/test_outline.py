"""Check what is known of a split before a program exists: its parts, and the frozen part as it is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.examples import often, some
from tests.program.nets import InPlaceAfter, Mixing, Reading, Shared, freeze, frozen_small
from upriver.program.freeze import freeze_to
from upriver.program.split.split import outline, split


def frozen(model: nn.Module, last: str) -> nn.Module:
    freeze_to(model, last)
    return model.train()


@pytest.mark.parametrize("upto", often(["stem", "block1", "block2"], "block1"))
@pytest.mark.parametrize("layout", some(1, [torch.channels_last, torch.contiguous_format]))
def test_the_frozen_part_as_written_gives_the_bits_of_its_program(
    upto: str, layout: torch.memory_format
) -> None:
    model = frozen_small(upto).to(memory_format=layout)
    x = torch.randn(4, 3, 16, 16).to(memory_format=layout)
    found, parts = outline(model, x), split(model, x)
    assert found is not None
    assert found.eager is not None
    assert parts.program is not None
    assert found.parts == parts.parts
    assert found.tail.with_gradient == parts.tail.with_gradient  # type: ignore[union-attr]
    model.train()
    [ours] = found.eager.run((x,), 0, 1)
    [theirs] = parts.program.run((x,), 0, parts.freeze)
    assert torch.equal(ours, theirs)
    assert ours.stride() == theirs.stride()
    assert not ours.requires_grad
    named = {weight.key for weight in parts.program.graph.weights}
    assert named == set(found.reads)


def test_an_eager_run_leaves_trained_modules_and_hooks_as_they_were() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    found = outline(model, x)
    assert found is not None
    assert found.eager is not None
    seen: list[str] = []
    model.block3.register_forward_hook(lambda *_: seen.append("trained"))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = {name: dict(module._forward_hooks) for name, module in model.named_modules()}
    drawn = torch.get_rng_state()
    found.eager.run((x,), 0, 1)
    assert not seen
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: dict(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training
    assert model.block3.training
    assert model.dropout.training
    assert not model.block1.training


@pytest.mark.parametrize(
    ("model", "shape"),
    some(
        1,
        [
            (frozen(Shared(), "second"), (4, 6)),
            (frozen(InPlaceAfter(), "first"), (4, 6)),
            (frozen(Reading(), "second"), (4, 6)),
        ],
    ),
    ids=["shared", "in place", "reading"],
)
def test_tails_that_read_more_than_tensors_are_outlined(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found, parts = outline(model, x), split(model, x)
    assert found is not None
    assert found.parts == parts.parts


def test_a_frozen_part_that_mixes_samples_has_no_outline() -> None:
    model = Mixing()
    freeze(model.first)
    freeze(model.second)
    assert outline(model, torch.randn(4, 6)) is None


class Towers(nn.Module):
    """Run a trained tower before a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.trained(x), self.frozen(x)], 1))


def test_a_trained_module_that_runs_before_the_freeze_point_leaves_no_outline() -> None:
    model = Towers()
    freeze(model.frozen)
    assert split(model, torch.randn(4, 6)).program is not None
    assert outline(model, torch.randn(4, 6)) is None
