"""Check that a split trains as the whole model does, also where only ``backward()`` makes a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.examples import some
from tests.program.nets import freeze
from upriver._torchvision import ensure_torchvision
from upriver.finetune.model_wrapper import TailRunner, WrappedModel
from upriver.finetune.planning.plan_builder import measure_tail
from upriver.program.freeze import keep_in_eval
from upriver.program.split.split import Split, split

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Gradients = dict[str, Any]


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        freeze(model.get_submodule(name))
    return model.train()


def gradients(model: nn.Module, parts: Split, run: Callable[[], Any]) -> Gradients:
    """Return the gradient that one step leaves in each parameter."""
    model.zero_grad(set_to_none=True)
    model.train()
    keep_in_eval(model, list(parts.in_eval))
    torch.manual_seed(3)
    answer = run()
    answer = answer if isinstance(answer, torch.Tensor) else answer[0]
    answer.square().mean().backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same_gradients(model: nn.Module, x: torch.Tensor, *, cut: bool = True) -> tuple[Split, set[str]]:
    """Check that the split trains as many parameters, with the same gradient bits, as the whole model."""
    parts = split(model, x)
    assert (parts.program is not None) == cut, parts.why_not
    features = (x,) if parts.program is None else parts.program.run((x,), 0, parts.freeze)
    wanted = gradients(model, parts, lambda: model(x))
    ours = gradients(model, parts, lambda: parts.tail(parts.tail.values.one_or_all(features)))
    assert wanted.keys() == ours.keys()
    for name, gradient in wanted.items():
        assert (gradient is None) == (ours[name] is None), name
        assert gradient is None or torch.equal(gradient, ours[name]), name
    if parts.program is not None:
        measure_tail(model, parts, features, samples=x.shape[0])
    return parts, {name for name, gradient in wanted.items() if gradient is not None}


# -------------------------------------------------------------------------------- written by hand


class Layers(nn.Module):
    """An embedding, blocks of which some are frozen, and a head; a test chooses how blocks run."""

    def __init__(self, run: Callable[[list[nn.Module], torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.run = (run,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run[0](list(self.blocks), self.embed(x)).mean(1))


def each_again(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def tail_again(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    x = blocks[1](blocks[0](x))
    return checkpoint(lambda x: blocks[3](blocks[2](x)), x, use_reentrant=True)


def segments_again(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(blocks[2:], 2, blocks[1](blocks[0](x)), use_reentrant=True)


def in_turn(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def make_inputs_require_grads(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    """Ask for a gradient of the inputs, under the name that transformers uses."""
    output.requires_grad_(True)


def words() -> torch.Tensor:
    return torch.arange(12).reshape(4, 3) % 9


@pytest.mark.parametrize(
    ("run", "boundary"),
    [
        (each_again, "embed"),
        (tail_again, "blocks.1"),
        (segments_again, "blocks.1"),
    ],  # first: each block runs twice
)
@pytest.mark.full
def test_layers_that_run_again_are_trained_where_a_hook_asks_for_a_gradient(run: Any, boundary: str) -> None:
    model = frozen(Layers(run), "embed", "blocks.0", "blocks.1")
    model.embed.register_forward_hook(make_inputs_require_grads)
    parts, trained = same_gradients(model, words())
    assert parts.boundary == boundary
    assert {"blocks.2.0.weight", "blocks.3.0.weight", "head.weight"} <= trained


@pytest.mark.full
def test_layers_that_run_again_without_a_gradient_in_front_stay_without_one() -> None:
    parts, trained = same_gradients(frozen(Layers(each_again), "embed", "blocks.0"), words())
    assert parts.boundary == "blocks.0"
    assert trained == {"head.weight", "head.bias"}  # as the whole model does, with torch's own warning


@pytest.mark.full
def test_a_hook_on_a_trained_layer_that_asks_for_a_gradient_works_as_ever() -> None:
    model = frozen(Layers(tail_again), "embed", "blocks.0")

    def ask(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].requires_grad_()

    model.blocks[1].register_forward_pre_hook(ask)
    x = words()
    parts, trained = same_gradients(model, x)
    assert "blocks.3.0.weight" in trained
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    parts.tail(features).sum().backward()
    assert features.grad is None  # a value that a caller holds stays as it is


class Kept(torch.autograd.Function):
    """Give its weight a gradient where its input wants one, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]
        return gradient if wanted else None, (gradient * x).sum((0, 1)) if wanted else None


