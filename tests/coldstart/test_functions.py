"""Check operators that run functions, and compiled code, in a loading model, and afterwards in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch.func import functional_call
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.coldstart.ordered import Awaited, published
from tests.examples import often, some
from upriver.coldstart.fetch import strategy
from upriver.coldstart.format.access_order import counted
from upriver.coldstart.load_model import load
from upriver.coldstart.model.construction import construct
from upriver.errors import Cancelled

pytestmark = pytest.mark.filterwarnings("ignore")  # from torch, about an object that it is about to drop

WIDTH = 8

Forward: TypeAlias = "Callable[[Net, torch.Tensor], torch.Tensor]"


class Net(nn.Module):
    """Run the given function on itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.unread = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.times = nn.Parameter(torch.randn(WIDTH))
        self.way = way
        if way == "torchscript":
            self.first = torch.jit.script(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WAYS[self.way](self, x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.times


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor, net: Net) -> torch.Tensor:
        return net.scaled(x)


@torch.library.custom_op("upriver_tests::scaled", mutates_args=())
def _custom(x: torch.Tensor) -> torch.Tensor:
    return _asked[-1].scaled(x)


_library = torch.library.Library("upriver_tests_library", "DEF")
_library.define("scaled(Tensor x) -> Tensor")
_library.impl("scaled", lambda x: _asked[-1].scaled(x), "CompositeExplicitAutograd")

_asked: list[Net] = []
"""Networks whose weights custom operators read although they are not among the arguments."""


def _of(net: Net, operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    _asked.append(net)
    return operator(x)


def _branches(net: Net, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.mean() > -100, net.scaled, lambda z: z * net.times, (y,))

    return torch.cond(x.sum() > -100, inner, lambda y: net.second(y), (x,))


def _counted(net: Net, x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False):
        return torch.cond(x.sum() > -100, net.scaled, lambda y: net.second(y), (x,))


def _attention(net: Net, x: torch.Tensor) -> torch.Tensor:
    rows = net.first(x)[None, None]
    return flex_attention(rows, rows, rows, score_mod=lambda s, b, h, i, j: s + net.times[i] * net.times[j])


def _loop(net: Net, x: torch.Tensor) -> torch.Tensor:
    start = (torch.zeros((), dtype=torch.int64), x)
    return while_loop(
        lambda i, y: i + net.times.mean() < 3, lambda i, y: (i + 1, torch.tanh(net.scaled(y))), start
    )[1]


def _function(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(net.scaled(x)) + 1


_whole = (torch.compile(_function, backend="eager", fullgraph=True),)
_lowered = (torch.compile(_function, backend="aot_eager", dynamic=True),)

WAITS: dict[str, Forward] = {
    "cond": _branches,
    "cond under a mode": _counted,
    "cond itself": lambda net, x: torch.ops.higher_order.cond(x.sum() > -100, net.scaled, net.second, (x,)),
    "while_loop": _loop,
    "scan": lambda net, x: scan(
        lambda c, v: (torch.tanh(net.scaled(c) + v), c.clone()), torch.zeros(3, WIDTH), x.expand(2, 3, WIDTH)
    )[0],
    "associative_scan": lambda net, x: associative_scan(
        lambda a, b: a + b * net.times, net.first(x), 0, combine_mode="generic"
    ),
    "map": lambda net, x: map_rows(lambda row, w: torch.tanh(net.first(row)) + w, x, net.times),
    "flex_attention": _attention,
    "strict_mode": lambda net, x: strict_mode(net.scaled, (x,)),
    "hints": lambda net, x: hints_wrapper(net.scaled, (x,), {}, hints={}),
    "compiled": lambda net, x: _whole[0](net, x),
    "lowered": lambda net, x: _lowered[0](net, x),
    "compiled inside": lambda net, x: torch.compile(net.scaled, backend="eager")(x),
    "custom operator": lambda net, x: _of(net, torch.ops.upriver_tests.scaled, x),
    "operator of a library": lambda net, x: _of(net, torch.ops.upriver_tests_library.scaled, x),
}

SEES: dict[str, Forward] = {
    "vmap": lambda net, x: torch.vmap(net.scaled)(x),
    "grad": lambda net, x: torch.func.grad(lambda y: net.scaled(y).square().sum())(x),
    "functional_call": lambda net, x: functional_call(net.first, {"weight": net.second.weight}, (x,)),
    "checkpoint": lambda net, x: checkpoint(net.scaled, x, use_reentrant=False),
    "reentrant checkpoint": lambda net, x: checkpoint(net.scaled, x, use_reentrant=True),
    "autograd function": lambda net, x: _Scale.apply(x, net),
    "fork": lambda net, x: torch.jit.wait(torch.jit.fork(net.scaled, x)),
    "nested region": lambda net, x: torch.compiler.nested_compile_region(lambda y: net.scaled(y))(x),
    "disabled": lambda net, x: torch.compiler.disable(net.scaled)(x),
    "torchscript": lambda net, x: net.first(x) * net.times,
}

WAYS = WAITS | SEES


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the compiled code of other tests before the test, and the test's own after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    _asked.clear()


def _known(way: str) -> tuple[Net, Net, torch.Tensor]:
    """Return a model, another one with its weights, and a question."""
    model, other = Net(way).eval(), Net(way).eval()
    other.load_state_dict(model.state_dict())
    return model, other, torch.randn(3, WIDTH)


def _loaded(model: Net, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Awaited]:
    stream = Awaited()
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    return load(lambda: Net(model.way), "model", store=published(model, "functions")).eval(), stream


@pytest.mark.parametrize(
    "way",
    often(
        WAYS,
        "cond",
        "while_loop",
        "map",
        "compiled",
        "custom operator",
        "autograd function",
        "torchscript",
    ),
)
def test_load_model_that_runs_functions_answers_as_the_whole_one(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other, x = _known(way)
    model, stream = _loaded(plain, monkeypatch)
    with torch.no_grad():
        first = model(x)
        stream.hurry(0)
        expected = plain(x)
        assert torch.equal(first, expected)
        assert torch.equal(other(x), expected)
        stream.join()
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("way", often(["cond", "lowered", "vmap"], "cond", "vmap"))
def test_gradients_of_a_model_that_runs_functions_are_those_of_the_whole_one(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, x = _known(way)
    model, stream = _loaded(plain, monkeypatch)
    answers = [model(x), plain(x)]
    stream.hurry(0)
    assert torch.equal(*answers)
    for answer in answers:
        answer.square().sum().backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name


def test_code_that_was_compiled_before_runs_once_all_is_there_and_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        compiled.append(1)
        return graph.forward

    monkeypatch.setattr(f"{__name__}._whole", (torch.compile(_function, backend=backend, fullgraph=True),))
    plain, other, x = _known("compiled")
    with torch.no_grad():
        expected = plain(x)
        model, stream = _loaded(plain, monkeypatch)
        assert torch.equal(model(x), expected)
        stream.join()
        assert torch.equal(model(x), expected)
        assert torch.equal(other(x), expected)
        once = len(compiled)
        assert torch.equal(plain(x), expected) and len(compiled) == once
    assert once <= 3  # of three models, with three different weights


@pytest.mark.parametrize("way", ["cond", "lowered"])
def test_a_load_that_is_broken_off_leaves_the_compiler_as_it_was(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, x = _known(way)
    model, stream = _loaded(plain, monkeypatch)
    stream.error = (0, Cancelled("no more"))
    with torch.no_grad():
        with pytest.raises(Cancelled):
            model(x)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
        assert torch._dynamo.eval_frame._callback_from_stance.__module__ == "torch._dynamo.eval_frame"
        assert torch.equal(plain(x), _function(plain, x) if way == "lowered" else plain.scaled(x))


def test_a_model_that_loads_inside_of_compiled_code_answers_as_the_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, _, x = _known("disabled")
    model, stream = _loaded(plain, monkeypatch)
    with torch.no_grad():
        first = torch.compile(lambda y: model(y) * 2, backend="eager")(x)
        stream.hurry(0)
        assert torch.equal(first, plain(x) * 2)


# --------------------------------------------------------------------------------- construction


class Built(nn.Module):
    """Run functions on its own parts."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("start", torch.randn(WIDTH, WIDTH))
        weight = self.first.weight.detach()
        with torch.no_grad():
            self.register_buffer("made", BUILT[way](self.start, weight))
        self.last = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.last.weight)
        self.register_buffer("sum", self.last.weight.detach().sum() + torch.randn(3))


BUILT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cond": lambda x, weight: torch.cond(x.sum() > -100, lambda y: y @ weight, lambda y: y * 2, (x,)),
    "cond itself": lambda x, weight: torch.ops.higher_order.cond(
        x.sum() > -100, lambda y: y @ weight, lambda y: y * 2, (x,)
    ),
    "compiled": lambda x, weight: torch.compile(torch.mul, backend="eager")(x, weight),
    "vmap": lambda x, weight: torch.vmap(lambda row: weight @ row)(x),
    "exported": lambda x, weight: torch.export.export(nn.Linear(WIDTH, WIDTH), (x,)).module()(x) @ weight,
}


@pytest.mark.parametrize("way", BUILT)
def test_construct_of_a_model_that_runs_functions_computes_what_its_constructor_does(way: str) -> None:
    torch.manual_seed(0)
    expected = dict(Built(way).named_buffers())
    torch.manual_seed(0)
    found = dict(construct(lambda: Built(way)).named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    torch.manual_seed(0)
    again = dict(Built(way).named_buffers())
    assert torch.equal(again["made"], expected["made"])


# --------------------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("way", "expected"),
    some(
        1,
        [
            ("cond", {"first.weight", "first.bias", "second.weight", "second.bias", "times"}),
            ("flex_attention", {"first.weight", "first.bias", "times"}),
            ("compiled", {"first.weight", "first.bias", "times"}),
        ],
    ),
)
def test_recorded_order_has_what_functions_read_before_all_else(way: str, expected: set[str]) -> None:
    model, other, x = _known(way)
    names = list(counted(model, (x,)))
    assert set(names[: len(expected)]) == expected
    with torch.no_grad():
        assert torch.equal(model(x), other(x))
