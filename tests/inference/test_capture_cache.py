"""Check the network of each call: captured once for each input form, and named where no capture exists."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import upriver
from tests.examples import some
from tests.inference.asking import Two, chain, here
from upriver.errors import ConfigError
from upriver.inference import capture_cache as forms_module
from upriver.inference.capture_cache import MOST_FORMS, CaptureCache, Network
from upriver.inference.costs import device_seconds
from upriver.program.capture.whole_model import capture_whole
from upriver.program.example_inputs import Example


def network_of(model: nn.Module, made: list[Example], example: Example) -> Network:
    made.append(example)
    captured = capture_whole(model, example)
    seconds = device_seconds(captured, "measure")
    return Network(captured=captured, device_s=seconds, total_s=sum(seconds))


def forms_of(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[CaptureCache, list[Example]]:
    made: list[Example] = []
    return CaptureCache(Example(args=args, kwargs=kwargs), partial(network_of, model, made)), made


def answer(forms: CaptureCache, *args: Any, **kwargs: Any) -> Any:
    network, tensors = forms.find(args, kwargs)
    program = network.captured.program
    return network.captured.answer(program.run(tensors, 0, program.num_stages))


@pytest.mark.full
def test_other_shapes_are_captured_once() -> None:
    model = chain()
    forms, made = forms_of(model, torch.randn(1, 64))
    for _ in range(3):
        for rows in (1, 3, 2):
            x = torch.randn(rows, 64)
            assert torch.equal(answer(forms, x), here(model, x))
    assert [example.samples for example in made] == [1, 3, 2]


@pytest.mark.full
def test_keyword_inputs_may_come_in_any_order_and_constants_count() -> None:
    model = Two()
    x, other = torch.randn(2, 8), torch.randn(2, 5)
    forms, made = forms_of(model, x, other=other, scale=2.0)
    assert torch.equal(
        answer(forms, x, scale=2.0, other=other)["scores"], here(model, x, other=other, scale=2.0)["scores"]
    )
    assert len(made) == 1
    for kwargs in ({"other": other, "scale": 3.0}, {"other": other}, {}):
        assert torch.equal(answer(forms, x, **kwargs)["scores"], here(model, x, **kwargs)["scores"])
    assert len(made) == 4


@pytest.mark.full
def test_other_strides_are_another_form_and_steps_that_nobody_takes_are_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    forms, made = forms_of(model, torch.randn(1, 3, 8, 8))
    one_of_many = torch.randn(4, 3, 8, 8)[1:2]
    strange = one_of_many.as_strided((1, 3, 8, 8), (7, 64, 8, 1), one_of_many.storage_offset())
    for x in (one_of_many, strange):
        assert torch.equal(answer(forms, x), here(model, x))
    assert len(made) == 1
    x = torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)
    assert torch.equal(answer(forms, x), here(model, x))
    assert len(made) == 2


def test_the_caller_may_do_what_it_likes_with_the_example() -> None:
    model, x = chain(), torch.randn(2, 64)
    forms, _ = forms_of(model, x)
    wanted = here(model, x)
    x.fill_(7.0)
    captured = forms.first.captured
    assert torch.equal(captured.program.run(captured.example.tensors, 0, 7)[0], wanted)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    some(
        2,
        [
            (
                (torch.randn(2, 9),),
                {"other": torch.randn(2, 5)},
                r"argument 0 must be float32 of shape \(2, 8\)",
            ),
            (
                (torch.randn(2, 8).double(),),
                {"other": torch.randn(2, 5)},
                "argument 0 must be float32 .* got float64",
            ),
            (
                (torch.randn(2, 8),),
                {"other": torch.randn(2, 6)},
                r"argument 'other' must be .*\(2, 5\).* got .*\(2, 6\)",
            ),
            (
                (torch.randn(2, 8),),
                {"other": np.zeros((2, 5))},
                "argument 'other' must be a tensor, a number",
            ),
            ((), {}, r"a call must have the arguments of example_inputs \(argument 0, argument 'other'\)"),
            ((torch.randn(2, 8),), {"others": torch.randn(2, 5)}, "a call must have the arguments"),
        ],
    ),
)
def test_a_call_that_is_none_is_an_error_that_names_the_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    forms, made = forms_of(Two(), torch.randn(2, 8), other=torch.randn(2, 5))
    for _ in range(2):
        with pytest.raises(ConfigError, match=said):
            forms.find(args, kwargs)
    assert len(made) <= 2, "it is tried once"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_strides_is_an_error_that_names_the_argument() -> None:
    forms, made = forms_of(Two(), torch.randn(2, 8), other=torch.randn(2, 5))
    x, other = torch.randn(2, 8), torch.randn(2, 5)
    nested = torch.nested.nested_tensor([torch.randn(8), torch.randn(8)])
    for strange, layout in (
        (x.to_sparse(), "sparse_coo"),
        (x.to_sparse_csr(), "sparse_csr"),
        (nested, "nested"),
    ):
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"argument 0 must be a dense tensor, got .*{layout}"):
                forms.find((strange,), {"other": other})
    with pytest.raises(ConfigError, match="argument 'other' must be a dense tensor"):
        forms.find((x,), {"other": other.to_sparse()})
    assert len(made) == 1
    with pytest.raises(
        ConfigError, match=r"argument 0 of example_inputs must be a dense tensor, got .*sparse"
    ):
        forms_of(Two(), x.to_sparse())


def test_a_tensor_without_values_is_an_error_that_names_the_argument() -> None:
    x, said = torch.randn(2, 8), "must be a tensor with values, got float32 of shape .* on meta"
    forms, _ = forms_of(Two(), x)
    with pytest.raises(ConfigError, match=f"argument 0 {said}"):
        forms.find((x.to("meta"),), {})
    with pytest.raises(ConfigError, match=f"argument 'other' of example_inputs {said}"):
        upriver.offload(Two(), example_inputs={"x": x, "other": torch.randn(2, 5, device="meta")})
    with pytest.raises(ConfigError, match=f"argument 0 of example_inputs {said}"):
        upriver.offload(nn.Linear(8, 3, device="meta"), example_inputs=x.to("meta"))


@pytest.mark.full
def test_constants_are_told_apart_by_their_bits() -> None:
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return x / by

    model, x = Divides(), torch.ones(2)
    forms, made = forms_of(model, x, by=0.0)
    for by in (-0.0, 0.0, float("nan"), float("nan"), -0.0, float("inf")):
        assert torch.equal(answer(forms, x, by=by).isnan(), here(model, x, by=by).isnan())
        assert str(answer(forms, x, by=by)) == str(here(model, x, by=by))
    assert len(made) == 4


@pytest.mark.full
def test_there_are_not_many_forms() -> None:
    forms, made = forms_of(chain(), torch.randn(1, 64))
    for rows in range(2, MOST_FORMS + 1):
        forms.find((torch.randn(rows, 64),), {})
    with pytest.raises(ConfigError, match=rf"argument 0 must be .*\(1, 64\).*\(99, 64\).*{MOST_FORMS} forms"):
        forms.find((torch.randn(99, 64),), {})
    assert len(made) == MOST_FORMS
    forms.find((torch.randn(1, 64),), {})


def test_threads_that_come_with_a_new_form_at_once_have_it_captured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms, made = forms_of(chain(), torch.randn(1, 64))
    gate = threading.Barrier(4)

    def ask() -> None:
        gate.wait()
        forms.find((torch.randn(5, 64),), {})

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2


def test_why_forms_are_none_is_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms_module, "MOST_REFUSED", 2)
    forms, _ = forms_of(chain(), torch.randn(1, 64))
    for width in range(5):
        with pytest.raises(ConfigError):
            forms.find((torch.randn(1, 65 + width),), {})
    assert len(forms._refused) == 2