class Needing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Kept.apply(x, self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("asks", some(1, [True, False]))
def test_a_function_that_asks_who_needs_a_gradient_gets_the_same_answer(asks: bool) -> None:
    model = frozen(Layers(in_turn), "embed", "blocks.0")
    model.blocks[1] = Needing()
    if asks:
        model.embed.register_forward_hook(make_inputs_require_grads)
    parts, trained = same_gradients(model, words())
    assert parts.boundary == "blocks.0"
    assert ("blocks.1.weight" in trained) == asks


@pytest.mark.full
def test_a_loss_that_only_a_hook_makes_trains_what_it_trains_whole() -> None:
    model = frozen(Layers(in_turn), "embed", "blocks.0")
    beside = nn.Linear(8, 1)
    model.beside = beside

    def penalize(_module: nn.Module, args: tuple[torch.Tensor, ...], _output: Any) -> None:
        if torch.is_grad_enabled():
            beside(args[0].detach()).square().mean().backward()

    model.blocks[2].register_forward_hook(penalize)
    _, trained = same_gradients(model, words())
    assert {"beside.weight", "blocks.1.0.weight"} <= trained


def test_backward_hooks_of_the_tail_run_and_change_gradients_as_ever() -> None:
    model = frozen(Layers(in_turn), "embed", "blocks.0")
    model.blocks[2].register_full_backward_hook(lambda _module, given, _got: (given[0] * 2,))
    model.blocks[1][0].weight.register_hook(lambda gradient: gradient * 3)
    _, trained = same_gradients(model, words())
    assert "blocks.1.0.weight" in trained


@pytest.mark.full
def test_an_optimizer_that_steps_in_backward_takes_no_step_before_the_first() -> None:
    model = frozen(Layers(in_turn), "embed", "blocks.0")
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = {p: torch.optim.Adam([p]) for p in trained}
    taken = []

    def step(parameter: torch.Tensor) -> None:
        taken.append(parameter)
        steps[parameter].step()
        parameter.grad = None

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step)
    x, before = words(), [p.detach().clone() for p in trained]
    parts = split(model, x)
    assert parts.program is not None, parts.why_not
    features = parts.program.run((x,), 0, parts.freeze)
    measure_tail(model, parts, features, samples=4)
    assert not taken
    assert not any(step.state for step in steps.values())
    assert all(torch.equal(a, b) for a, b in zip(trained, before, strict=True))
    parts.tail(features[0]).sum().backward()
    assert len(taken) == len(trained)


