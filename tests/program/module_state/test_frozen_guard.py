"""Check that changes to the frozen part are found at the next step, and that the tail stays free."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.examples import often, some
from upriver.errors import FrozenChanged
from upriver.program.eval_mode import no_fast_path
from upriver.program.freeze import fold, freeze_to, keep_in_eval
from upriver.program.module_state import frozen_guard
from upriver.program.module_state.attributes import AttributeSnapshot
from upriver.program.module_state.frozen_guard import FrozenGuard
from upriver.program.split.split import Split, split


@dataclasses.dataclass
class Config:
    """One configuration for the frozen and for the trained part."""

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
    """Read one attribute on either side of the cut in its own forward."""

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


def guarded(model: nn.Module, parts: Split, *, asked: list[bool] | None = None) -> FrozenGuard:
    """Return a guard as a job has it.

    Args:
        asked: Results of splitting the model again.
    """
    assert parts.program is not None

    def again(hooked: bool) -> AttributeSnapshot | None:
        read = parts.still_so(split(model, torch.randn(4, 8)), hooked=hooked)
        if asked is not None:
            asked.append(read is not None)
        return read

    return FrozenGuard(
        model,
        parts.prefix_units,
        also=[weight.key for weight in parts.program.graph.weights],
        skipped=parts.skipped,
        attributes=parts.attributes,
        again=again,
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


@pytest.mark.parametrize(
    "change",
    often(CHANGES, "a tensor in place", "a hook of a frozen module"),
)
def test_guard_what_changes_in_the_frozen_part_is_named(change: str, cut: tuple[Net, Split]) -> None:
    apply, named = CHANGES[change]
    model, parts = cut
    guard = guarded(model, parts)
    guard.check_versions()
    apply(model)
    for _ in range(2):
        with pytest.raises(FrozenChanged, match=f"{named}.* changed after the job had started"):
            guard.check_versions()


def test_guard_a_write_of_the_same_values_costs_one_tensor_not_all(
    cut: tuple[Net, Split], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DistributedDataParallel writes frozen buffers in each forward, as they are."""
    model, parts = cut
    guard, folded = guarded(model, parts), list[torch.Tensor]()
    weight = next(tensor for tensor in guard._tensors().values() if tensor.numel())
    monkeypatch.setattr(frozen_guard, "fold", lambda tensor: folded.append(tensor) or fold(tensor))
    guard.check_versions()
    assert not folded
    with torch.no_grad():
        weight.copy_(weight.clone())
    guard.check_versions()
    assert [tensor is weight for tensor in folded] == [True]
    guard.check_values()
    assert len(folded) > 2


@pytest.mark.full
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


@pytest.mark.parametrize("change", often(FREE, "a module of the tail"))
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


