"""Check that the weights a call reads or returns have arrived, under every mode, cast, or compiler."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.coldstart.ordered import Ordered, published
from tests.examples import some
from upriver.coldstart.fetch import strategy
from upriver.coldstart.load_model import load, loading
from upriver.errors import StoreError


class Caller(threading.Thread):
    """Ask a question in a thread of its own.

    Attributes:
        answers: The answers so far; empty while the thread waits.
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.answers: list[Any] = []
        self._ask = ask
        self.start()

    def run(self) -> None:
        """Ask, and keep the answer."""
        self.answers.append(self._ask())


def held_back(monkeypatch: pytest.MonkeyPatch, lets: int = 0, order: tuple[int, ...] = ()) -> Ordered:
    """Return the next load's source of weights: it delivers ``lets`` of them, and more on command."""
    stream = Ordered(order, lets=threading.Semaphore(lets))
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    return stream


def until_hurried(stream: Ordered, caller: Caller, count: int = 1) -> None:
    """Wait until a caller waits for ``count`` weights, or ends without."""
    while len(stream.hurried) < count and caller.is_alive():
        time.sleep(0.001)


def release(stream: Ordered, count: int = 1) -> None:
    assert stream.lets is not None
    stream.lets.release(count)


# ------------------------------------------------------------------------------------------ reads


class Reads(nn.Module):
    """Compute a function of its weight, times a number."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.weight)


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda weight: nn.functional.linear(torch.ones(2, 3), weight),
    "to": lambda weight: weight.to(torch.float64),
    "contiguous": lambda weight: weight.t().contiguous(),
    "reshape": lambda weight: weight.t().reshape(-1),
    "flatten": lambda weight: weight.t().flatten(),
    "chunk": lambda weight: weight.chunk(2)[1],
    "list": lambda weight: torch.cat((weight, weight)),
    "by name": lambda weight: torch.histogram(torch.arange(12.0), 3, weight=weight.detach().view(-1))[0],
    "out": lambda weight: torch.mul(torch.ones(4, 3), 2, out=weight.detach()) - weight,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", READS)
def test_whatever_reads_a_weight_waits_for_it(
    read: str,
    mode: Callable[[], AbstractContextManager[None]],
    autocast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = Reads(READS[read])
    stream = held_back(monkeypatch)
    model = load(lambda: Reads(READS[read]), "model", store=published(reference, "reads"))

    def ask(whom: nn.Module) -> torch.Tensor:
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            told: torch.Tensor = whom(torch.tensor(2.0))
            return told

    caller = Caller(lambda: ask(model))
    until_hurried(stream, caller)
    assert stream.hurried == [0] and not caller.answers
    release(stream)
    caller.join(60)
    expected = ask(reference)
    assert caller.answers[0].dtype == expected.dtype and torch.equal(caller.answers[0], expected)
    stream.join()
    assert type(model) is Reads


@dataclass
class Said:
    """A model's answer that holds weights which no code has read."""

    sums: torch.Tensor
    more: dict[str, Any]


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))
        self.table = nn.Parameter(torch.randn(5, 3))
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Said:
        return Said(self.first(x), {"rows": [self.table[2:4]], "bias": self.bias})


def test_what_a_call_gives_back_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, x = Gives(), torch.ones(2, 3)
    stream = held_back(monkeypatch, lets=2, order=(2, 3, 0, 1))
    model = load(Gives, "model", store=published(reference, "gives"))

    def ask() -> Said:
        said = model(x)
        rows, bias = said.more["rows"][0].clone(), said.more["bias"].clone()
        return Said(said.sums, {"rows": [rows], "bias": bias})

    caller = Caller(ask)
    while not {0, 1} & set(stream.hurried) and caller.is_alive():
        time.sleep(0.001)
    assert not caller.answers
    release(stream, 2)
    caller.join(60)
    said, expected = caller.answers[0], reference(x)
    assert torch.equal(said.sums, expected.sums)
    assert torch.equal(said.more["rows"][0], expected.more["rows"][0])
    assert torch.equal(said.more["bias"], expected.more["bias"])
    stream.join()


