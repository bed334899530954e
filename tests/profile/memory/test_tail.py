"""Check the memory of training the tail of a split model: real runs, and the value in a profile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.examples import often, some
from tests.profile.memory.test_estimator import allocated_at_most
from upriver.errors import ModelError
from upriver.finetune.planning.plan_builder import STATES_PER_WEIGHT, measure_tail, time_tail
from upriver.profile.memory.estimator import tail_peak
from upriver.profile.memory.tail import tail_memory, tail_weights
from upriver.program.freeze import freeze_to
from upriver.program.split.split import Split, split

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
    """A model that has its samples in the second dimension after the freeze point."""

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


class Attends(nn.Module):
    """A tail of attention with dropout, for which torch has another kernel than without."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 4, dropout=dropout, batch_first=True)
        self.answer = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        seen, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.answer(seen.mean(1))


def drops(dropout: float = 0.25) -> nn.Module:
    """Return a tail with dropout, and with a frozen unit whose dropout stays inactive."""
    frozen = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout())
    frozen.requires_grad_(False)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(dropout), frozen, nn.Linear(64, 3)
    )


RANDOM: dict[str, tuple[Callable[..., nn.Module], str, tuple[int, ...]]] = {
    "attention": (Attends, "embed", (24, 8)),
    "dropout": (drops, "0", (8,)),
}

MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "images": (of_images, "2", (3, 16, 16)),
    "sequences": (Sequences, "embed", (10, 8)),
}


def cut(
    model: nn.Module, freeze: str, shape: tuple[int, ...], *, samples: int = MICRO
) -> tuple[Split, tuple[torch.Tensor, ...]]:
    freeze_to(model, freeze)
    x = torch.randn(samples, *shape)
    parts = split(model, x)
    assert parts.program is not None, parts.why_not
    return parts, tuple(parts.program.run((x,), 0, parts.program.num_stages))


def training_peak(model: nn.Module, parts: Split, features: torch.Tensor) -> int:
    """Return the peak of an Adam iteration after the first, including its state and the features."""
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)

    def iteration() -> None:
        parts.tail(features).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    iteration()
    states = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    return allocated_at_most(iteration) + states + features.nbytes


@pytest.mark.parametrize("name", often(MODELS, "images"))
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


@pytest.mark.full
@pytest.mark.parametrize("name", often(MODELS, "images"))
@pytest.mark.parametrize(
    "layout", [pytest.param(torch.contiguous_format, marks=pytest.mark.full), torch.channels_last]
)
def test_a_batch_of_any_size_is_laid_out_as_the_loop_lays_it_out(
    name: str, layout: torch.memory_format
) -> None:
    make, freeze, shape = MODELS[name]
    model = make()
    parts, features = cut(model, freeze, shape)
    features = tuple(each.contiguous(memory_format=layout) if each.dim() == 4 else each for each in features)

    def of(number: int) -> tuple[torch.Tensor, ...]:
        whole = parts.tail.values.concatenate([features] * -(-number // MICRO))
        return parts.tail.values.select(whole, range(number))

    for batch in (3, 4, 13):
        wanted = tail_peak(model, of(batch), samples=batch, run=parts.tail, features_of=of)
        assert tail_memory(model, parts, features, samples=MICRO, batch_size=batch) == wanted


@pytest.mark.full
@pytest.mark.parametrize("name", often(MODELS, "images"))
def test_a_huge_batch_takes_no_longer_to_work_out(name: str) -> None:
    make, freeze, shape = MODELS[name]
    model = make()
    parts, features = cut(model, freeze, shape)
    usual = tail_memory(model, parts, features, samples=MICRO, batch_size=512)
    for batch in (10**8, 10**12):
        huge = tail_memory(model, parts, features, samples=MICRO, batch_size=batch)
        assert huge.samples == batch
        assert huge.growing_bytes == pytest.approx(usual.growing_bytes, rel=0.05)
        assert huge.high_bytes <= huge.fixed_bytes + huge.growing_bytes * batch


@pytest.mark.parametrize("name", often(RANDOM, "dropout"))
@pytest.mark.full
def test_a_tail_handed_over_in_eval_takes_what_it_takes_in_training(name: str) -> None:
    make, freeze, shape = RANDOM[name]
    model = make()
    parts, features = cut(model, freeze, shape)
    found = []
    for training in (True, False):
        model.train(training)
        estimate = tail_memory(model, parts, features, samples=MICRO, batch_size=32)
        profile = measure_tail(model, parts, features, samples=MICRO, batch_size=32)
        saved = time_tail(model, parts, features)[1]
        found.append((estimate, profile.param_bytes, profile.peak_bytes, saved))
    assert found[0] == found[1]

    model.train()
    whole = parts.tail.values.concatenate([features] * 8)
    exact = training_peak(model, parts, *whole)
    assert found[1][0].low_bytes <= exact <= found[1][0].high_bytes - found[1][0].reserve_bytes


@pytest.mark.parametrize("name", often(RANDOM, "attention"))
@pytest.mark.full
def test_masks_of_dropout_are_counted_in_eval_too(name: str) -> None:
    make, freeze, shape = RANDOM[name]
    counted = []
    for dropout in (0.25, 0.0):
        model = make(dropout).eval()
        parts, features = cut(model, freeze, shape)
        estimate = tail_memory(model, parts, features, samples=MICRO, batch_size=32)
        counted.append((estimate.growing_bytes, time_tail(model, parts, features)[1]))
    assert counted[0][0] > counted[1][0]
    assert counted[0][1] > counted[1][1]


@pytest.mark.parametrize("name", often(RANDOM, "attention"))
@pytest.mark.parametrize("training", some(1, [True, False]))
def test_measuring_a_tail_leaves_the_model_as_it_was(name: str, training: bool) -> None:
    make, freeze, shape = RANDOM[name]
    model = make()
    parts, features = cut(model, freeze, shape)
    model.train(training)
    next(reversed(list(model.children()))).train(not training)  # modes may differ between modules
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = {path: module.training for path, module in model.named_modules()}
    state = torch.get_rng_state()
    measure_tail(model, parts, features, samples=MICRO, batch_size=32)
    assert {path: module.training for path, module in model.named_modules()} == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.full
def test_one_sample_is_measured_although_a_batchnorm_cannot_train_on_it() -> None:
    model = drops()
    parts, features = cut(model.eval(), "0", (8,), samples=1)
    profile = measure_tail(model, parts, features, samples=1, batch_size=32)
    assert profile.seconds[1] > 0
    several, more = cut(drops().eval(), "0", (8,), samples=2)
    assert time_tail(model, parts, features)[1] == time_tail(several.tail.model, several, more)[1] // 2


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


@pytest.mark.full
@pytest.mark.filterwarnings(
    "default:The .grad attribute:UserWarning"
)  # torch's own, while it traces branches
def test_time_tail_of_branches_that_torch_traces_is_measured() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8).requires_grad_(False)
            self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.second(self.first(x)).tanh()
            return torch.cond(h.sum() > 0, lambda h: self.head(h), lambda h: self.head(h) * 2, (h,))  # type: ignore[no-any-return]

    model, x = Branch(), torch.randn(4, 8)
    parts = split(model, x)
    assert parts.program is not None
    assert time_tail(model, parts, parts.program.run((x,), 0, parts.freeze))[1] > 0
