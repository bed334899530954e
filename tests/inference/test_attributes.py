"""Check that a changed attribute that a captured forward has read is an error, never an old answer."""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import upriver
from tests.inference.asking import here
from upriver.errors import FrozenChanged
from upriver.inference.offload import Offload


class Kind(enum.Enum):
    PLAIN = 1
    TWICE = 2


@dataclasses.dataclass
class Inner:
    scale: float = 1.0
    unread: str = ""


@dataclasses.dataclass(slots=True)
class Slots:
    shift: float = 0.0


class Config:
    def __init__(self) -> None:
        self.inner = Inner()
        self.slots = Slots()
        self.double = False
        self.name = "first"


class Aliases:
    """Translate names, as configurations of transformers do."""

    def __init__(self) -> None:
        self.power = 1.5

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__({"exponent": "power"}.get(name, name))


class Scaling:
    """Scale, called through a method, a partial or a reference."""

    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def positive(x: torch.Tensor, *, least: float = 0.0) -> torch.Tensor:
    return x.clamp_min(least)


class Odd(nn.Module):
    """Read attributes of many forms."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.drop, self.conv = nn.LayerNorm(8), nn.Dropout(0.5), nn.Conv1d(1, 1, 3, padding=1)
        self.statistics = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.ones(8))
        self.config, self.aliases, self.space = Config(), Aliases(), types.SimpleNamespace(bias=0.0)
        self.kind, self.order, self.weights = Kind.PLAIN, [0, 1], {"a": {"b": 1.0}}
        self.chosen = {1}
        self.array, self.constant = np.ones(8, np.float32), torch.ones(8)
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.partial = functools.partial(positive, least=0.0)
        self.hidden = [nn.Linear(8, 8)]
        self.cache: torch.Tensor | None = None
        self.method, self.bound = Scaling().__call__, functools.partial(Scaling().__call__)
        self.kept = Scaling()
        self.link = weakref.ref(self.kept)
        self.ring, self.maps = collections.deque([1.0]), collections.ChainMap({"by": 1.0})
        self.numbers: list[Any] = [bytearray(b"\1"), array.array("d", [1.0]), ctypes.c_double(1.0)]
        self.numbers.append(memoryview(bytearray(b"\1")))
        self.unread = 1

    @property
    def scaled(self) -> float:
        return self.config.inner.scale * 2

    def shape(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.ones(x.shape[-1])
        x = self.norm(self.first(x)) * self.scaled + self.config.slots.shift + self.space.bias
        x = self.statistics(self.conv(self.drop(x)[:, None])[:, 0]) * self.cache
        if self.kind is Kind.TWICE or self.config.double:
            x = x * 2
        x = (self.act(x), x)[self.order[0]] * self.weights["a"]["b"] * len(self.chosen)
        x = x * torch.from_numpy(self.array) + self.constant * self.table
        x = self.partial(self.hidden[0](self.shape(x))) * self.rate + getattr(self, "extra", 0.0)
        x = self.method(self.bound(x)) * self.link().by * self.ring[0] * self.maps["by"]  # type: ignore[union-attr]
        x = x * self.numbers[0][0] * self.numbers[1][0] * self.numbers[2].value * self.numbers[3][0]
        answer: torch.Tensor = self.last(x.abs() ** self.aliases.exponent)  # type: ignore[attr-defined]
        return answer


Change = Callable[[Odd], Callable[[], object]]
"""Change a model, and return a function that undoes the change."""


def setting(path: str, value: Any) -> Change:
    def change(model: Odd) -> Callable[[], object]:
        *owners, name = path.split(".")
        owner = reached(model, owners)
        if name not in getattr(owner, "__dict__", {}) and name not in getattr(owner, "__slots__", ()):
            setattr(owner, name, value)
            return lambda: delattr(owner, name)
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def item(path: str, key: Any, new: Any, old: Any) -> Change:
    def change(model: Odd) -> Callable[[], object]:
        owner = reached(model, path.split("."))
        owner[key] = new
        return lambda: owner.__setitem__(key, old)

    return change


def reached(owner: Any, path: list[str]) -> Any:
    for name in path:
        owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
    return owner


def calling(do: Callable[[Odd], object], undo: Callable[[Odd], object]) -> Change:
    def change(model: Odd) -> Callable[[], object]:
        do(model)
        return lambda: undo(model)

    return change


def buffer(model: Odd) -> Callable[[], object]:
    before, model.table = model.table, torch.full((8,), 2.0)
    return lambda: setattr(model, "table", before)


def swapped(model: Odd) -> Callable[[], object]:
    before, model.hidden[0] = model.hidden[0], nn.Linear(8, 8)
    return lambda: model.hidden.__setitem__(0, before)


def bias(model: Odd) -> Callable[[], object]:
    before, model.last.bias = model.last.bias, None  # type: ignore[assignment]
    return lambda: setattr(model.last, "bias", before)


def parametrized(model: Odd) -> Callable[[], object]:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    parametrize.register_parametrization(model.first, "weight", Double())
    return lambda: parametrize.remove_parametrizations(model.first, "weight", leave_parametrized=False)


CHANGES: dict[str, tuple[Change, str]] = {
    "a norm's eps": (setting("norm.eps", 0.5), "'eps' of module 'norm'"),
    "a batch norm's eps": (setting("statistics.eps", 0.5), "'eps' of module 'statistics'"),
    "a convolution's padding": (setting("conv.padding", (0,)), "'padding' of module 'conv'"),
    "a number in a nested object": (setting("config.inner.scale", 2.0), "'scale' of class Inner"),
    "a slot": (setting("config.slots.shift", 1.0), "'shift' of class Slots"),
    "a flag of a configuration": (setting("config.double", True), "'double' of class Config"),
    "another object": (setting("config.inner", Inner(3.0)), "'scale' of class Inner"),
    "a name that is translated": (setting("aliases.power", 2.0), "'power' of class Aliases"),
    "a namespace": (setting("space.bias", 1.0), "'bias' of class SimpleNamespace"),
    "an enumeration": (setting("kind", Kind.TWICE), "'kind' of the model"),
    "a list in place": (
        calling(lambda m: m.order.reverse(), lambda m: m.order.reverse()),
        "'order' of the model",
    ),
    "a dict in a dict": (
        calling(lambda m: m.weights["a"].update(b=2.0), lambda m: m.weights["a"].update(b=1.0)),
        "'weights' of the model",
    ),
    "a set in place": (
        calling(lambda m: m.chosen.add(7), lambda m: m.chosen.remove(7)),
        "'chosen' of the model",
    ),
    "an array in place": (
        calling(lambda m: m.array.fill(2), lambda m: m.array.fill(1)),
        "'array' of the model",
    ),
    "another array": (setting("array", np.full(8, 2, np.float32)), "'array' of the model"),
    "a tensor in place": (calling(lambda m: m.constant.add_(1), lambda m: m.constant.sub_(1)), "'constant"),
    "another tensor": (setting("constant", torch.zeros(8)), "'constant' of the model"),
    "a function": (setting("act", torch.tanh), "'act' of the model"),
    "another partial": (setting("partial", functools.partial(positive, least=1.0)), "'partial' of the model"),
    "a partial in place": (
        calling(
            lambda m: m.partial.keywords.update(least=1.0), lambda m: m.partial.keywords.update(least=0.0)
        ),
        "'partial' of the model",
    ),
    "behind a method": (setting("method.__self__.by", 2.0), "'by' of class Scaling in 'method' of the model"),
    "behind a partial": (
        setting("bound.func.__self__.by", 2.0),
        "'by' of class Scaling in 'bound' of the model",
    ),
    "behind a weak reference": (setting("kept.by", 2.0), "'by' of class Scaling in 'link' of the model"),
    "a deque": (item("ring", 0, 2.0, 1.0), "'ring' of the model"),
    "a chain of mappings": (item("maps", "by", 2.0, 1.0), "'maps' of the model"),
    "bytes": (item("numbers.0", 0, 2, 1), "'numbers' of the model"),
    "numbers of the standard library": (item("numbers.1", 0, 2.0, 1.0), "'numbers' of the model"),
    "a number of C": (
        calling(lambda m: setattr(m.numbers[2], "value", 2.0), lambda m: setattr(m.numbers[2], "value", 1.0)),
        "'numbers' of the model",
    ),
    "a view of memory": (item("numbers.3", 0, 2, 1), "'numbers' of the model"),
    "a module in a list": (swapped, "'hidden' of the model"),
    "a method": (setting("shape", lambda x: x + 1), "'shape' of the model"),
    "a forward": (setting("norm.forward", lambda x: x + 1), "'forward' of module 'norm'"),
    "an attribute of the class covered": (setting("rate", 2.0), "'rate' of the model"),
    "one that was not there": (setting("extra", 1.0), "'extra' of the model"),
    "minus zero": (setting("space.bias", -0.0), "'bias' of class SimpleNamespace"),
    "a number of another type": (setting("config.inner.scale", 1), "'scale' of class Inner"),
    "a buffer": (buffer, "'table'"),
    "no parameter any more": (bias, r"'bias' of module 'last' \(was a tensor, is None\)"),
    "a buffer that was not there": (
        calling(lambda m: m.register_buffer("extra", torch.ones(1)), lambda m: delattr(m, "extra")),
        r"'extra' of the model \(was absent, is a tensor\)",
    ),
    "a parametrization": (parametrized, "'first'"),
}


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[Odd, Offload]]:
    torch.manual_seed(0)
    model = Odd().eval()
    with upriver.offload(model, example_inputs=torch.randn(3, 8)) as answer:
        yield model, answer


@pytest.mark.parametrize("change", CHANGES)
def test_offload_an_attribute_that_was_read_and_changes_is_named_until_it_is_as_it_was(
    change: str, asked: tuple[Odd, Offload]
) -> None:
    (model, answer), x, (apply, named) = asked, torch.randn(3, 8), CHANGES[change]
    wanted = here(model, x)  # which fills the cache: no change
    assert torch.equal(answer(x), wanted)
    undo = apply(model)
    for _ in range(2):
        with pytest.raises(FrozenChanged, match=f"{named}.* changed after the model had been captured"):
            answer(x)
    undo()
    assert torch.equal(answer(x), wanted)


@pytest.mark.full
def test_offload_what_no_forward_reads_and_equal_values_are_no_change() -> None:
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(3, 8)
    with upriver.offload(model, example_inputs=x) as answer:
        wanted = here(model, x)
        model.unread, model.config.name, model.config.inner.unread = 2, "second", "anything"
        model.another = "new"  # type: ignore[assignment]
        model.register_buffer("fresh", torch.ones(2))
        model.first.register_parameter("fresh", nn.Parameter(torch.ones(2)))
        model.order, model.config.inner.scale = [0, 1], float("1")
        model.config.inner, model.array = dataclasses.replace(model.config.inner), model.array.copy()
        model.constant, model.table = model.constant.clone(), model.table.clone()
        model.rate, model.norm.forward = type(model).rate, model.norm.forward  # as the classes have them
        model.drop.p, model.statistics.momentum = 0.1, 0.5  # of no effect in eval
        model.train()
        assert torch.equal(answer(x), wanted)
        model.order[0] = 1  # the new list is watched
        with pytest.raises(FrozenChanged, match="'order' of the model"):
            answer(x)
        model.order[0] = 0
        assert torch.equal(answer(x), wanted)
        assert torch.equal(answer(x[:2]), here(model, x[:2]))


@pytest.mark.parametrize(("name", "value"), [("forward", lambda self, x: x), ("rate", 3.0), ("scaled", 3.0)])
def test_offload_what_changes_in_a_class_is_named(
    name: str, value: Any, asked: tuple[Odd, Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, answer), x = asked, torch.randn(3, 8)
    wanted = here(model, x)
    with monkeypatch.context() as patch:
        patch.setattr(Odd, name, value)
        with pytest.raises(FrozenChanged, match=f"{name!r} of class Odd.* changed"):
            answer(x)
    assert torch.equal(answer(x), wanted)
