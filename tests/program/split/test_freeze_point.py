"""Check the freeze point, the values that cross it, and that the answer is the whole model's."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.examples import some
from tests.program.nets import (
    Auxiliary,
    BranchingLate,
    Checkpointed,
    Counting,
    Late,
    LayerDrop,
    Masked,
    Noisy,
    SharedDropout,
    SideChannel,
    Skips,
    TimeFirst,
    Towers,
    Windows,
    freeze,
    frozen_small,
)
from upriver._torchvision import ensure_torchvision
from upriver.errors import CaptureError, ConfigError, ModelError
from upriver.program.example_inputs import Example, Inputs, tensors_in
from upriver.program.freeze import keep_in_eval
from upriver.program.graph.executor import Program
from upriver.program.split import proof_cache, verification
from upriver.program.split.crossing_values import CrossingValues
from upriver.program.split.freeze_point import FreezePoint
from upriver.program.split.split import Split, split
from upriver.program.split.tail import Tail


def frozen(model: nn.Module, *names: str) -> nn.Module:
    torch.manual_seed(0)
    for name in names:
        freeze(model.get_submodule(name))
    return model


def agree(model: nn.Module, parts: Split, example: Inputs, *, training: bool = True) -> None:
    """Check that program + tail give the outputs and gradients of the whole model."""
    assert parts.program is not None, parts.why_not
    given = Example.of(example)
    model.train(training)
    keep_in_eval(model, list(parts.in_eval))
    trained = [p for p in model.parameters() if p.requires_grad]

    def outcome(run: Callable[[], object]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        torch.manual_seed(7)
        answers = tensors_in(run())
        loss = torch.stack([a.square().sum() for a in answers if a.requires_grad]).sum()
        return answers, list(torch.autograd.grad(loss, trained, allow_unused=True))

    values = parts.program.run(given.tensors, 0, parts.freeze)
    features = parts.tail.values.one_or_all(values)
    ours, our_gradients = outcome(lambda: parts.tail(features))
    theirs, their_gradients = outcome(lambda: model(*given.args, **given.kwargs))
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(our_gradients, their_gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def crossing(parts: Split) -> list[str]:
    return [str(ship.source) for ship in parts.tail.values.ships]


@pytest.mark.full
def test_a_frozen_tower_that_runs_second_is_prefix() -> None:
    model = frozen(Towers(), "frozen")
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert crossing(parts) == ["input 0", "frozen"]
    assert parts.program is not None
    assert [stage.name for stage in parts.program.stages][:2] == ["frozen.0", "frozen.1"]
    agree(model, parts, x)


class WritesLate(nn.Module):
    """Write into the input behind the frozen layer, which has read it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.frozen, self.trained, self.writes = nn.Linear(6, 6), nn.Linear(6, 3), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.frozen(x).relu()
        late = x.mul_(0.5) if self.writes else x * 0.5
        return self.trained(given + late)


@pytest.mark.parametrize("writes", some(1, [True, False]))
def test_input_that_the_tail_writes_into_stays_as_it_was(writes: bool) -> None:
    model, x = frozen(WritesLate(writes=writes), "frozen"), torch.randn(4, 6)
    parts = split(model, x.clone())
    assert crossing(parts) == ["input 0", "frozen"]
    assert [ship.overwritten for ship in parts.tail.values.ships] == [writes, False]
    agree(model, parts, x.clone())
    assert parts.program is not None
    features = (x.clone(), *parts.program.run((x.clone(),), 0, parts.program.num_stages))[:2]
    first = parts.tail(features)
    assert torch.equal(features[0], x) and torch.equal(parts.tail(features), first)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


