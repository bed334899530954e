"""Capture models of many forms: their arguments, their answers and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.examples import often, some
from upriver._torchvision import ensure_torchvision
from upriver.program.capture.prefix import capture
from upriver.program.eval_mode import in_eval, no_fast_path
from upriver.program.example_inputs import Example, Inputs, TensorSource, tensors_in
from upriver.program.graph.autocast import autocasting
from upriver.program.graph.executor import Program


def eager(model: nn.Module, given: Inputs, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the tensors of the model's answer, each once."""
    example = Example.of(given)
    example = example.with_tensors([tensor.clone() for tensor in example.tensors])
    with torch.no_grad(), in_eval(model), no_fast_path(), autocasting("cpu", autocast):
        answer = tensors_in(model(*example.args, **example.kwargs))
    return list({id(tensor): tensor for tensor in answer}.values())


def read_again(program: Program) -> Program:
    return Program.from_bytes(program.graph_bytes, program.weights_bytes, digest=program.digest)


def check(program: Program, given: Inputs, wanted: Sequence[torch.Tensor]) -> None:
    """Check that a program read from its files gives these bits, in one run and stage by stage."""
    read = read_again(program)
    tensors: Sequence[torch.Tensor] = Example.of(given).tensors
    once = read.run(tensors, 0, read.num_stages)
    for position in range(read.num_stages):
        tensors = read.run(tensors, position, position + 1)
    for found in (once, tensors):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


class Nested(nn.Module):
    """Take nested inputs that contain None, and return a nested answer that holds one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, /, rest: Any = None, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.first(x) * scale
        for extra in (rest or {}).get("more", []):
            y = y if extra is None else y + extra
        z = self.second(y)
        return {"z": z, "none": None, "both": [y, (z, 3)]}


X, A, B = (torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(X, marks=pytest.mark.full),
        (X,),
        pytest.param((X, None), marks=pytest.mark.full),
        (X, {"more": [A, None, B]}),
        pytest.param(
            Example(args=(X,), kwargs={"rest": {"more": (A,)}, "scale": 2.0}), marks=pytest.mark.full
        ),
        Example(args=(X,), kwargs={"rest": {"more": [X, X]}}),
    ],
)
def test_inputs_and_answers_of_any_nesting(given: Inputs) -> None:
    torch.manual_seed(0)
    model = Nested()
    program = capture(model, given)
    assert len(program.graph.inputs) == len(Example.of(given).tensors)
    check(program, given, eager(model, given))


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        weights = torch.ones_like(tokens) if mask is None else mask
        mixed = (self.table(tokens) * weights.unsqueeze(-1)).sum(1)
        return self.head(mixed), mixed


TOKENS = torch.arange(12).reshape(3, 4) % 10


@pytest.mark.parametrize("mask", [None, torch.ones(3, 4, dtype=torch.bool).tril()])
def test_keyword_inputs_of_integers_and_booleans(mask: torch.Tensor | None) -> None:
    model = Keyword()
    given = {"tokens": TOKENS, "mask": mask}
    check(capture(model, given), given, eager(model, given))


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    program = capture(Nested(), (X, {"more": [X]}))
    other = (X, {"more": [A]})
    check(program, other, eager_like(program, other))


def eager_like(program: Program, given: Inputs) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    distinct = capture(Nested(), (X, {"more": [B]}))
    torch.manual_seed(0)
    assert program.graph.inputs == distinct.graph.inputs
    weights = program.weights_bytes
    return Program(program.graph, weights).run(Example.of(given).tensors, 0, program.num_stages)


class Parts(nn.Module):
    """Hold weights of every form: tied, transposed, with gaps, expanded, a plain attribute, a literal."""

    spread: torch.Tensor
    windows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.gaps = nn.Parameter(torch.randn(6, 12)[:, ::2])
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.register_buffer("spread", torch.randn(1, 6).expand(4, 6))
        self.register_buffer("windows", torch.arange(14.0).unfold(0, 4, 2))
        self.anchor = torch.randn(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.tied(self.first(x) + self.spread) @ self.gaps @ self.turned
        y = y + self.windows.sum(1) + self.anchor
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), self.gaps


@pytest.mark.parametrize("dtype", some(2, [torch.float32, torch.bfloat16, torch.float16]))
def test_weights_of_every_form_and_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Parts().to(dtype)
    model.anchor = model.anchor.to(dtype)
    given = X.to(dtype)
    program = capture(model, given)
    check(program, given, eager(model, given))
    keys = [weight.key for weight in program.graph.weights]
    assert "tied.weight" not in keys or "first.weight" not in keys
    assert sum(key.startswith("constant.") for key in keys) == 2
    strides = {weight.key: weight.spec.stride for weight in read_again(program).graph.weights}
    assert strides["gaps"] == list(model.gaps.stride())
    assert strides["spread"] == list(model.spread.stride())


@pytest.mark.full
def test_constants_are_named_by_what_they_hold() -> None:
    def constant(values: list[float]) -> str:
        class Scaled(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * torch.tensor(values)

        (weight,) = capture(Scaled(), torch.ones(2, 2)).graph.weights
        return weight.key

    assert constant([1.0, 2.0]) == constant([1.0, 2.0])
    assert constant([1.0, 2.0]) != constant([1.0, 3.0])


class InPlace(nn.Module):
    """Write into its input, into views, and into the results of other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.act(x))
        x[:, :3] *= 2
        y = self.act(self.second(x))
        y += x
        x.mul_(0.5)
        return self.act(y - x)