class Holding(nn.Module):
    """Check which parameters and buffers it holds."""

    def __init__(self, *, any_of_them: bool) -> None:
        super().__init__()
        self.inner, self.any_of_them = nn.Linear(8, 8, bias=False), any_of_them
        self.register_buffer("shift", None)
        self.register_parameter("gain", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * (2 if hasattr(self, "twice") else 1)
        x = x if self.shift is None else x + self.shift
        x = x if self.gain is None else x * self.gain
        return x + sum(b.sum() for b in self.buffers()) if self.any_of_them else x


MORE: dict[str, tuple[Callable[[Any], object], str]] = {
    "one that is looked for": (lambda m: m.register_buffer("twice", torch.ones(1)), "'twice' of module '0'"),
    "a buffer that was None": (
        lambda m: setattr(m, "shift", torch.ones(8)),
        "'shift' .*was None, is a tensor",
    ),
    "a parameter that was None": (lambda m: setattr(m, "gain", frozen()), "'gain' of module '0'"),
    "a bias": (lambda m: setattr(m.inner, "bias", frozen()), "'bias' of module '0.inner'"),
    "one of all buffers": (lambda m: m.register_buffer("new", torch.ones(1)), "'_buffers' of module '0'"),
    "one of an inner module": (
        lambda m: m.inner.register_buffer("new", torch.ones(1)),
        "'_buffers' of module '0.inner'",
    ),
}


def frozen() -> nn.Parameter:
    return nn.Parameter(torch.full((8,), 2.0), requires_grad=False)


@pytest.mark.parametrize("change", some(1, MORE))
def test_guard_a_parameter_or_buffer_that_comes_counts_where_it_is_read(change: str) -> None:
    apply, named = MORE[change]
    iterates, x = named.startswith("'_buffers'"), torch.randn(4, 8)
    model = nn.Sequential(Holding(any_of_them=iterates), nn.Linear(8, 3)).train()
    freeze_to(model, "0")
    parts = split(model, x)
    guard = guarded(model, parts)
    model[0].register_parameter("unread", frozen())
    guard.check_versions()
    before = model(x)
    apply(model[0])
    assert not torch.equal(model(x), before)
    with pytest.raises(FrozenChanged, match=named):
        guard.check_versions()


class Hiding(nn.Module):
    """Read values that no walk through submodules and buffers finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(8, 8), [nn.Linear(8, 8).requires_grad_(False)]
        self.scale = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.hidden[0](self.inner(x)) * self.scale * self.__dict__.get("late", 1.0)
        return answer


HIDDEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "one that was not there": (lambda m: setattr(m, "late", 2.0), r"'late' .* \(was absent, is 2.0\)"),
    "a weight of a hidden module": (
        lambda m: m.hidden[0].weight.data.mul_(2),
        "'weight' of a Linear that is no submodule",
    ),
    "a tensor without a word": (lambda m: m.scale.data.mul_(2), "'scale' of module '0'"),
}


@pytest.mark.parametrize("change", some(1, HIDDEN))
def test_guard_what_is_written_without_a_word_is_found_with_the_values_of_an_epoch(change: str) -> None:
    apply, named = HIDDEN[change]
    model = nn.Sequential(Hiding(), nn.Linear(8, 3)).train()
    freeze_to(model, "0")
    parts = split(model, torch.randn(4, 8))
    assert parts.boundary == "0"
    guard = guarded(model, parts)
    guard.check_values()
    apply(model[0])
    with pytest.raises(FrozenChanged, match=named):
        guard.check_values()


class Settings:
    """Settings where an absent one stands for its default."""

    bound = False


class Checkpointing(nn.Module):
    """Read settings as models of transformers do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.inner, self.gradient_checkpointing = config, nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self.config, "use_cache", False):
            x = x * 2
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.inner, x)
        top = getattr(self.config, "top", 99.0) if self.config.bound else 99.0
        return self.inner(x).clamp(max=top)


def checkpointing() -> tuple[nn.Module, Split]:
    torch.manual_seed(0)
    config = Settings()
    layers = [Checkpointing(config), nn.ReLU(), Checkpointing(config), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).train()
    freeze_to(model, "0")
    return model, split(model, torch.randn(4, 8))


def checkpoint(layer: Any, *, reentrant: bool = False) -> None:
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=reentrant
    )


SAME: dict[str, Callable[[Any], object]] = {
    "a setting that was absent": lambda m: setattr(m[0].config, "use_cache", False),
    "checkpointing of the frozen layer": lambda m: checkpoint(m[0]),
    "checkpointing everywhere": lambda m: (checkpoint(m[0]), checkpoint(m[2])),
    "a setting of its class": lambda m: setattr(m[0].config, "bound", True),
    "another value of the same meaning": lambda m: setattr(m[0], "gradient_checkpointing", 0),
}