class WritesOne(nn.Module):
    """Write into one of two results of the frozen module."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.trained = Pair(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.pair(x)
        return self.trained(one.mul_(0.5) + other)


def test_result_of_which_one_tensor_is_written_into_is_copied() -> None:
    model, x = frozen(WritesOne(), "pair"), torch.randn(4, 6)
    parts = split(model, x)
    assert [ship.overwritten for ship in parts.tail.values.ships] == [True, True]
    agree(model, parts, x)


@pytest.mark.parametrize("wrong", [0, 1, None])
def test_each_answer_of_a_cut_model_must_be_that_of_the_whole(wrong: int | None) -> None:
    answers = [torch.ones(2), torch.zeros(2)]
    others = [answer + (index == wrong) for index, answer in enumerate(answers)]
    whole, cut = (SimpleNamespace(answers=each, gradients={}, left={}) for each in (answers, others))
    step = SimpleNamespace(taken=lambda *_: cut)
    tail = SimpleNamespace(boundary="b", values=SimpleNamespace(one_or_all=lambda values: values))
    check = functools.partial(verification._same_answers, cast(Any, step), cast(Any, tail))
    eval_plan = cast(Any, SimpleNamespace(modules=()))
    if wrong is None:
        check(eval_plan, cast(Any, whole), ())
        return
    with pytest.raises(CaptureError, match="gives another answer than the whole one"):
        check(eval_plan, cast(Any, whole), ())


def test_several_tensors_cross_where_a_network_skips() -> None:
    model = frozen(Skips(), "down1", "down2", "down3")
    x = torch.randn(4, 3, 8, 8)
    parts = split(model, x)
    assert crossing(parts) == ["down1", "down2", "down3"]
    assert parts.boundary == "down3"
    agree(model, parts, x)


@pytest.mark.parametrize("shift", some(1, [None, torch.randn(4, 8)]))
def test_inputs_by_keyword_in_dicts_and_absent_ones(shift: torch.Tensor | None) -> None:
    model = frozen(Masked(), "embed", "block1")
    mask = torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2] * 2)
    example = {"ids": torch.randint(0, 20, (4, 5)), "mask": mask, "options": {"shift": shift}}
    parts = split(model, example)
    late = ["input 1"] if shift is None else ["input 1", "input 2"]
    assert crossing(parts) == [*late, "block1"]
    agree(model, parts, example)


@pytest.mark.full
def test_positional_inputs_and_the_rest_left_out() -> None:
    model = frozen(Masked(), "embed", "block1", "block2")
    example = (torch.randint(0, 20, (4, 5)),)
    parts = split(model, example)
    assert crossing(parts) == ["block2"]
    agree(model, parts, example)


def test_what_a_module_without_parameters_gives_early_is_made_late() -> None:
    model = frozen(Late(), "first")
    parts = split(model, torch.randn(4, 6))
    assert crossing(parts) == ["input 0", "first"]
    agree(model, parts, torch.randn(4, 6))


def test_control_flow_on_data_behind_the_freeze_point_does_not_matter() -> None:
    model = frozen(BranchingLate(), "first", "second")
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert parts.boundary == "second"
    for given in (x, -x, torch.randn(4, 6), x + 5, x - 5):
        agree(model, parts, given)


def test_control_flow_on_data_in_the_frozen_part_ends_the_prefix_before_it() -> None:
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.two(torch.tanh(self.one(x)))
            if x.sum() > 0:
                x = x * 2
            return self.head(self.three(x))

    model = frozen(Middle(), "one", "two", "three")
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert parts.boundary == "two"
    assert "decides by the data" in parts.note
    assert [bool(attempt.why_not) for attempt in parts.attempts] == [True, False]
    agree(model, parts, x)
    agree(model, parts, -x)


@pytest.mark.full
def test_a_head_that_answers_in_training_only_gets_what_it_reads() -> None:
    model = frozen(Auxiliary(), "first", "second")
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert crossing(parts) == ["first", "second"]
    agree(model, parts, x)
    agree(model, parts, x, training=False)


def test_a_dropout_on_both_sides_is_off_in_the_prefix_and_random_behind_it() -> None:
    model = frozen(SharedDropout(), "first", "second")
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert parts.boundary == "second"
    assert "dropout" not in parts.in_eval
    agree(model, parts, x, training=False)
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    model.train()
    assert not torch.equal(parts.tail(features), parts.tail(features))


@pytest.mark.full
def test_layers_that_chance_may_leave_out_are_left_to_the_tail() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 6)
            self.rest = LayerDrop()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(self.stem(x))

    model = frozen(Stem(), "stem", "rest.layers.0", "rest.layers.1")
    parts = split(model, torch.randn(4, 6))
    assert parts.boundary == "stem"
    assert "random number" in parts.note
    agree(model, parts, torch.randn(4, 6))


def test_random_and_counting_modules_stay_where_the_model_runs() -> None:
    noisy = frozen(Noisy(), "first", "noise", "third")
    parts = split(noisy, torch.randn(4, 6))
    assert parts.boundary == "first"
    assert "random operator aten::rand_like" in parts.note
    agree(noisy, parts, torch.randn(4, 6))
    counting = frozen(Counting(), "first", "counter")
    parts = split(counting, torch.randn(4, 6))
    assert parts.boundary == "first"
    assert "changes buffer 'counter.count'" in parts.note
    assert isinstance(counting, Counting)
    assert float(counting.counter.count) == 0


def test_a_module_that_keeps_a_value_for_later_runs_where_it_is_read() -> None:
    model = frozen(SideChannel(), "first", "second")
    parts = split(model, torch.randn(4, 6))
    assert "keeps a value" in parts.note
    assert parts.program is not None
    agree(model, parts, torch.randn(4, 6))


@pytest.mark.parametrize(("together", "crosses"), some(1, [(False, "blocks.1"), (True, "blocks.1")]))
@pytest.mark.full
def test_checkpointed_regions_on_either_side_of_the_cut(together: bool, crosses: str) -> None:
    model = frozen(Checkpointed(together=together), "blocks.0", "blocks.1")
    parts = split(model, torch.randn(4, 6))
    assert parts.boundary == crosses
    agree(model, parts, torch.randn(4, 6))


@pytest.mark.full
def test_a_prefix_ends_before_a_checkpointed_region_that_it_would_cut() -> None:
    model = frozen(Checkpointed(together=True), "blocks.0", "blocks.1", "blocks.2")
    parts = split(model, torch.randn(4, 6))
    assert parts.boundary == "blocks.1"
    assert "activation checkpointing" in parts.attempts[0].why_not
    agree(model, parts, torch.randn(4, 6))


@pytest.mark.full
def test_without_frozen_modules_before_it_a_checkpointed_region_is_not_cut() -> None:
    parts = split(frozen(Checkpointed(together=True), "blocks.0"), torch.randn(4, 6))
    assert parts.program is None
    assert "activation checkpointing" in parts.why_not


@pytest.mark.parametrize(("model", "shape"), some(1, [(TimeFirst(), (4, 5, 6)), (Windows(), (4, 24))]))
def test_samples_may_lie_elsewhere_than_in_the_first_rows(model: nn.Module, shape: tuple[int, ...]) -> None:
    frozen(model, "first")
    x = torch.randn(shape)
    parts = split(model, x)
    agree(model, parts, x)
    assert parts.program is not None
    values = parts.program.run((x,), 0, parts.freeze)
    chosen = parts.tail.values.select(values, [2, 0])
    again = parts.tail.values.concatenate([chosen, parts.tail.values.select(values, [1, 2, 3])])
    assert parts.tail.values.samples_of(again) == 5
    model.eval()
    with torch.no_grad():
        assert torch.equal(parts.tail(again), model(x[[2, 0, 1, 2, 3]]))


@pytest.mark.full
def test_values_take_nothing_but_what_crosses() -> None:
    parts = split(frozen(Towers(), "frozen"), torch.randn(4, 6))
    good = (torch.randn(3, 6), torch.randn(3, 6))
    assert isinstance(parts.tail.values, CrossingValues)
    parts.tail(good)
    for wrong in (good[0], (good[0],), (good[0], torch.randn(2, 6)), [good[0], good[1]], ("a", "b"), None):
        with pytest.raises(ConfigError, match=r"of shape \(n, 6\) and \(n, 6\), got"):
            parts.tail(wrong)


class Scaled(nn.Module):
    """A tail of one product, which takes any type and gives another one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) * self.scale


