"""Memory of training the tail of a split model, against real runs, and as a profile says it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.profile.test_memory import allocated_at_most
from upriver.client.planning import STATES_PER_WEIGHT, measure_tail
from upriver.errors import ModelError
from upriver.profile.tail import tail_memory, tail_weights
from upriver.program.freeze import freeze_to
from upriver.program.split import Split, split

MICRO = 4


def of_images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 5),
    )


class Sequences(nn.Module):
    """Has its samples in the second dimension behind the freeze point."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
        self.answer = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.layer(self.embed(x.transpose(0, 1))).mean(0))


class Looks(nn.Module):
    """A tail that branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        answer = self.last(hidden)
        return answer if answer.sum().item() > 0 else 2 * answer


MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "images": (of_images, "2", (3, 16, 16)),
    "sequences": (Sequences, "embed", (10, 8)),
}


def cut(model: nn.Module, freeze: str, shape: tuple[int, ...]) -> tuple[Split, tuple[torch.Tensor, ...]]:
    freeze_to(model, freeze)
    x = torch.randn(MICRO, *shape)
    parts = split(model, x)
    assert parts.program is not None, parts.why_not
    return parts, tuple(parts.program.run((x,), 0, parts.program.num_stages))


def training_peak(model: nn.Module, parts: Split, features: torch.Tensor) -> int:
    """Of an iteration of Adam after the first, its state and the features counted in."""
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)

    def iteration() -> None:
        parts.tail(features).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    iteration()
    states = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    return allocated_at_most(iteration) + states + features.nbytes


@pytest.mark.parametrize("name", MODELS)
def test_training_the_tail_takes_no_more_at_any_batch_than_the_profile_says(name: str) -> None:
    make, freeze, shape = MODELS[name]
    model = make()
    parts, features = cut(model, freeze, shape)
    profile = measure_tail(model, parts, features, samples=MICRO, batch_size=32)
    weights = tail_weights(model, parts)
    for batch in (2, 8, 32, 72):
        whole = parts.tail.values.concatenate([features] * -(-batch // MICRO))
        (given,) = parts.tail.values.select(whole, range(batch))
        estimate = tail_memory(model, parts, features, samples=MICRO, batch_size=batch)
        says = profile.param_bytes + profile.peak_bytes * batch
        exact = training_peak(model, parts, given)
        assert estimate.low_bytes <= exact <= estimate.high_bytes - estimate.reserve_bytes
        assert weights + estimate.high_bytes <= says
        assert profile.param_bytes >= weights


def test_the_weights_of_a_tail_are_those_that_no_stage_has() -> None:
    model = of_images()
    parts, _ = cut(model, "2", (3, 16, 16))
    tail = [tensor for module in model[3:] for tensor in (*module.parameters(), *module.buffers())]
    assert tail_weights(model, parts) == sum(tensor.nbytes for tensor in tail)


def test_a_tail_that_looks_at_its_data_has_what_backward_saves_twice() -> None:
    model = Looks()
    parts, features = cut(model, "first", (6,))
    with pytest.raises(ModelError, match="without data"):
        tail_memory(model, parts, features, samples=MICRO, batch_size=8)
    profile = measure_tail(model, parts, features, samples=MICRO, batch_size=8)
    assert profile.param_bytes == STATES_PER_WEIGHT * sum(p.nbytes for p in model.last.parameters())
    assert profile.peak_bytes > 0