@pytest.mark.parametrize("change", some(1, SAME))
def test_guard_what_comes_to_the_same_is_no_change(change: str) -> None:
    model, parts = checkpointing()
    x, asked = torch.randn(4, 8), list[bool]()
    assert parts.boundary == "0" and parts.program is not None
    guard = guarded(model, parts, asked=asked)
    features = parts.program.run((x,), 0, parts.freeze)[0]
    SAME[change](model)
    for _ in range(2):
        guard.check_versions()
        ours, whole = parts.tail(features), model(x)
        assert torch.equal(ours, whole)
        for one, other in zip(*(gradients(model, answer) for answer in (ours, whole)), strict=True):
            assert torch.equal(one, other)
    assert asked == [True]  # and not at every step


def gradients(model: nn.Module, answer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(answer.square().sum(), [p for p in model.parameters() if p.requires_grad])


@pytest.mark.full
def test_guard_a_setting_that_comes_and_goes_is_looked_at_once_each() -> None:
    model, parts = checkpointing()
    asked: list[bool] = []
    guard = guarded(model, parts, asked=asked)
    config: Any = model[0].config
    for _ in range(3):
        config.use_cache = True
        with pytest.raises(
            FrozenChanged, match=r"'use_cache' of .* \(was absent, is True\), which the frozen"
        ):
            guard.check_versions()
        config.use_cache = False
        guard.check_versions()
        del config.use_cache
        guard.check_versions()
    assert asked == [False, True]


@pytest.mark.full
def test_guard_what_is_read_only_with_new_settings_counts_once_they_are_there() -> None:
    model, parts = checkpointing()
    config: Any = model[0].config
    guard = guarded(model, parts)
    config.top = 0.1
    guard.check_versions()  # nothing reads it
    config.top = 99.0
    config.bound = True
    guard.check_versions()
    config.top = 98.0  # no random input comes near
    with pytest.raises(FrozenChanged, match=r"'top' of class Settings.*\(was 99.0, is 98.0\)"):
        guard.check_versions()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", some(1, [False, True]))
@pytest.mark.full
def test_guard_a_hook_that_asks_for_a_gradient_gives_one_as_in_the_whole_model(reentrant: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), Checkpointing(Settings()), nn.Linear(8, 3)]
    model, x = nn.Sequential(*layers).train(), torch.randn(4, 8)
    freeze_to(model, "1")
    checkpoint(model[2], reentrant=reentrant)  # it gives no gradient where its input asks for none
    parts = split(model, torch.randn(4, 8))
    assert parts.program is not None and parts.boundary == "1"
    guard, features = guarded(model, parts), parts.program.run((x,), 0, parts.freeze)[0]

    def gradients(answer: torch.Tensor) -> list[list[float] | None]:
        model.zero_grad()
        answer.square().sum().backward()
        return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]

    for hooked in (False, True, False):
        if hooked:
            hook = model[0].register_forward_hook(make_inputs_require_grads)
        guard.check_versions()
        assert gradients(parts.tail(features)) == gradients(model(x))
        if hooked:
            hook.remove()


def make_inputs_require_grads(_module: nn.Module, _args: Any, result: torch.Tensor) -> None:
    """Ask for a gradient, as the transformers hook of this name does."""
    result.requires_grad_(True)


class Wrapping(nn.Module):
    """Wrap the forward of its subclasses, as layers of transformers do."""

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
    """Do nothing; the guard treats a hook of this name as harmless."""


@pytest.mark.parametrize("hooked", some(1, [False, True]))
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


# ----------------------------------------------------------------------------------- global variables

GAIN, STEEP, CALLS, BEHIND, UNREAD = 1.0, False, 0, 1.0, 1.0
FLAGS, SETTINGS, SEEN, STATS = {"twice": False, "sizes": [1]}, Config(), list[int](), SimpleNamespace(calls=0)


def squashed(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 4) if STEEP else torch.tanh(x)


class Namespace:
    """A namespace of class attributes, without instances."""

    scale = 1.0
    offset = staticmethod(lambda: 0.0)
    sizes: ClassVar = {"a": 1}
    unread = 1.0


class Inherited(Namespace):
    """A subclass of the namespace, with inherited attributes."""