@pytest.mark.parametrize("dtype", some(1, [torch.float64, torch.float16, torch.int64]))
def test_features_of_another_type_are_refused_by_name(dtype: torch.dtype) -> None:
    said = rf"features \('frozen'\) must be torch\.float32, got {dtype}"
    with pytest.raises(ConfigError, match=said):
        split(frozen(Scaled(), "frozen"), torch.randn(4, 6)).tail(torch.randn(3, 6).to(dtype))
    towers = split(frozen(Towers(), "frozen"), torch.randn(4, 6))
    with pytest.raises(ConfigError, match=rf"features\[1\] \(.*\) must be torch\.float32, got {dtype}"):
        towers.tail((torch.randn(3, 6), torch.randn(3, 6).to(dtype)))


@pytest.mark.parametrize("dtype", some(1, [torch.bfloat16, torch.float16, torch.float64]))
@pytest.mark.full
def test_other_types(dtype: torch.dtype) -> None:
    model = frozen(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)), "0", "2").to(
        dtype
    )
    x = torch.randn(4, 6).to(dtype)
    parts = split(model, x)
    assert parts.program is not None
    assert parts.program.stages[-1].out_bytes == 6 * dtype.itemsize
    agree(model, parts, x)


@pytest.mark.full
def test_autocast_is_part_of_the_program_and_of_the_tail() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    plain, cast = split(model, x), split(model, x, autocast=torch.bfloat16)
    assert plain.program is not None
    assert cast.program is not None
    assert plain.program.digest != cast.program.digest
    values = cast.program.run((x,), 0, cast.freeze)
    model.train()
    keep_in_eval(model, list(cast.in_eval))
    torch.manual_seed(0)
    ours = cast.tail(values[0])
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = model(x)
    assert ours.dtype is torch.bfloat16
    assert torch.equal(ours, theirs)


