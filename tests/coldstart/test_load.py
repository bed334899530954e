"""Check models that answer while they load: the loaded model's bits, or a typed error."""

from __future__ import annotations

import copy
import gc
import shutil
import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from tests.coldstart.leaving import threads
from tests.coldstart.networks import EACH, NETWORKS, Bare, Encoder, Tied, all_made_up, answer
from tests.coldstart.ordered import Ordered, hesitating, published
from tests.examples import examples, some
from tests.server.running import wait_for
from upriver.coldstart.fetch import strategy
from upriver.coldstart.format.access_order import publish_model
from upriver.coldstart.format.checkpoint import find, order_path
from upriver.coldstart.format.manifest import publish
from upriver.coldstart.grouping import grouping_cache
from upriver.coldstart.grouping import groups as grouping
from upriver.coldstart.load_model import load, loading
from upriver.coldstart.plain_load import load_plainly
from upriver.errors import (
    ConfigError,
    Damaged,
    ModelError,
    ObjectNotFound,
    ProgramError,
    StoreError,
    UpriverError,
)
from upriver.store import Store


@pytest.fixture(scope="module")
def whole() -> dict[str, nn.Module]:
    return all_made_up(29)


def is_left_alone(model: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether nothing of the loading remains."""
    wait_for(lambda: not threads())  # one may start another, such as one that caches groupings
    hooks = [name for name in vars(model) if "hook" in name and vars(model)[name]]
    modes = torch._C._len_torch_dispatch_stack()
    return type(model) is kind and not hooks and not modes and loading(model) is None


# ---------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("name", some(3, EACH))
def test_the_first_answer_is_that_of_the_loaded_model(name: str, whole: dict[str, nn.Module]) -> None:
    build, arguments = NETWORKS[name]
    store = published(whole[name], name)
    model = load(build, "model", store=store).eval()
    first = answer(model, arguments())
    expected = answer(whole[name], arguments())
    assert first and len(first) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(first, expected, strict=True))
    handle = loading(model)
    assert handle is None or handle.wait(60)
    assert is_left_alone(model, type(whole[name]))
    for key, value in whole[name].state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize("name", some(3, EACH))
@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shuffle=st.integers(0, 2**32 - 1))
def test_whatever_order_weights_come_in(
    name: str, whole: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch, shuffle: int
) -> None:
    build, arguments = NETWORKS[name]
    store, stream = hesitating(whole[name], name, shuffle, num_callers=2)
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(build, "model", store=store).eval()
    answers: dict[Any, list[torch.Tensor]] = {}

    def asks(mode: Any) -> None:
        try:
            answers[mode] = answer(model, arguments(), mode)
        finally:
            stream.answered()

    modes = (torch.no_grad, torch.inference_mode)
    callers = [threading.Thread(target=asks, args=(mode,)) for mode in modes]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    stream.join()
    for mode in modes:
        expected = answer(whole[name], arguments(), mode)
        assert all(torch.equal(one, other) for one, other in zip(answers[mode], expected, strict=True))
    assert is_left_alone(model, type(whole[name]))


def test_a_call_waits_for_what_it_reads_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if both else x

    reference = Two()
    store = published(reference, "two")
    stream = Ordered(lets=threading.Semaphore(2))
    assert stream.lets is not None
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(Two, "model", store=store)
    x = torch.ones(2, 3)
    assert torch.equal(model(x), reference(x))
    assert type(model) is not Two and loading(model) is not None
    late: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: late.append(model(x, True)))
    caller.start()
    while not {2, 3} & set(stream.hurried):
        pass
    assert not late
    stream.lets.release(2)
    caller.join(60)
    assert torch.equal(late[0], reference(x, True))
    stream.join()
    assert type(model) is Two


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.state_dict(),
        lambda model: model.inner,
        lambda model: model.to(torch.float64),
        lambda model: list(model.parameters()),
        lambda model: model.forward(torch.ones(1, 16)),
        lambda model: copy.deepcopy(model),
        lambda model: repr(model),
        lambda model: setattr(model, "other", 1),
    ],
)
def test_whatever_else_is_asked_waits_for_everything(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Bare()
    stream = Ordered(lets=threading.Semaphore(0))
    assert stream.lets is not None
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(Bare, "model", store=published(reference, "bare"))
    done = threading.Event()

    def asks() -> None:
        ask(model)
        done.set()

    caller = threading.Thread(target=asks)
    caller.start()
    stream.lets.release(len(stream.order) - 1)
    assert not done.wait(0.2)
    stream.lets.release()
    assert done.wait(60)
    caller.join()


def test_it_says_what_it_is_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Ordered(lets=threading.Semaphore(0))
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(Encoder, "model", store=published(Encoder(), "encoder"))
    assert isinstance(model, Encoder) and type(model).__name__ == "Encoder"
    assert model.train() is model and model.eval() is model and model.requires_grad_(False) is model
    handle = loading(model)
    assert handle is not None and not handle.wait(0.01)
    handle.cancel()


# --------------------------------------------------------------------------------------- other files


@pytest.mark.parametrize("tied", ["embedding.weight", "head.weight"])
def test_a_file_of_anyone_with_one_name_of_a_tie(tied: str, tmp_path: Any) -> None:
    reference = Tied().eval()
    state = {
        key: value
        for key, value in reference.state_dict().items()
        if key in (tied, "norm.weight", "norm.bias")
    }
    save_file(state, tmp_path / "model.safetensors")
    model = load(Tied, f"file://{tmp_path}/model.safetensors")
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(x), reference(x))
    handle = loading(model)
    assert handle is None or handle.wait(60)
    assert model.head.weight is model.embedding.weight


def test_groupings_are_kept_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "SMALL_BYTES", 0)  # as if it were a large model
    reference = Bare()
    store = published(reference, "kept")
    x = torch.ones(2, 16)
    for number in range(3):
        model = load(Bare, "model", store=store)
        assert torch.equal(model(x), reference(x))
        assert is_left_alone(model, Bare)
        source = find(store, "model")
        groupings = grouping_cache.kept(source)
        if not number:
            assert list(groupings.values()) and all(
                [index for group in groups for index in group] == list(range(len(source.tensors)))
                for groups in groupings.values()
            )
    store.put(grouping_cache.path_of(source), b"{}")
    assert grouping_cache.kept(source) == {}
    assert torch.equal(load(Bare, "model", store=store)(x), reference(x))


def test_an_order_is_kept_on_first_use(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Bare()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    store = Store.open(f"file://{tmp_path}")
    stream = Ordered(lets=threading.Semaphore(0))
    assert stream.lets is not None
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(Bare, "model", store=store)
    handle = loading(model)
    stream.lets.release(len(reference.state_dict()) - 1)
    caller = threading.Thread(target=lambda: model(torch.ones(1, 16)))
    caller.start()
    while not stream.hurried and stream.thread.is_alive() and caller.is_alive():
        pass
    stream.lets.release(1)
    caller.join(60)
    assert handle is not None and handle.wait(60)
    assert store.exists(order_path("model"))
    names = [placed.name for placed in find(store, "model").tensors]
    assert find(store, "model").ordered
    assert names[:2] == ["inner.bias", "inner.weight"] or names[:2] == ["inner.weight", "inner.bias"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_type_are_converted(dtype: torch.dtype, mode: Any) -> None:
    reference = Bare()
    store = Store.open(f"memory://types-{uuid.uuid4().hex}")
    publish({key: value.to(dtype) for key, value in reference.state_dict().items()}, store, "m.safetensors")
    expected = Bare()
    expected.load_state_dict({key: value.to(dtype) for key, value in reference.state_dict().items()})
    with mode():
        model, x = load(Bare, "m", store=store), torch.ones(2, 16)
        assert torch.equal(model(x), expected(x))
    handle = loading(model)
    assert handle is None or handle.wait(60)


def test_weights_that_do_not_lie_row_by_row() -> None:
    def build() -> nn.Module:
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    reference = build()
    x = torch.ones(1, 3, 5, 5)
    model = load(build, "model", store=published(reference, "conv"))
    assert torch.equal(model(x), reference(x))


# --------------------------------------------------------------------------------------------- errors


def test_what_is_missing_or_misshapen_is_told_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "WeightStream", None)
    store = Store.open(f"memory://wrong-{uuid.uuid4().hex}")
    state = dict(Bare().state_dict())
    state["shift"] = torch.ones(15)
    state["other"] = state.pop("flag").clone()
    publish(state, store, "m.safetensors")
    with pytest.raises(ModelError) as raised:
        load(Bare, "m", store=store)
    for part in (
        "flag is missing",
        "other is unexpected",
        "shift ([15] there, [16] here) is of another shape",
    ):
        assert part in str(raised.value)


def test_a_copy_of_what_was_published_loads(tmp_path: Path) -> None:
    reference, x = Bare(), torch.ones(2, 16)
    (tmp_path / "one").mkdir()
    publish(reference.state_dict(), Store.open((tmp_path / "one").as_uri()), "m.safetensors")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert torch.equal(load(Bare, (tmp_path / "two" / "m").as_uri())(x), reference(x))
    copied = tmp_path / "two" / "m.safetensors"
    copied.write_bytes(copied.read_bytes()[:-1] + b"\xff")
    model = load(Bare, (tmp_path / "two" / "m").as_uri())
    with pytest.raises(Damaged, match=r"another checksum than was published.*; publish it again"):
        model(x)
    with pytest.raises(Damaged, match=r"another checksum than was published.*; publish it again"):
        load_plainly(Bare, (tmp_path / "two" / "m").as_uri())


def test_a_model_that_was_constructed_without_memory_is_named() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(3, 4)

    store = Store.open(f"memory://meta-{uuid.uuid4().hex}")
    publish(nn.Linear(3, 4).state_dict(), store, "m.safetensors")
    with pytest.raises(ModelError, match=r"Linear: 'weight' is on the meta device .* init_empty_weights"):
        load(build, "m", store=store)


def test_a_sparse_buffer_is_named_by_who_publishes_and_who_loads() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("few", torch.eye(4).to_sparse())
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.few @ self.inner(x)

    store = Store.open(f"memory://sparse-{uuid.uuid4().hex}")
    with pytest.raises(ProgramError, match=r"weight 'few' is of layout torch\.sparse_coo"):
        publish_model(Sparse(), store, "m.safetensors", (torch.ones(4, 4),))
    publish({**Sparse().inner.state_dict(prefix="inner."), "few": torch.eye(4)}, store, "m.safetensors")
    with pytest.raises(ModelError, match=r"Sparse: 'few' is of layout torch\.sparse_coo"):
        load(Sparse, "m", store=store)


def test_what_is_no_module_yet_is_named() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            pass

    store = published(Bare(), "early")
    with pytest.raises(ModelError, match=r"Early is no module yet: it does not call super\(\)\.__init__"):
        load(Early, "model", store=store)


def test_a_weight_without_a_shape_is_named() -> None:
    store = Store.open(f"memory://lazy-{uuid.uuid4().hex}")
    publish(nn.Linear(3, 4).state_dict(), store, "m.safetensors")
    with pytest.raises(ModelError, match=r"LazyLinear: 'weight' is lazy"):
        load(lambda: nn.LazyLinear(4), "m", store=store)


def test_weights_that_the_model_does_not_have_can_be_left() -> None:
    reference = Bare()
    store = Store.open(f"memory://more-{uuid.uuid4().hex}")
    publish({**reference.state_dict(), "other": torch.ones(7)}, store, "m.safetensors")
    x = torch.ones(2, 16)
    with pytest.raises(ModelError, match="other is unexpected"):
        load(Bare, "m", store=store)
    assert torch.equal(load(Bare, "m", store=store, strict=False)(x), reference(x))


@pytest.mark.parametrize("arrived", [0, 1, 5])
def test_everybody_gets_the_same_error_and_a_second_load_works(
    arrived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Bare()
    store = published(reference, "broken")
    with monkeypatch.context() as patched:
        stream = Ordered(lets=threading.Semaphore(0), error=(arrived, StoreError("the store broke")))
        assert stream.lets is not None
        patched.setattr(strategy, "WeightStream", stream.of)
        model = load(Bare, "model", store=store)
        raised: list[BaseException] = []

        def asks(what: Any) -> None:
            try:
                what()
            except UpriverError as error:
                raised.append(error)

        waits: list[Any] = [lambda: model(torch.ones(1, 16)), lambda: model.state_dict(), lambda: model.inner]
        callers = [threading.Thread(target=asks, args=(what,)) for what in waits]
        for caller in callers:
            caller.start()
        stream.lets.release(arrived + 1)
        for caller in callers:
            caller.join(60)
        for what in waits:
            asks(what)
    assert [type(error) for error in raised] == [StoreError] * 6
    assert {str(error) for error in raised} == {"the store broke"} and len(set(map(id, raised))) == 6
    x = torch.ones(2, 16)
    assert torch.equal(load(Bare, "model", store=store)(x), reference(x))


def test_a_model_that_is_dropped_ends_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Ordered(lets=threading.Semaphore(0))
    monkeypatch.setattr(strategy, "WeightStream", stream.of)
    model = load(Bare, "model", store=published(Bare(), "dropped"))
    gone = weakref.ref(model)
    del model
    gc.collect()
    stream.join()
    assert gone() is None and stream.over


def test_an_exception_of_the_models_own_leaves_no_mode() -> None:
    def build() -> nn.Module:
        return nn.Linear(3, 3)

    model = load(build, "model", store=published(build(), "linear"))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert model(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("uri", ["s3:/x", "s3://bucket", "file://", "", "/", "w\0"])
def test_a_uri_that_is_none(uri: str) -> None:
    with pytest.raises(ConfigError):
        load(Bare, uri)


def test_weights_that_are_not_there(tmp_path: Any) -> None:
    for uri in (f"file://{tmp_path}/model", f"{tmp_path}/model", "model"):
        with pytest.raises(ObjectNotFound):
            load(Bare, uri)
    with pytest.raises(StoreError, match="does not exist"):
        load(Bare, f"{tmp_path}/x/y")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