def shifted(x: torch.Tensor, by: float = 0.0, *, times: float = 1.0) -> torch.Tensor:
    return (x + by) * times


def closing(power: float) -> Callable[[torch.Tensor], torch.Tensor]:
    count, seen = 0, []

    def closed(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        seen.append(count)
        return x**power

    return closed


CLOSED, OFFSET = closing(2.0), vars(Namespace)["offset"]

ELSEWHERE: Any = ModuleType("settings_of_a_test")
sys.modules[ELSEWHERE.__name__] = ELSEWHERE
ELSEWHERE.within = ModuleType("settings_of_a_test.within")
ELSEWHERE.within.gain = 1.0
ELSEWHERE.scale, ELSEWHERE.unread, ELSEWHERE.bound = 1.0, 1.0, None


class ByGlobals(nn.Linear):
    gain, unread = 1.0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        SEEN.append(CALLS)
        STATS.calls += 1
        x = CLOSED(squashed(super().forward(x)) * GAIN * SETTINGS.slope * type(self).gain)
        x = x * Namespace.scale * Inherited.sizes["a"] * ELSEWHERE.scale
        x = shifted(x * ELSEWHERE.within.gain + Namespace.offset())
        x = x if ELSEWHERE.bound is None else x.clamp(max=ELSEWHERE.bound)
        return x * 2 if FLAGS["twice"] else x


class Behind(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * BEHIND


@pytest.fixture(scope="module")
def by_globals() -> tuple[nn.Module, Split]:
    torch.manual_seed(0)
    model = nn.Sequential(ByGlobals(8, 8), Behind(8, 3)).train()
    freeze_to(model, "0")
    parts = split(model, torch.randn(4, 8))
    assert parts.boundary == "0", parts.attempts
    return model, parts


HERE = "Python's module 'tests.program.module_state.test_frozen_guard'"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    some(
        1,
        [
            ("GAIN", 2.0, f"'GAIN' of {HERE} (was 1.0, is 2.0)"),
            ("STEEP", True, f"'STEEP' of {HERE} (was False, is True)"),
            ("FLAGS", {"twice": True}, f"'FLAGS' of {HERE}"),
            ("SETTINGS", Config(slope=3.0), "'slope' of class Config"),
            ("squashed", torch.relu, f"'squashed' of {HERE}"),
            ("CLOSED", closing(3.0), f"'CLOSED' of {HERE}"),
        ],
    ),
)
def test_a_global_variable_of_the_frozen_part_that_changes_is_an_error(
    by_globals: tuple[nn.Module, Split], monkeypatch: pytest.MonkeyPatch, name: str, value: Any, message: str
) -> None:
    guard = guarded(*by_globals)
    guard.check_versions()
    with monkeypatch.context() as changed:
        changed.setitem(globals(), name, value)
        with pytest.raises(FrozenChanged, match=re.escape(message)):
            guard.check_versions()
    guard.check_versions()


def close_over_another(_model: nn.Module) -> None:
    CLOSED.__closure__[1].cell_contents = 3.0  # type: ignore[attr-defined]


IN_PLACE: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], str]] = {
    "a dict": (
        lambda m: FLAGS.update(twice=True),
        lambda m: FLAGS.update(twice=False),
        "'FLAGS' of Python's",
    ),
    "an object": (
        lambda m: setattr(SETTINGS, "slope", 9.0),
        lambda m: setattr(SETTINGS, "slope", 0.1),
        "'slope' of class Config",
    ),
    "another module": (
        lambda m: setattr(ELSEWHERE, "scale", 2.0),
        lambda m: setattr(ELSEWHERE, "scale", 1.0),
        "'scale' of Python's module 'settings_of_a_test' (was 1.0, is 2.0)",
    ),
    "a module in another one": (
        lambda m: setattr(ELSEWHERE.within, "gain", 2.0),
        lambda m: setattr(ELSEWHERE.within, "gain", 1.0),
        "'gain' of Python's module 'settings_of_a_test.within' (was 1.0, is 2.0)",
    ),
    "a function's default": (
        lambda m: setattr(shifted, "__defaults__", (1.0,)),
        lambda m: setattr(shifted, "__defaults__", (0.0,)),
        "'shifted' of Python's",
    ),
    "a default by keyword": (
        lambda m: setattr(shifted, "__kwdefaults__", {"times": 2.0}),
        lambda m: setattr(shifted, "__kwdefaults__", {"times": 1.0}),
        "'shifted' of Python's",
    ),
    "a static method of a class": (
        lambda m: setattr(Namespace, "offset", staticmethod(lambda: 1.0)),
        lambda m: setattr(Namespace, "offset", OFFSET),
        "'offset' of class Namespace itself",
    ),
    "what was None": (
        lambda m: setattr(ELSEWHERE, "bound", 0.5),
        lambda m: setattr(ELSEWHERE, "bound", None),
        "'bound' of Python's module 'settings_of_a_test' (was None, is 0.5)",
    ),
    "a class": (
        lambda m: setattr(Namespace, "scale", 2.0),
        lambda m: setattr(Namespace, "scale", 1.0),
        "'scale' of class Namespace itself (was 1.0, is 2.0)",
    ),
    "a dict of a class's base": (
        lambda m: Namespace.sizes.update(a=2),
        lambda m: Namespace.sizes.update(a=1),
        "'sizes' of class Namespace itself",
    ),
    "the module's own class": (
        lambda m: setattr(ByGlobals, "gain", 2.0),
        lambda m: setattr(ByGlobals, "gain", 1.0),
        "'gain' of class ByGlobals",
    ),
    "what a function closes over": (
        close_over_another,
        lambda m: setattr(CLOSED.__closure__[1], "cell_contents", 2.0),  # type: ignore[attr-defined]
        "'CLOSED' of Python's",
    ),
}