def test_the_tail_compiles_to_one_graph_and_is_not_compiled_again() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    parts = split(model, x)
    assert parts.program is not None
    compiled_graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled_graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(parts.tail, backend=backend, fullgraph=True)
    model.eval()
    for seed in range(3):
        given = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        values = parts.program.run((given,), 0, parts.freeze)
        assert torch.equal(compiled(values[0]), parts.tail(values[0]))
    assert len(compiled_graphs) == 1
    torch._dynamo.reset()


@pytest.mark.full
def test_hooks_and_flags_set_later_are_the_current_ones() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    parts = split(model, x)
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    model.eval()
    assert torch.equal(parts.tail(features), parts.tail(features))
    model.train()
    assert not torch.equal(parts.tail(features), parts.tail(features))
    seen: list[str] = []
    handle = model.register_forward_hook(lambda *_: seen.append("root"))
    parts.tail(features)
    handle.remove()
    parts.tail(features)
    assert seen == ["root"]


def test_an_instance_with_a_forward_of_its_own_is_refused() -> None:
    model = frozen_small()
    original = model.forward
    model.forward = lambda x: original(x)  # type: ignore[method-assign]
    parts = split(model, torch.randn(4, 3, 16, 16))
    assert parts.program is None
    assert "forward set on the instance" in parts.why_not


@pytest.mark.full
def test_granularity_of_operators_gives_more_cuts_and_the_same_features() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    modules, operators = split(model, x), split(model, x, granularity="op")
    assert modules.program is not None
    assert operators.program is not None
    assert operators.program.num_stages > modules.program.num_stages
    a = modules.program.run((x,), 0, modules.freeze)[0]
    assert torch.equal(a, operators.program.run((x,), 0, operators.freeze)[0])
    assert str(operators.attempts[-1]) == "up to block2, between operators: proven"