def test_in_place_code_becomes_functional_and_leaves_the_input_alone() -> None:
    model = InPlace()
    given = X.clone()
    program = capture(model, given)
    assert torch.equal(given, X)
    check(program, given, eager(model, given))
    assert torch.equal(given, X)


class Late(nn.Module):
    """Use one activation three times, with in-place code after two calls and control flow at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        y = self.act(self.second(x))
        x += 1
        y = self.act(y - x)
        y *= 3
        return self.head(y * 2 if y.sum() > 0 else y)


def act(number: int) -> TensorSource:
    return TensorSource(path="act", number=number)


@pytest.mark.parametrize(
    "outputs",
    some(
        2,
        [
            [act(1), act(0)],
            [act(2)],
            [act(0)],
            [act(1)],
            [act(0), act(2), act(0), act(0)],
            [TensorSource(path=None), act(1), TensorSource(path="second")],
        ],
    ),
)
def test_outputs_are_what_the_named_calls_gave_in_that_order(outputs: list[TensorSource]) -> None:
    torch.manual_seed(0)
    model = Late()
    with torch.no_grad():
        first = torch.relu(model.first(X))
        second = model.second(first)
        last = torch.relu(torch.relu(second) - (first + 1))
    values = {None: X, "second": second}
    given = [
        [first, torch.relu(second), last][source.number] if source.path == "act" else values[source.path]
        for source in outputs
    ]
    program = capture(model, X, outputs=outputs)
    check(program, X, given)
    live = program.stages[-1].live
    assert len(set(live)) == len(outputs)
    behind = {"add.Scalar", "sub.Tensor", "mul.Tensor"}
    used = {node.op for node in program.graph.nodes}
    assert bool(used & behind) == (act(2) in outputs)


def test_a_caller_that_swallows_exceptions_does_not_hold_up_leaving() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.inner(x)
            except Exception:
                x = x * 0
            return x if x.sum() > 0 else -x

    model = Careful()
    check(capture(model, X, outputs=[TensorSource(path="inner")]), X, [model.inner(X).detach()])


@pytest.mark.full
def test_names_and_modules_are_right_behind_an_early_exit_from_nested_modules() -> None:
    inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), inner), nn.Linear(6, 2))
    program = capture(model, X, outputs=[TensorSource(path="0.1.1"), TensorSource(path="0.0")])
    assert [stage.name for stage in program.stages] == ["0.0", "0.1.0", "0.1.1"]
    assert [stage.kind for stage in program.stages] == ["Linear", "Linear", "ReLU"]
    assert capture(model, X).stages[-1].name == "1"


class Towers(nn.Module):
    """Run a trained tower before a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.right = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        return self.head(torch.cat([left, self.right(y)], 1))


@pytest.mark.full
def test_what_is_to_run_first_comes_first_and_ends_a_stage() -> None:
    model = Towers()
    program = capture(model, (X, A), first=[TensorSource(path="right")])
    names = [stage.name for stage in program.stages]
    assert names == ["right.0", "right.1", "right.2", "left.0", "left.1", "left.2", "head"]
    assert [len(program.live(cut)) for cut in range(8)] == [2, 2, 2, 2, 2, 2, 2, 1]
    check(program, (X, A), eager(model, (X, A)))


def test_a_frozen_tower_alone_is_a_program_though_another_ran_before_it() -> None:
    model = Towers()
    program = capture(model, (X, A), outputs=[TensorSource(path="right")])
    assert {weight.key.partition(".")[0] for weight in program.graph.weights} == {"right"}
    check(program, (X, A), [model.right(A).detach()])


@pytest.mark.full
def test_granularity_decides_where_stages_end() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))

    def names(granularity: Any) -> list[str]:
        return [stage.name for stage in capture(model, X, granularity=granularity).stages]

    assert names("module") == ["0", "1", "2"]
    assert names("op") == ["0: linear", "1: gelu", "2: linear"]
    assert names("end") == ["2"]
    ended = capture(model, X, granularity="end", outputs=[TensorSource(path="0"), TensorSource(path="1")])
    assert [stage.name for stage in ended.stages] == ["1"]


