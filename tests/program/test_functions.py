"""Split models that hold operators which run functions, and code that torch.compile makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests.examples import often, some
from upriver.errors import CaptureError
from upriver.profile.memory.estimator import tail_peak
from upriver.program.capture.whole_model import capture_whole
from upriver.program.freeze import keep_in_eval
from upriver.program.split.split import split

pytestmark = pytest.mark.filterwarnings("ignore")  # from torch, about an object that it is about to drop

WIDTH = 8

Forward: TypeAlias = "Callable[[Net, torch.Tensor], torch.Tensor]"


class Net(nn.Module):
    """Two frozen parts and a trained part, combined by the function passed in."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).requires_grad_(False)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
        self.a, self.b, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.times = nn.Parameter(torch.randn(WIDTH))
        self.way = way
        if way == "compiled modules":
            self.first: Any = torch.compile(self.first, backend=_backend)
            self.a: Any = torch.compile(self.a, backend=_backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(WAYS[self.way][0](self, x).mean(1))


_ran: list[int] = []
"""One entry per run of compiled code."""


def _backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        _ran.append(1)
        return graph.forward(*args)

    return run


_gelu = torch.compile(lambda x: nn.functional.gelu(x) * 2, backend=_backend, fullgraph=True)


def _late(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """Compute with other low bits than the written formula."""
    return lambda *args: tuple(each * (1 + 2**-20) for each in graph.forward(*args))


_other = torch.compile(lambda x: torch.sin(x), backend=_late, fullgraph=True)


def _held(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Hold the result of the second frozen part in a branch that is not taken."""
    x = net.first(x)
    held = net.second(x)
    return torch.cond(x.sum() > -1e9, lambda y: net.a(y), lambda y: net.b(y) + held, (x,))


def _attention(net: Net, x: torch.Tensor) -> torch.Tensor:
    rows = net.first(x)[:, None]
    rows = flex_attention(rows, rows, rows, score_mod=lambda s, b, h, i, j: s + i - j)
    return net.a(net.second(rows[:, 0]))


WAYS: dict[str, tuple[Forward, str]] = {
    "cond": (
        lambda net, x: torch.cond(x.sum() > 0, lambda y: net.a(y), lambda y: net.b(y), (net.first(x),)),
        "first",
    ),
    "cond that holds": (_held, "second"),
    "cond of frozen ones": (
        lambda net, x: torch.cond(x.sum() > 0, lambda y: net.first(y), lambda y: net.second(y), (x,)),
        "",
    ),
    "cond between": (
        lambda net, x: net.a(
            net.second(torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (net.first(x),)))
        ),
        "first",
    ),
    "cond of what runs again": (
        lambda net, x: net.a(
            net.second(torch.cond(x.sum() > 0, lambda y: net.second(y), lambda y: y * 3, (net.first(x),)))
        ),
        "first",
    ),
    "cond itself": (
        lambda net, x: torch.ops.higher_order.cond(
            x.sum() > 0, lambda y: net.second(y) * 2, lambda y: y + 1, (net.first(x),)
        ),
        "first",
    ),
    "map": (lambda net, x: map_rows(lambda row, w: torch.tanh(row) * w, net.first(x), net.times), "first"),
    "flex_attention": (_attention, "first"),
    "compiled": (lambda net, x: net.a(_gelu(net.first(x))), "first"),
    "compiled before": (lambda net, x: net.a(net.first(_gelu(x))), "first"),
    "compiled between": (lambda net, x: net.a(net.second(_gelu(net.first(x)))), "second"),
    "compiled to other bits": (lambda net, x: net.a(_other(net.first(x))), "first"),
    "compiled to other bits between": (lambda net, x: net.a(net.second(_other(net.first(x)))), "first"),
    "compiled modules": (lambda net, x: net.a(net.first(x)), "first"),
    "checkpoint": (lambda net, x: checkpoint(lambda y: net.a(y), net.first(x), use_reentrant=False), "first"),
    "vmap": (lambda net, x: torch.vmap(lambda row: net.second(row))(net.first(x)), "first"),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the compiled code of other tests before the test, and the test's own after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _trained(model: nn.Module, answer: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return the gradient of each parameter of a model, and clear the gradients."""
    answer.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def _same(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(
        mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
        for mine, theirs in zip(a.values(), b.values(), strict=True)
    )


@pytest.mark.parametrize("way", often(WAYS, "map", "compiled modules"))
def test_split_of_a_model_that_runs_functions_gives_what_the_whole_one_gives(way: str) -> None:
    boundary = WAYS[way][1]
    model, other, x = Net(way), Net(way), torch.randn(4, 5, WIDTH)
    other.load_state_dict(model.state_dict())
    done = split(model, x)
    assert done.boundary == boundary and bool(done.why_not) == (not boundary)
    features = (x,) if done.program is None else tuple(done.program.run([x], 0, done.program.num_stages))
    keep_in_eval(model, list(done.in_eval))
    answer = done.tail(features[0] if len(features) == 1 else features)
    gradients = _trained(model, answer)
    for plain in (other, model):
        whole = plain(x)
        assert torch.equal(answer, whole)
        assert _same(gradients, _trained(plain, whole))


@pytest.mark.parametrize("way", often(["compiled", "compiled before", "compiled modules"], "compiled"))
def test_split_of_a_model_with_compiled_code_leaves_it_compiled(way: str) -> None:
    model, x = Net(way), torch.randn(4, 5, WIDTH)
    split(model, x)
    for plain in (model, Net(way)):
        _ran.clear()
        with torch.no_grad():
            plain(x)
        assert len(_ran) == (2 if way == "compiled modules" else 1)


@pytest.mark.parametrize(("way", "why"), some(1, [("cond", "calls cond"), ("map", "calls map")]))
def test_capture_of_a_model_that_runs_functions_is_refused_and_leaves_it_whole(way: str, why: str) -> None:
    model, x = Net(way).eval(), torch.randn(4, 5, WIDTH)
    with pytest.raises(CaptureError, match=why):
        capture_whole(model, (x,))
    with torch.no_grad():
        assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("way", often(["cond", "compiled"], "compiled"))
def test_memory_of_a_tail_that_runs_functions_is_known_and_leaves_it_whole(way: str) -> None:
    model, x = Net(way), torch.randn(4, 5, WIDTH)
    assert tail_peak(model, [x], samples=4).low_bytes > x.nbytes
    expected = model(x)
    assert torch.equal(model(x), expected)


def test_trial_runs_leave_compiled_code_to_the_shapes_of_its_user() -> None:
    shapes: list[tuple[Any, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        shapes.append(tuple(inputs[0].shape))
        return graph.forward

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
            self.relu = torch.compile(torch.relu, backend=backend)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.relu(self.first(x)))

    split(Compiled(), torch.randn(4, WIDTH))
    assert set(shapes) == {(4, WIDTH)}