@pytest.mark.full
def test_a_proof_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    calls: list[str] = []
    real = Tail.forward

    def counted(self: Tail, *args: object) -> object:
        calls.append("tail")
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Tail, "forward", counted)
    x = torch.randn(4, 3, 16, 16)
    first = split(frozen_small(), x)
    assert calls
    calls.clear()
    again = split(frozen_small(), x)
    assert not calls
    assert first.program is not None
    assert again.program is not None
    assert again.program.digest == first.program.digest
    assert again.attempts[-1].remembered
    split(frozen_small(seed=1), x)  # other weights: another program
    assert calls
    calls.clear()
    changed = frozen_small()
    changed.dropout.p = 0.25  # another tail
    split(changed, x)
    assert calls


def test_a_proof_depends_on_whatever_a_forward_may_read(tmp_path: Path) -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    parts = split(model, x)
    assert parts.program is not None
    point = FreezePoint(name="block2")
    digests = [proof_cache.proof_digest(model, parts.program, point)]
    for setting in (
        ["a"],
        ["b"],
        {"a": 1},
        torch.ones(2),
        torch.zeros(2),
        len,
        sum,
        Towers,
        Config(1),
        Config(2),
    ):
        model.block3.setting = setting
        digests.append(proof_cache.proof_digest(model, parts.program, point))
        assert proof_cache.proof_digest(model, parts.program, point) == digests[-1]
    for number in range(2):  # code of one name, from files that differ
        file = tmp_path / f"{number}.py"
        file.write_text(f"def scale():\n    return {number}\n")
        spec = importlib.util.spec_from_file_location("users_code", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model.block3.setting = module.scale
        digests.append(proof_cache.proof_digest(model, parts.program, point))
    [*model.modules()][-1].register_parameter("tied", next(model.parameters()))
    digests.append(proof_cache.proof_digest(model, parts.program, point))
    elsewhere = SimpleNamespace(digest=parts.program.digest, device=torch.device("meta"))
    digests.append(proof_cache.proof_digest(model, cast(Program, elsewhere), point))
    assert len(set(digests)) == len(digests)


class Config:
    """An object without a text of its own."""

    def __init__(self, number: int) -> None:
        self.inner = [{"number": number}]


@pytest.mark.full
def test_a_cache_that_cannot_be_written_or_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", "/dev/null/nowhere")
    parts = split(frozen_small(), torch.randn(4, 3, 16, 16))
    assert parts.program is not None
    assert proof_cache.is_proven("0" * 64, parts.program, FreezePoint(name="block2")) is None


@pytest.mark.full
def test_peft_adapters_cap_the_cut_at_the_earliest_one() -> None:
    ensure_torchvision()  # peft imports transformers, which imports torchvision
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)], nn.Linear(6, 2))
    config = peft.LoraConfig(target_modules=["2.0"], r=2, lora_alpha=4)
    adapted = peft.get_peft_model(model, config)
    x = torch.randn(4, 6)
    parts = split(adapted, x)
    assert parts.program is not None, parts.why_not
    names = [stage.name for stage in parts.program.stages]
    assert names[:2] == ["base_model.model.0.0", "base_model.model.0.1"]
    assert crossing(parts) == ["base_model.model.1", "base_model.model.2.0.base_layer"]
    assert not any("lora" in name for name in names)
    agree(adapted, parts, x)


def test_errors_of_a_split_are_of_its_own_kinds() -> None:
    with pytest.raises(ModelError, match="nothing is frozen"):
        split(Towers(), torch.randn(4, 6))
    assert issubclass(CaptureError, Exception)


