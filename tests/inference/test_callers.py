"""Check an offloaded model that PyTorch observes, or runs in another way than by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import upriver
from tests.examples import often
from tests.inference.asking import SELDOM, chain, here
from tests.server.running import Running
from upriver.errors import ConfigError
from upriver.inference.offload import Offload

X = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return chain()


@pytest.fixture(scope="module")
def answer(model: nn.Module) -> Iterator[Offload]:
    with upriver.offload(model, example_inputs=X) as answer:
        yield answer


@pytest.fixture(scope="module")
def remote(model: nn.Module, server: Running) -> Iterator[Offload]:
    options = {"servers": [server.url], "policy": "remote", **SELDOM}
    with upriver.offload(model, example_inputs=X, **options) as answer:
        assert not answer.wait(60)
        yield answer


class Around(nn.Module):
    """A model that calls an offloaded one."""

    def __init__(self, answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(x * 2).relu() + 1


def test_offload_called_while_another_thread_exports_answers(
    answer: Offload, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Annotations belong to the other thread's graph; two threads that annotate at once raised."""

    def annotate(_notes: object) -> AbstractContextManager[None]:
        raise KeyError("custom")

    monkeypatch.setattr("torch.compiler._is_exporting_flag", True)
    monkeypatch.setattr("torch.fx.traceback.annotate", annotate)
    with torch.no_grad():
        assert torch.equal(answer(X), model(X))


@pytest.mark.parametrize("backend", often(["eager", "aot_eager"], "eager"))
@pytest.mark.parametrize("far", [False, True], ids=["device", "server"])
@pytest.mark.full
def test_offload_called_by_compiled_code_answers(
    answer: Offload, remote: Offload, model: nn.Module, backend: str, far: bool
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(Around(remote if far else answer), backend=backend)
    with torch.no_grad():
        for x in (X, X + 1):
            assert torch.equal(compiled(x), Around(model)(x))
    if far:
        assert remote.last is not None
        assert remote.last.server


def trace(answer: Offload) -> object:
    return torch.jit.trace(lambda x: answer(x) * 2, X)


def vmap(answer: Offload) -> object:
    return torch.vmap(answer)(X[None])


def gradient(answer: Offload) -> object:
    return torch.func.grad(lambda x: answer(x).sum())(X)


def derivative(answer: Offload) -> object:
    return torch.func.jvp(answer, (X,), (X,))


def export(answer: Offload) -> object:
    return torch.export.export(Around(answer), (X,))


def fake(answer: Offload) -> object:
    with FakeTensorMode() as mode:
        return answer(mode.from_tensor(X))


def sparse(answer: Offload) -> object:
    return answer(X.to_sparse())


def autocast(answer: Offload) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return answer(X)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "call, said",
    [
        (trace, "torch.jit.trace cannot look into"),
        (vmap, "vmap and grad, cannot look into"),
        (gradient, "vmap and grad, cannot look into"),
        (derivative, "vmap and grad, cannot look into"),
        (export, "plain memory, got a tensor of type FakeTensor"),
        (fake, "plain memory, got a tensor of type FakeTensor"),
        (sparse, "layout sparse_coo"),
        (autocast, "is called under autocast to bfloat16"),
    ],
)
def test_offload_called_where_no_answer_could_be_right_is_an_error_that_says_why(
    answer: Offload, call: Callable[[Offload], object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        call(answer)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.enable_grad, lambda: torch.device("meta")])
def test_offload_called_in_another_mode_or_default_device_asks_servers_as_ever(
    remote: Offload, model: nn.Module, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    with around():
        given = remote(X)
    assert torch.equal(given, here(model, X))
    assert remote.last is not None
    assert remote.last.server


def test_offload_captures_under_another_default_device_and_type(server: Running) -> None:
    model = chain()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with (
            torch.device("meta"),
            upriver.offload(model, example_inputs=X, servers=[server.url], policy="remote") as answer,
        ):
            assert torch.equal(answer(X), here(model, X))
            assert answer.last is not None
            assert answer.last.server == server.url
            torch.set_default_dtype(before)
            with pytest.raises(ConfigError, match=r"default dtype was torch\.float64 .* is torch\.float32"):
                answer(X)
    finally:
        torch.set_default_dtype(before)


def test_offload_asks_no_server_while_torch_computes_with_another_number_of_threads(
    remote: Offload, model: nn.Module
) -> None:
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    try:
        assert torch.equal(remote(X), here(model, X))
        assert remote.last is not None
        assert remote.last.server == ""
        assert "computes with 2 threads here and did with 1 when" in remote.why
    finally:
        torch.set_num_threads(1)
    assert torch.equal(remote(X), here(model, X))
    assert remote.last.server


def of_export(model: nn.Module, *, strict: bool = False) -> nn.Module:
    return torch.export.export(model, (X,), strict=strict).module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        of_export,
        lambda model: of_export(model, strict=True),
        lambda model: torch.export.unflatten(torch.export.export(model, (X,))),
        lambda model: nn.Sequential(of_export(model), nn.ReLU()),
        lambda model: torch.fx.symbolic_trace(model),
        lambda model: torch.jit.trace(model, X),
        lambda model: torch.compile(model, backend="eager"),
    ],
    ids=["export", "strict", "unflattened", "inside another", "fx", "jit", "compiled"],
)
@pytest.mark.full
def test_offload_of_a_model_that_torch_has_recorded_gives_its_answer(
    model: nn.Module, make: Callable[[nn.Module], nn.Module]
) -> None:
    recorded = make(model.eval())
    with torch.no_grad(), upriver.offload(recorded, example_inputs=X) as answer:
        assert torch.equal(answer(X), recorded(X))
