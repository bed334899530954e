"""What changes in the frozen part after a job has started is found at the next step; the tail stays free."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from upriver.errors import FrozenChanged
from upriver.program.freeze import freeze_to, keep_in_eval
from upriver.program.guard import FrozenGuard
from upriver.program.split import Split, split
from upriver.program.trace import no_fast_path


@dataclasses.dataclass
class Config:
    """One for the frozen and for the trained part."""

    slope: float = 0.1
    temperature: float = 1.0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 1])


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.inner, self.norm = config, nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.scales, self.mask, self.array = {"a": 1.0}, torch.ones(8), np.ones(8, np.float32)
        self.leaky, self.partial = nn.LeakyReLU(0.2), functools.partial(torch.clamp, max=9.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.leaky(self.inner(x)) * self.config.slope * self.scales["a"] * self.mask)
        x = x + torch.from_numpy(self.array)
        return self.act(self.partial(x)) * sum(self.config.sizes)


class Net(nn.Module):
    """Its own forward reads one attribute on either side of the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.first, self.second = Block(self.config), Block(self.config)
        self.between, self.behind, self.cache = 1.0, 1.0, None
        self.shape, self.dropped, self.head = nn.Identity(), nn.Dropout(0.5), nn.Linear(8, 3)
        freeze_to(self, "second")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(8)
        x = self.second(self.shape(self.first(x * self.cache) * self.between))
        answer: torch.Tensor = self.head(self.dropped(x)) * self.behind / self.config.temperature
        return answer


@pytest.fixture
def cut() -> tuple[Net, Split]:
    torch.manual_seed(0)
    model = Net().train()
    parts = split(model, torch.randn(4, 8))
    assert parts.boundary == "second", parts.attempts
    return model, parts


def guarded(model: Net, parts: Split) -> FrozenGuard:
    assert parts.program is not None
    return FrozenGuard(
        model,
        parts.prefix_units,
        also=[weight.key for weight in parts.program.graph.weights],
        skipped=parts.skipped,
        attributes=parts.attributes,
    )


def setting(path: str, value: Any) -> Callable[[Net], object]:
    def change(model: Net) -> object:
        *owners, name = path.split(".")
        return setattr(functools.reduce(getattr, owners, model), name, value)

    return change