class Leaving(nn.Module):
    """Leave an auxiliary loss on itself and count its calls, as its trained block does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.calls = 0
        self.seen: list[int] = []
        self.auxiliary: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.second(self.first(x)))
        self.calls += 1
        self.seen.append(self.calls)
        self.auxiliary = answer.square().mean()
        return answer * 2 if self.calls > 3 else answer


def test_what_a_forward_leaves_on_the_model_is_the_users_and_nothing_else() -> None:
    model, twin = frozen(Leaving(), "first", "second"), frozen(Leaving(), "first", "second")
    twin.load_state_dict(model.state_dict())
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert isinstance(model, Leaving)
    assert (model.calls, model.seen, model.auxiliary) == (0, [], None)
    assert parts.program is not None
    features = parts.tail.values.one_or_all(parts.program.run((x,), 0, parts.freeze))
    for _ in range(5):
        assert torch.equal(parts.tail(features), twin(x))
    assert (model.calls, model.seen) == (5, [1, 2, 3, 4, 5])
    assert model.auxiliary is not None
    assert torch.equal(model.auxiliary, twin.auxiliary)


def test_a_frozen_module_that_counts_in_an_attribute_stays_where_the_model_runs() -> None:
    class Late(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (1 + (self.calls > 100))

    model = frozen(nn.Sequential(nn.Linear(6, 6), Late(6, 6), nn.Linear(6, 2)), "0", "1")
    parts = split(model, torch.randn(4, 6))
    assert parts.boundary == "0"
    assert "keeps 'calls' from one call for the next" in parts.note


@pytest.mark.full
def test_a_flag_that_says_hooks_are_in_place_is_no_count() -> None:
    class Installing(nn.Linear):
        passes = 0
        hooks_installed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).passes += 1
            self.hooks_installed = type(self).passes > 1
            return super().forward(x)

    model = frozen(nn.Sequential(nn.Linear(6, 6), Installing(6, 6), nn.Linear(6, 2)), "0", "1")
    parts = split(model, torch.randn(4, 6))
    assert parts.boundary == "1"
    assert "counts" not in parts.note


@pytest.mark.full
def test_a_module_that_no_program_can_hold_ends_the_prefix_before_it() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gru, self.head = nn.Linear(6, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.gru(torch.tanh(self.first(x)))[0].mean(1))

    model = frozen(Recurrent(), "first", "gru")
    x = torch.randn(4, 5, 6)
    parts = split(model, x)
    assert parts.boundary == "first"
    assert "gru" in parts.note
    agree(model, parts, x)


@dataclasses.dataclass
class Answer:
    """An answer that no pytree knows."""

    logits: torch.Tensor
    hidden: torch.Tensor


@pytest.mark.full
def test_an_answer_may_be_a_dataclass() -> None:
    class Model(Late):
        def forward(self, x: torch.Tensor) -> Answer:  # type: ignore[override]
            hidden = self.first(x)
            return Answer(self.head(hidden), hidden)

    model = frozen(Model(), "first")
    parts = split(model, torch.randn(4, 6))
    assert crossing(parts) == ["first"]
    agree(model, parts, torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_cannot_be_watched_runs_unsplit_with_the_reason() -> None:
    class Differentiating(Late):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).detach().requires_grad_()
            slope = torch.autograd.grad(hidden.square().sum(), hidden)[0]
            return self.head(hidden + slope)

    parts = split(frozen(Differentiating(), "first"), torch.randn(4, 6))
    assert "without gradients" in parts.why_not
    scripted = nn.Sequential(torch.jit.trace(nn.Linear(6, 6), torch.randn(2, 6)), nn.Linear(6, 2))
    freeze(scripted[0])
    assert "TorchScript" in split(scripted, torch.randn(4, 6)).why_not


def test_an_example_without_samples_is_refused() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    with pytest.raises(ConfigError, match="at least one sample"):
        split(model, x[:0])


@pytest.mark.parametrize("samples", some(1, [1, 2, 3]))
def test_micro_batches_of_few_samples_are_proven_with_padding_too(samples: int) -> None:
    model = frozen(Towers(), "frozen")
    x = torch.randn(samples, 6)
    agree(model, split(model, x), x)


def test_is_proven_by_digest_alone_is_none_without_a_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))
    assert proof_cache.is_proven("a" * 64) is None
