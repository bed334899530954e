"""Check models and programs that answer on an accelerator while they load: same bits, no leftovers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.coldstart.networks import NETWORKS, Tied, all_made_up, answer
from tests.coldstart.ordered import Ordered, hesitating, published
from tests.program.nets import Small
from upriver.coldstart import load_program
from upriver.coldstart.fetch import strategy
from upriver.coldstart.load_model import load, loading
from upriver.errors import StoreError
from upriver.program.capture.prefix import capture
from upriver.store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def whole() -> dict[str, nn.Module]:
    return all_made_up(31)


def there(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) for name, value in arguments.items()}


def expected(model: nn.Module, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the complete model's answer on the accelerator, and move the model back to the CPU."""
    try:
        return answer(model.to(DEVICE), there(arguments))
    finally:
        model.to("cpu")


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return bool(one) and len(one) == len(other) and all(map(torch.equal, one, other))


def constructed_there(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        with DEVICE:
            return build()

    return built


@pytest.mark.parametrize("constructed", ["here", "there"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_answer_is_that_of_the_loaded_model(
    name: str, constructed: str, whole: dict[str, nn.Module]
) -> None:
    build, arguments = NETWORKS[name]
    store = published(whole[name], name)
    builder = build if constructed == "here" else constructed_there(build)
    model = load(builder, "model", store=store, device=DEVICE).eval()
    first = answer(model, there(arguments()))
    assert all(tensor.is_cuda for tensor in first)
    assert same(first, expected(whole[name], arguments()))
    for key, value in whole[name].state_dict().items():  # waits for the rest
        found = model.state_dict()[key]
        assert found.is_cuda and torch.equal(found.cpu(), value)
    assert loading(model) is None and torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shuffle", range(3))
def test_whatever_order_weights_come_in(
    name: str, shuffle: int, whole: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, arguments = NETWORKS[name]
    store, stream = hesitating(whole[name], name, shuffle, num_callers=2)
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(build, "model", store=store, device=DEVICE).eval()
    answers: dict[int, list[torch.Tensor]] = {}

    def asks(caller: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # each caller has its own
                answers[caller] = answer(model, there(arguments()))
                torch.cuda.current_stream().synchronize()
        finally:
            stream.answered()

    callers = [threading.Thread(target=asks, args=(caller,)) for caller in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    stream.join()
    for caller in range(2):
        assert same(answers[caller], expected(whole[name], arguments()))


@pytest.mark.parametrize("grouping", ["upriver", "pisel", "layer_by_layer"])
def test_however_weights_are_grouped(grouping: str, whole: dict[str, nn.Module]) -> None:
    build, arguments = NETWORKS["resnet18"]
    store = published(whole["resnet18"], "resnet18")
    for _ in range(2):  # the second load finds the first one's cached grouping
        model = load(build, "model", store=store, device=DEVICE, grouping=grouping).eval()
        assert same(answer(model, there(arguments())), expected(whole["resnet18"], arguments()))


def test_other_types_than_those_stored(whole: dict[str, nn.Module]) -> None:
    store = published(whole["resnet18"], "resnet18")
    build, arguments = NETWORKS["resnet18"]
    model = load(lambda: build().bfloat16(), "model", store=store, device=DEVICE).eval()
    given = {"x": arguments()["x"].bfloat16()}
    first = answer(model, there(given))
    plain = build().eval()
    plain.load_state_dict(whole["resnet18"].state_dict())
    assert same(first, expected(plain.bfloat16(), given))


def test_the_accelerator_holds_the_weights_once_and_gives_them_back(whole: dict[str, nn.Module]) -> None:
    build, arguments = NETWORKS["regnet"]
    store = published(whole["regnet"], "regnet")
    nbytes = sum(value.nbytes for value in whole["regnet"].state_dict().values())
    for turn in range(3):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = load(build, "model", store=store, device=DEVICE).eval()
        model.state_dict()
        assert torch.cuda.max_memory_allocated() - before <= 1.1 * nbytes + 512 * len(model.state_dict())
        answer(model, there(arguments()))
        del model
        gc.collect()
        assert turn == 0 or torch.cuda.memory_allocated() == before  # a first call keeps work space


def test_a_store_that_breaks_wakes_everybody_and_nothing_is_left(
    whole: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = published(whole["tied"], "tied")
    error = StoreError("gone")
    build, arguments = NETWORKS["tied"]
    before = torch.cuda.memory_allocated()
    with monkeypatch.context() as patch:
        patch.setattr(strategy, "WeightStream", Ordered(error=(1, error)).of)
        model = load(build, "model", store=store, device=DEVICE).eval()
        with pytest.raises(StoreError, match="gone"):
            answer(model, there(arguments()))
        del model
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    model = load(build, "model", store=store, device=DEVICE).eval()
    assert isinstance(model, Tied) and model.head.weight is model.embedding.weight
    assert same(answer(model, there(arguments())), expected(whole["tied"], arguments()))


def test_a_model_moves_on_when_its_weights_are_there(whole: dict[str, nn.Module]) -> None:
    build, arguments = NETWORKS["bert"]
    store = published(whole["bert"], "bert")
    back = load(build, "model", store=store, device=DEVICE).eval().to("cpu")
    assert same(answer(back, arguments()), answer(whole["bert"], arguments()))
    gone = load(build, "model", store=store).eval().to(DEVICE)
    assert same(answer(gone, there(arguments())), expected(whole["bert"], arguments()))


def test_gradients_of_a_first_call(whole: dict[str, nn.Module]) -> None:
    build, arguments = NETWORKS["encoder"]
    store = published(whole["encoder"], "encoder")
    model, plain = load(build, "model", store=store, device=DEVICE), build()
    plain.load_state_dict(whole["encoder"].state_dict())
    for each in (model, plain.to(DEVICE)):
        each.eval()(**there(arguments())).square().sum().backward()
    for name, value in plain.named_parameters():
        found = model.get_parameter(name).grad
        assert found is not None and value.grad is not None and torch.equal(found, value.grad), name


@pytest.mark.parametrize("stop", [None, 3])
def test_a_program_runs_while_it_loads(stop: int | None) -> None:
    torch.manual_seed(3)
    model, x = Small(64).eval(), torch.randn(2, 3, 16, 16)
    program = capture(model, x, granularity="op")
    store = Store.open("memory://program-gpu")
    load_program.publish(program, store)
    coming = load_program.open(store=store, digest=program.digest, device=DEVICE, stop=stop)
    last = program.num_stages if stop is None else stop
    found = coming.run((x.to(DEVICE),), 0, last)
    again = load_program.open(store=store, digest=program.digest, device=DEVICE)
    if (arriving := load_program.arriving(again)) is not None:
        arriving.wait()
    assert same(list(found), list(again.run((x.to(DEVICE),), 0, last)))
    if stop is None:
        with torch.no_grad():
            assert torch.equal(found[0], model.to(DEVICE)(x.to(DEVICE)))
