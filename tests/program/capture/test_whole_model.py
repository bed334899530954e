"""Check the bits and the form of a whole model's answer, captured as one program, from every cut."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

from tests.examples import some
from tests.inference.asking import Two, chain, here
from tests.program.nets import Small
from upriver.errors import CaptureError
from upriver.program.capture.prefix import capture
from upriver.program.capture.whole_model import capture_whole
from upriver.program.example_inputs import Example
from upriver.program.graph.alignment import as_shipped

Pair = namedtuple("Pair", ["first", "second"])


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two answers have the same bits and the same form."""
    a, form_a = pytree.tree_flatten(ours)
    b, form_b = pytree.tree_flatten(theirs)
    return form_a == form_b and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def small() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.mark.parametrize(
    ("model", "example"),
    [
        pytest.param(small(), torch.randn(1, 3, 16, 16), marks=pytest.mark.full),
        (chain(), torch.randn(2, 64)),
        (Two(), Example(args=(torch.randn(3, 8),), kwargs={"other": torch.randn(3, 5)})),
    ],
)
def test_every_cut_gives_what_the_model_gives(model: nn.Module, example: torch.Tensor | Example) -> None:
    found = capture_whole(model, example)
    program, call = found.program, found.example
    wanted = here(model, *call.args, **call.kwargs)
    assert program.num_stages >= 5
    for cut in range(program.num_stages + 1):
        crossing = program.run(call.tensors, 0, cut)
        given = program.run(as_shipped(crossing), cut, program.num_stages)
        assert same(found.answer(given), wanted), cut


def test_stages_end_after_every_operator() -> None:
    x = torch.randn(2, 64)
    assert capture_whole(chain(), x).program.digest == capture(chain(), x, granularity="op").digest
    assert capture_whole(chain(), x).program.num_stages == 7


def test_a_tensor_that_comes_twice_is_given_twice() -> None:
    model, x = Two().eval(), torch.randn(3, 8)
    found = capture_whole(model, x)
    answer = found.answer(found.reference)
    assert len(found.places) == len(found.reference) + 1
    assert torch.equal(answer["parts"][1][1], answer["scores"])
    assert answer["count"] == 2 and answer["none"] is None
    assert same(answer, here(model, x))


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x + 1, {"same": x, "number": 1.5})


def test_named_tuples_and_inputs_among_the_answer_come_back() -> None:
    x = torch.randn(2, 4)
    found = capture_whole(Named(), x)
    assert same(found.answer(found.program.run([x], 0, found.program.num_stages)), here(Named(), x))


def test_a_model_in_training_is_captured_in_eval_and_left_in_training() -> None:
    model = Small().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 3, 16, 16)
    found = capture_whole(model, x)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(found.answer(found.reference), here(model, x))


class Object:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Holds(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, Object(x)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Counts(nn.Module):
    """Set an attribute that the answer depends on after each call, to another value or to the same one."""

    def __init__(self, start: object, step: object, most: int = 1000) -> None:
        super().__init__()
        self.start, self.step, self.most, self.count = start, step, most, start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = min(self.count + self.step, self.start + self.step * self.most)  # type: ignore[operator]
        return x * len(str(self.count))


@pytest.mark.parametrize(("start", "step"), [(0, 1), (1.0, 0.5), (False, True), ("a", "b")])
def test_a_model_that_counts_its_calls_is_refused_and_left_as_it_was(start: object, step: object) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counts(start, step))
    with pytest.raises(CaptureError, match="changes attribute 'count' of module '1' while it runs"):
        capture_whole(model, torch.randn(2, 4))
    with pytest.raises(CaptureError, match="the model changes its attribute 'count' while it runs"):
        capture_whole(model[1], torch.randn(2, 4))
    assert model[1].count == start


def test_an_attribute_that_each_call_sets_to_the_same_is_none_that_counts() -> None:
    model, x = Counts(0, 1, most=1), torch.randn(2, 4)
    model.unset = float("nan")  # type: ignore[assignment]
    assert torch.equal(capture_whole(model, x).reference[0], x)


def test_autocast_becomes_part_of_the_program() -> None:
    x = torch.randn(2, 64)
    model = chain().eval()
    found = capture_whole(model, x, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = here(model, x)
    assert wanted.dtype == torch.bfloat16 and same(found.answer(found.reference), wanted)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Holds(), "holds a Object"),
        (Branch(), "control flow depends on data"),
        (nn.Linear(5, 5), "does not run|could not capture"),
    ],
)
def test_what_cannot_be_captured_is_said(model: nn.Module, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture_whole(model, torch.randn(2, 4))


@pytest.mark.parametrize(
    "model", some(1, [nn.Identity(), nn.Flatten(), nn.Sequential()]), ids=lambda model: type(model).__name__
)
def test_a_model_that_computes_nothing_is_named(model: nn.Module) -> None:
    for take in (capture, capture_whole):
        with pytest.raises(
            CaptureError, match=rf"the model \({type(model).__name__}\) runs no operator on its in"
        ):
            take(model, torch.randn(2, 4))


class Choosing(nn.Module):
    """Choose the module to run by an operator."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.a, self.b, self.operator = nn.Linear(4, 4), nn.Linear(4, 4), operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.operator == "while_loop":
            zero = torch.tensor(0)
            answer: torch.Tensor = while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, self.a(y)), (zero, x))[
                1
            ]
            return answer
        chosen: torch.Tensor = torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y), (x,))
        return chosen


@pytest.mark.parametrize("operator", some(1, ["cond", "while_loop"]))
def test_an_operator_that_runs_modules_is_named_as_what_no_program_holds(operator: str) -> None:
    with pytest.raises(CaptureError, match=f"the model calls {operator}, which is no ATen operator"):
        capture_whole(Choosing(operator), torch.randn(3, 4))


class DynamicCache:
    """Share only its name with the key and value cache of transformers."""


class Keeping(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return {"answer": super().forward(x), "past_key_values": DynamicCache()}


def test_an_answer_with_a_cache_is_refused_with_what_switches_it_off() -> None:
    with pytest.raises(CaptureError, match=r"holds a DynamicCache, .* switch it off \(use_cache=False"):
        capture_whole(Keeping(4, 4), torch.randn(3, 4))