class Turns(nn.Module):
    """Make a view of one weight, then read the other."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.first.t()[1:].view(2, 4)
        self.seen.append(x * self.second.detach())
        return self.seen[-1][:, :2] + view.t()


def test_a_view_of_a_weight_that_is_not_there_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, seen, x = Turns([]), list[torch.Tensor](), torch.tensor(2.0)
    stream = held_back(monkeypatch, lets=1, order=(1, 0))
    model = load(lambda: Turns(seen), "model", store=published(reference, "turns"))
    caller = Caller(lambda: model(x))
    while 0 not in stream.hurried and caller.is_alive():
        time.sleep(0.001)
    assert not caller.answers and torch.equal(seen[0], x * reference.second)
    release(stream)
    caller.join(60)
    assert torch.equal(caller.answers[0], reference(x))
    stream.join()


# ------------------------------------------------------------------------------ one storage, two numbers


class Flat(nn.Module):
    """Hold weights that are parts of one storage, as optimizers and sharding lay them out."""

    def __init__(self, way: str) -> None:
        super().__init__()
        flat = torch.randn(24)
        self.way = way
        match way:
            case "columns":
                parts = list(flat.view(6, 4).split(2, 1))
            case "interleaved":
                parts = [flat[0::2], flat[1::2]]
            case "overlapping":
                parts = [flat[:16], flat[8:]]
            case "three":
                parts = list(flat.view(3, 8))
            case _:
                parts = [flat[:12], flat[12:]]
        for number, part in enumerate(parts):
            if way == "buffers":
                self.register_buffer(f"part{number}", part)
            else:
                setattr(self, f"part{number}", nn.Parameter(part, requires_grad=False))
        self.whole = flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "whole":
                return x * self.whole
            case "last":
                return x * self.part1
            case "first":
                return x * self.part0
            case "overlapping" | "columns" | "interleaved" | "three" | "buffers":
                return torch.cat([each.reshape(-1) for each in self.state_dict().values()]) * x
            case _:
                return x * self.part0 + self.part1


WAYS = ("sum", "whole", "first", "last", "buffers", "columns", "interleaved", "overlapping", "three")


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_weights_of_one_storage_under_shuffled_arrival_answer_as_when_loaded(
    way: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, x = Flat(way), torch.tensor(2.0)
    count = len(reference.state_dict())
    order = tuple((number + shift) % count for number in range(count))
    stream = held_back(monkeypatch, lets=count - 1, order=order)
    model = load(lambda: Flat(way), "model", store=published(reference, "flat"))

    caller = Caller(lambda: model(x))
    while order[-1] not in stream.hurried and caller.is_alive():
        time.sleep(0.001)
    assert not caller.answers, "one that shares its storage with what is read has not come"
    release(stream)
    caller.join(60)
    assert torch.equal(caller.answers[0], reference(x))
    stream.join()
    assert torch.equal(model(x), reference(x))


# -------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_who_waits_under_autocast_keeps_nobody_else_waiting(
    mode: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, other, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.ones(2, 3)
    stream = held_back(monkeypatch)
    model = load(lambda: nn.Linear(3, 3), "model", store=published(reference, "linear"))

    def ask(whom: nn.Module) -> tuple[torch.Tensor, bool]:
        with mode(), torch.autocast("cpu", torch.bfloat16):
            return whom(x), torch.is_autocast_cache_enabled()

    first = Caller(lambda: ask(model))
    until_hurried(stream, first)
    second = Caller(lambda: ask(other))
    second.join(60)
    overtaken = bool(second.answers) and not first.answers
    release(stream, 2)
    first.join(60)
    second.join(60)
    assert overtaken
    for caller, expected in ((first, ask(reference)), (second, ask(other))):
        assert torch.equal(caller.answers[0][0], expected[0]) and caller.answers[0][1]
    stream.join()


class Twice(nn.Module):
    """Use a weight several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x)
        return x


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_the_loaded_model(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, x = Twice(), torch.randn(8, 64)
    stream = held_back(monkeypatch)
    model = load(Twice, "model", store=published(reference, "twice")).train()

    def ask(whom: nn.Module) -> list[torch.Tensor | None]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = whom(x).square().sum()
        loss.backward()
        return [parameter.grad for parameter in whom.parameters()]

    caller = Caller(lambda: ask(model))
    until_hurried(stream, caller)
    release(stream, 2)
    caller.join(60)
    for found, expected in zip(caller.answers[0], ask(reference), strict=True):
        assert found is not None and expected is not None and torch.equal(found, expected)
    stream.join()


# -------------------------------------------------------------------------------------- compiled


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """Record the runs of compiled code."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) + 1


class Compiled(nn.Module):
    """Hold a part that is compiled in one of several ways."""

    def __init__(self, way: str, compiles: Callable[..., Any]) -> None:
        super().__init__()
        self.block: Any = Block()
        self.times = nn.Parameter(torch.randn(3))
        self.is_block = way in ("module", "call", "method")
        self.hidden: tuple[Callable[..., torch.Tensor], ...] = (_scaled,)
        match way:
            case "module":
                self.block = compiles(self.block)
            case "call":
                self.block._compiled_call_impl = compiles(self.block._call_impl)
            case "method":
                self.block = type("Block", (Block,), {"forward": compiles(Block.forward)})()
            case "attribute":
                self.function = compiles(_scaled)
                self.hidden = (lambda x, times: self.function(x, times),)
            case "global":
                self.hidden = (lambda x, times: _shared(x, times),)
            case "hidden":
                self.hidden = (compiles(_scaled),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_block:
            x = self.block(x)
        x = self.hidden[0](x, self.times)
        return x if self.is_block else self.block(x)


def _scaled(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    return x * times - 1


_shared = _scaled


@pytest.mark.parametrize(
    ("way", "fullgraph"),
    some(
        6,
        [
            (way, full)
            for full in (True, False)
            for way in ("module", "call", "method", "attribute", "global", "hidden")
        ],
    ),
)
def test_compiled_code_reads_nothing_early(
    way: str, fullgraph: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(way)
            return graph.forward(*args)

        return run

    def build() -> nn.Module:
        return Compiled(way, lambda what: torch.compile(what, backend=backend, fullgraph=fullgraph))

    if way == "global":
        compiled = torch.compile(_scaled, backend=backend, fullgraph=fullgraph)
        monkeypatch.setattr(sys.modules[__name__], "_shared", compiled)

    @torch.no_grad()
    def ask(whom: nn.Module) -> torch.Tensor:
        told: torch.Tensor = whom(torch.ones(2, 3))
        return told

    reference = build()
    store = published(reference, "compiled")
    known = load(build, "model", store=store)
    handle = loading(known)
    assert handle is None or handle.wait(60)
    expected = ask(reference)
    for _ in range(2):
        assert torch.equal(ask(known), expected)
    assert len(ran) == 3

    stream = held_back(monkeypatch)
    model = load(build, "model", store=store)
    caller = Caller(lambda: ask(model))
    caller.join(0.3)
    assert not caller.answers and len(ran) == 3
    release(stream, 2)
    caller.join(60)
    assert torch.equal(caller.answers[0], expected)
    stream.join()
    assert len(ran) == 4
    ask(model)
    assert len(ran) == 5


def test_compiled_code_of_a_load_that_fails_does_not_run(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append("compiled")
            return graph.forward(*args)

        return run

    def build() -> nn.Module:
        return Compiled("module", lambda what: torch.compile(what, backend=backend))

    store = published(build(), "failing")
    stream = held_back(monkeypatch)
    stream.error = (0, StoreError("gone"))
    model = load(build, "model", store=store)

    @torch.no_grad()
    def ask() -> tuple[str, bool]:
        with pytest.raises(StoreError) as caught:
            model(torch.ones(2, 3))
        return str(caught.value), any("_dynamo/convert_frame" in str(each.path) for each in caught.traceback)

    caller = Caller(ask)
    while not stream.sink._arrivals._all_waited and caller.is_alive():
        time.sleep(0.001)
    release(stream)
    caller.join(60)
    # The compiler would leave its settings changed if the error came through it.
    assert caller.answers == [("gone", False)] and not ran
    stream.join()