@pytest.fixture
def alone() -> Iterator[None]:
    """Set up a process group of one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", some(1, [{"static_graph": True}, {"find_unused_parameters": True}, {}]))
@pytest.mark.full
def test_a_model_in_distributed_data_parallel_goes_through_its_first_steps_as_ever(
    options: dict[str, Any],
) -> None:
    def trained(*, cut: bool) -> list[list[float]]:
        model = frozen(Layers(tail_again if "static_graph" in options else in_turn), "embed", "blocks.0")
        model.embed.register_forward_hook(make_inputs_require_grads)
        if options:
            model.unused = nn.Linear(2, 2)
        parallel, x = DistributedDataParallel(model, **options), words()
        if cut:
            parts = split(model, x)
            assert parts.program is not None, parts.why_not
            measure_tail(model, parts, parts.program.run((x,), 0, parts.freeze), samples=4)
        optimizer = torch.optim.AdamW(parallel.parameters())
        for _ in range(3):
            parallel(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.tolist() for p in model.parameters()]

    assert trained(cut=True) == trained(cut=False)


def test_gradients_that_were_there_before_stay() -> None:
    model = frozen(Layers(in_turn), "embed", "blocks.0")
    kept = {name: torch.full_like(p, 7.0) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
    assert split(model, words()).program is not None
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]
        assert bool((kept[name] == 7).all())


@pytest.mark.full
def test_a_table_with_a_norm_in_the_tail_is_trained_as_ever() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.table = nn.Linear(3, 8), nn.Embedding(9, 8, max_norm=0.5)
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.stem(x) + self.table(x.argmax(1)))

    model = frozen(Added(), "stem")
    before = model.table.weight.detach().clone()
    parts = split(model, torch.randn(4, 3))
    assert parts.boundary == "stem"
    assert torch.equal(model.table.weight, before)
    same_gradients(model, torch.randn(4, 3))


@pytest.mark.full
def test_a_compiled_tail_is_given_features_that_ask_for_a_gradient() -> None:
    model = frozen(Layers(in_turn), "embed", "blocks.0")
    model.embed.register_forward_hook(make_inputs_require_grads)
    asked = []
    model.blocks[1].register_forward_pre_hook(lambda _module, args: asked.append(args[0].requires_grad))
    x = words()
    parts = split(model, x)
    assert parts.program is not None, parts.why_not
    run = TailRunner(parts.tail, WrappedModel(model=model), compile_options={"backend": "eager"})
    asked.clear()
    run(parts.program.run((x,), 0, parts.freeze)[0]).sum().backward()
    assert asked == [True]


@pytest.mark.full
def test_what_a_proof_found_of_gradients_is_remembered_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("UPRIVER_CACHE", str(tmp_path))

    def make(reentrant: bool) -> nn.Module:
        run = each_again if reentrant else in_turn
        model = frozen(Layers(run), "embed", "blocks.0")
        model.embed.register_forward_hook(make_inputs_require_grads)
        return model

    first, second = (split(make(True), words()) for _ in range(2))
    assert second.attempts[-1].remembered
    assert first.tail.with_gradient == second.tail.with_gradient == {True: (True,), False: (True,)}
    without = frozen(Layers(each_again), "embed", "blocks.0")
    assert not split(without, words()).attempts[-1].remembered  # its hook was part of the proof


# ------------------------------------------------------------------------------------ of transformers


def _text(transformers: Any, name: str) -> tuple[nn.Module, torch.Tensor, tuple[str, ...]]:
    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    x = torch.arange(20).reshape(4, 5)
    if name == "bert":
        config = transformers.BertConfig(**small, vocab_size=30, num_labels=2)
        frozen_ones = ("bert.embeddings", "bert.encoder.layer.0")
        return transformers.BertForSequenceClassification(config), x, frozen_ones
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, vocab_size=30, use_cache=False, num_labels=2, pad_token_id=0
        )
        frozen_ones = ("transformer.wte", "transformer.wpe", "transformer.h.0")
        return transformers.GPT2ForSequenceClassification(config), x, frozen_ones
    config = transformers.ViTConfig(**small, image_size=8, patch_size=4, num_labels=2)
    model = transformers.ViTForImageClassification(config)
    layer = next(n for n, _ in model.named_modules() if n.endswith((".layer.0", ".layers.0")))
    return model, torch.randn(4, 3, 8, 8), ("vit.embeddings", layer)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
@pytest.mark.full
def test_transformers_with_activation_checkpointing_train_what_they_train_whole(
    name: str, reentrant: bool
) -> None:
    ensure_torchvision()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, x, names = _text(transformers, name)
    frozen(model, *names)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, trained = same_gradients(model, x)
    layers = {n.partition(".")[2] for n in trained if ".1." in n or ".2." in n}
    assert layers
    assert not any(n.startswith(names) for n in trained)