def parametrized(model: Net) -> None:
    parametrize.register_parametrization(model.first.inner, "bias", nn.Tanh())


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a slope": (setting("first.leaky.negative_slope", 0.9), "'negative_slope' of module 'first.leaky'"),
    "eps": (setting("second.norm.eps", 0.1), "'eps' of module 'second.norm'"),
    "a field of a configuration": (setting("config.slope", 0.5), "'slope' of class Config"),
    "a list in a configuration": (lambda m: m.config.sizes.append(1), "'sizes' of class Config"),
    "another configuration": (
        setting("second.config", Config(slope=2.0)),
        "'slope' of class Config|'config'",
    ),
    "a dict": (lambda m: m.first.scales.update(a=2.0), "'scales' of module 'first'"),
    "a function": (setting("first.act", torch.relu), "'act' of module 'first'"),
    "a partial": (lambda m: m.second.partial.keywords.update(max=1.0), "'partial' of module 'second'"),
    "a tensor in place": (lambda m: m.first.mask.zero_(), "'mask' of module 'first'"),
    "another tensor": (setting("first.mask", torch.zeros(8)), "'mask' of module 'first'"),
    "an array": (lambda m: m.first.array.fill(3), "'array' of module 'first'"),
    "a forward": (setting("second.forward", torch.tanh), "'forward' of module 'second'"),
    "a forward of a part": (setting("second.norm.forward", torch.tanh), "'forward' of module 'second.norm'"),
    "what the model reads before the cut": (setting("between", 2.0), "'between' of the model"),
    "a forward of the model": (setting("forward", torch.tanh), "'forward' of the model"),
    "a hook of a frozen module": (
        lambda m: m.first.inner.register_forward_hook(lambda *_: None),
        "a hook of module 'first.inner'",
    ),
    "a hook before the model": (
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        "a hook of the model",
    ),
    "another frozen module": (
        lambda m: setattr(m, "second", copy.deepcopy(m.second)),
        "submodule 'second' of the model",
    ),
    "another module inside": (setting("first.leaky", nn.ReLU()), "submodule 'leaky' of module 'first'"),
    "another module without weights": (setting("shape", nn.ReLU()), "submodule 'shape' of the model"),
    "a module more": (
        lambda m: m.first.add_module("more", nn.ReLU()),
        "submodule 'more' of module 'first'",
    ),
    "another parameter": (
        lambda m: setattr(m.first.inner, "bias", nn.Parameter(torch.ones(8), requires_grad=False)),
        "'first.inner.bias', which is frozen",
    ),
    "no parameter any more": (setting("first.inner.bias", None), "'first.inner.bias', which is frozen"),
    "another buffer": (setting("first.norm.running_mean", torch.ones(8)), "'first.norm.running_mean'"),
    "a parametrization": (parametrized, "'first.inner.bias'|'first.inner'"),
    "a parameter that trains": (
        lambda m: m.second.inner.weight.requires_grad_(True),
        "'second.inner.weight', which is frozen",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_guard_what_changes_in_the_frozen_part_is_named(change: str, cut: tuple[Net, Split]) -> None:
    apply, named = CHANGES[change]
    model, parts = cut
    guard = guarded(model, parts)
    guard.check_versions()
    apply(model)
    for _ in range(2):
        with pytest.raises(FrozenChanged, match=f"{named}.* changed after the job had started"):
            guard.check_versions()


def test_guard_a_hook_for_all_modules_is_an_error(cut: tuple[Net, Split]) -> None:
    guard = guarded(*cut)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        with pytest.raises(FrozenChanged, match="a hook of all modules"):
            guard.check_versions()
    finally:
        handle.remove()
    guard.check_versions()


FREE: dict[str, Callable[[Any], object]] = {
    "what the model reads behind the cut": setting("behind", 3.0),
    "a field that the tail reads": setting("config.temperature", 2.0),
    "a rate": setting("dropped.p", 0.0),
    "a module of the tail": lambda m: setattr(m, "dropped", nn.Dropout(0.1)),
    "the head": lambda m: setattr(m, "head", nn.Linear(8, 5)),
    "a hook of the tail": lambda m: m.head.register_forward_hook(lambda _m, _a, result: result * 2),
    "what nobody reads": setting("first.note", "anything"),
    "equal values": setting("config.sizes", [1, 1]),
    "the same weights": lambda m: m.first.load_state_dict(copy.deepcopy(m.first.state_dict()), assign=True),
    "a mode": lambda m: m.train(),
    "a forward of the tail": setting("dropped.forward", torch.relu),
}


@pytest.mark.parametrize("change", FREE)
def test_guard_what_changes_in_the_tail_is_no_change_and_counts_at_once(
    change: str, cut: tuple[Net, Split]
) -> None:
    model, parts = cut
    assert parts.program is not None
    x, guard = torch.randn(4, 8), guarded(model, parts)
    features = parts.program.run((x,), 0, parts.freeze)[0]
    parts.tail(features)
    FREE[change](model)
    for _ in range(2):
        guard.check_versions()
        torch.manual_seed(1)
        answer = parts.tail(features)
        keep_in_eval(model, list(parts.in_eval))
        torch.manual_seed(1)
        with no_fast_path():
            assert torch.equal(answer, model(x))
    guard.check_values()


class Wrapping(nn.Module):
    """Wraps the forward of its subclasses, as layers of transformers do."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward = cls.forward

        def wrapped(self: nn.Module, *args: Any) -> Any:
            return forward(self, *args)

        cls.forward = wrapped  # type: ignore[assignment]


class Wrapped(Wrapping):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def output_capturing_hook(*_: Any) -> None:
    """Counts as harmless by its name."""


@pytest.mark.parametrize("hooked", [False, True])
def test_tail_a_skipped_module_whose_class_wraps_forwards_of_subclasses_is_skipped(hooked: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Wrapped(), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    freeze_to(model, "0")
    if hooked:
        model[0].register_forward_hook(output_capturing_hook)
    parts = split(model.train(), x)
    assert parts.program is not None and parts.boundary == "0", parts.attempts
    features = parts.program.run((x,), 0, parts.freeze)[0]
    assert torch.equal(parts.tail(features), model(x))