class Mixed(nn.Module):
    """Run under autocast: casts, a part that forbids autocast, an operator that stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.query = nn.Linear(4, 8)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        with torch.autocast("cpu", enabled=False):
            x = x + torch.linalg.vector_norm(x.float() @ torch.eye(4), dim=-1, keepdim=True)
        query, key = self.query(x).chunk(2, -1)
        x = functional.scaled_dot_product_attention(query, key, x.to(query.dtype))
        return self.head(x.mean(1)).softmax(-1)


@pytest.mark.parametrize("autocast", some(1, [torch.bfloat16, torch.float16]))
def test_autocast_is_part_of_a_program(autocast: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Mixed()
    images = torch.randn(3, 3, 5, 5)
    program = capture(model, images, autocast=autocast)
    wanted = eager(model, images, autocast)
    check(program, images, wanted)
    assert not torch.equal(wanted[0].float(), eager(model, images)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the caller's autocast changes nothing
        check(program, images, wanted)
    plain = capture(model, images)
    check(plain, images, eager(model, images))
    assert len({program.digest, plain.digest}) == 2


class Regions(nn.Module):
    """Run modules inside other grad modes and autocast regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.second(self.first(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.second(x).float()
        with torch.enable_grad():
            return self.second(x)


@pytest.mark.parametrize(
    "source",
    some(
        2,
        [
            None,
            TensorSource(path="first"),
            TensorSource(path="second.0", number=1),
            TensorSource(path="second", number=2),
        ],
    ),
)
@pytest.mark.full
def test_leaving_from_inside_a_region_of_another_mode(source: TensorSource | None) -> None:
    torch.manual_seed(0)
    model = Regions()
    states: dict[TensorSource | None, torch.Tensor] = {}
    with torch.no_grad():
        states[TensorSource(path="first")] = model.first(X)
        x = model.second(states[TensorSource(path="first")])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states[TensorSource(path="second.0", number=1)] = model.second[0](x)
            x = model.second[1](states[TensorSource(path="second.0", number=1)]).float()
        states[None] = states[TensorSource(path="second", number=2)] = model.second(x)
    program = capture(model, X, outputs=None if source is None else [source])
    check(program, X, [states[source]])


@dataclass
class Answer:
    states: torch.Tensor
    name: str
    more: list[torch.Tensor]


torch.export.register_dataclass(Answer)


def test_an_answer_of_a_class_that_pytree_knows() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Answer:
            x = self.first(x)
            return Answer(states=x, name="x", more=[x.relu(), x])

    model = Named()
    with torch.no_grad():
        states = model.first(X)
    check(capture(model, X), X, [states, states.relu()])


def test_a_model_whose_answer_holds_no_tensor() -> None:
    class Mute(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, int]:
            return {"samples": len(x)}

    with pytest.raises(Exception, match="answer, a dict, holds no tensor"):
        capture(Mute(), X)


# -------------------------------------------------------------------------------------- transformers


def tiny(name: str) -> tuple[nn.Module, Inputs]:
    ensure_torchvision()
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 3}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 50, (3, 12), generator=generator)
    mask = (torch.arange(12) < torch.tensor([[12], [9], [5]])).long()
    text = {"input_ids": tokens.where(mask.bool(), 0), "attention_mask": mask}
    torch.manual_seed(0)
    match name:
        case "bert":
            config = transformers.BertConfig(vocab_size=50, **size)
            return transformers.BertForSequenceClassification(config), text
        case "llama":
            config = transformers.LlamaConfig(
                vocab_size=50, num_key_value_heads=2, pad_token_id=0, use_cache=False, **size
            )
            return transformers.LlamaForSequenceClassification(config), text
        case "vit":
            config = transformers.ViTConfig(image_size=16, patch_size=4, **size)
            images = torch.randn(3, 3, 16, 16, generator=generator)
            given = {"pixel_values": images, "output_hidden_states": True}
            return transformers.ViTForImageClassification(config), given
        case _:
            config = transformers.T5Config(
                vocab_size=50, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=3
            )
            return transformers.T5EncoderModel(config), text


@pytest.mark.parametrize("autocast", [None, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name",
    [
        "bert",
        pytest.param("llama", marks=pytest.mark.full),
        pytest.param("vit", marks=pytest.mark.full),
        "t5",
    ],
)
@pytest.mark.full
def test_whole_transformers_models(name: str, autocast: torch.dtype | None) -> None:
    model, given = tiny(name)
    program = capture(model, given, autocast=autocast)
    check(program, given, eager(model, given, autocast))


LAYERS = {
    "bert": ("bert.encoder.layer.0.output", "bert.encoder.layer.1.output"),
    "llama": ("model.layers.0", "model.layers.1"),
    "vit": ("vit.layers.0", "vit.layers.1"),
    "t5": ("encoder.block.0.layer.1", "encoder.block.1.layer.1"),
}


@pytest.mark.parametrize("name", often(sorted(LAYERS), "bert"))
def test_a_transformer_is_cut_after_each_layer_with_its_mask_beside_the_states(name: str) -> None:
    model, given = tiny(name)
    program = capture(model, given)
    names = [stage.name for stage in program.stages]
    assert program.num_stages >= 5
    for layer in LAYERS[name]:
        crossing = program.live(1 + names.index(layer))
        states = [value for value in crossing if value.spec.dtype == "float32" and len(value.spec.shape) == 3]
        assert len(crossing) <= (1 if name == "vit" else 3) + len(states) - 1
        assert states