@pytest.mark.parametrize("change", some(2, IN_PLACE))
def test_what_global_variables_hold_that_changes_is_an_error(
    by_globals: tuple[nn.Module, Split], change: str
) -> None:
    guard, (apply, undo, message) = guarded(*by_globals), IN_PLACE[change]
    guard.check_versions()
    apply(by_globals[0])
    try:
        with pytest.raises(FrozenChanged, match=re.escape(message)):
            guard.check_versions()
    finally:
        undo(by_globals[0])
    guard.check_versions()


FREE_GLOBALS: dict[str, Callable[[], object]] = {
    "a list that the forward fills": lambda: SEEN.append(9),
    "a count that it keeps": lambda: setattr(STATS, "calls", 99),
    "what its closure collects": lambda: CLOSED(torch.ones(1)),
    "an attribute of a class that it does not read": lambda: setattr(Namespace, "unread", 2.0),
    "a variable of another module": lambda: setattr(ELSEWHERE, "unread", 2.0),
    "one of its own class": lambda: setattr(ByGlobals, "unread", 2.0),
    "an item that is equal": lambda: FLAGS.update(sizes=[1]),
}


@pytest.mark.parametrize("change", FREE_GLOBALS)
def test_what_the_frozen_part_does_not_read_of_them_may_change(
    by_globals: tuple[nn.Module, Split], change: str
) -> None:
    asked: list[bool] = []
    guard = guarded(*by_globals, asked=asked)
    FREE_GLOBALS[change]()
    guard.check_versions()
    assert not asked


@pytest.mark.parametrize(("name", "value"), [("CALLS", 99), ("BEHIND", 2.0), ("UNREAD", 2.0), ("GAIN", 1.0)])
def test_other_global_variables_may_change(
    by_globals: tuple[nn.Module, Split], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    asked: list[bool] = []
    guard = guarded(*by_globals, asked=asked)
    monkeypatch.setitem(globals(), name, value)
    guard.check_versions()
    assert not asked
