"""Check that captured programs give the eager model's bits, whole and at every cut."""

from __future__ import annotations

import re

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.examples import often, some
from tests.program.nets import CallCount, Shared, Small, frozen_small
from upriver._torchvision import ensure_torchvision
from upriver.errors import CaptureError, ConfigError, ProgramError
from upriver.program.capture.lowering import record
from upriver.program.capture.prefix import capture, graph_of
from upriver.program.example_inputs import Example, TensorSource
from upriver.program.graph.executor import Program

PUBLISHED = {
    # network: stages as HAPI counts them, and bytes per sample after some of the stages
    "alexnet": (21, {1: 774400, 3: 186624, 4: 559872, 13: 36864, 16: 16384, 21: 4000}),
    "resnet18": (14, {4: 802816, 11: 100352, 14: 4000}),
    "resnet50": (22, {22: 4000}),
    "vgg11": (29, {29: 4000}),
    "densenet121": (22, {22: 4000}),
}


@pytest.mark.full
def test_vgg19_has_the_stages_the_papers_count() -> None:
    models = pytest.importorskip("torchvision", reason="torchvision").models if ensure_torchvision() else None
    assert models is not None
    model = models.vgg19(weights=None, init_weights=False)
    recording = record(model, Example.of(torch.zeros(1, 3, 224, 224)))
    assert len(graph_of(recording, model, "0" * 64).stages) == 45


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        answer = model.eval()(x)
    assert isinstance(answer, torch.Tensor)
    return answer


@pytest.mark.parametrize("name", often(sorted(PUBLISHED), "alexnet", "resnet18"))
@pytest.mark.full
def test_published_networks_have_the_stages_the_papers_count(name: str) -> None:
    models = pytest.importorskip("torchvision", reason="torchvision").models if ensure_torchvision() else None
    assert models is not None
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None)
    x = torch.randn(2, 3, 224, 224)
    program = capture(model, (x,))
    stages, sizes = PUBLISHED[name]
    assert program.num_stages == stages
    assert {cut: program.stages[cut - 1].out_bytes for cut in sizes} == sizes
    assert program.graph.input_bytes == 602112
    assert torch.equal(program.run((x,), 0, stages)[0], whole(model, x))


def test_every_cut_gives_the_bits_of_the_whole() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    program = capture(model, (x,))
    wanted = whole(model, x)
    for cut in range(program.num_stages + 1):
        crossing = program.run((x,), 0, cut)
        assert [list(t.shape) for t in crossing] == [v.spec.shape for v in program.live(cut)]
        assert torch.equal(program.run(crossing, cut, program.num_stages)[0], wanted)


@pytest.mark.full
def test_a_residual_block_is_one_stage() -> None:
    program = capture(Small(), (torch.randn(2, 3, 16, 16),))
    names = [stage.name for stage in program.stages]
    assert names == ["stem.0", "stem.1", "stem.2", "block1", "pool", "block2", "block3", "dropout", "head"]


def test_capture_up_to_a_module_keeps_what_it_returned_before_in_place_code_changed_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    x = torch.randn(4, 6)
    program = capture(model, (x,), outputs=[TensorSource(path="0")])
    assert [stage.name for stage in program.stages] == ["0"]
    assert torch.equal(program.run((x,), 0, 1)[0], whole(model[0], x))


def test_the_model_is_left_as_it_was() -> None:
    model = frozen_small()
    model.train()
    model.block1.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    capture(model, (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),))
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_strides_of_inputs_and_weights_survive() -> None:
    torch.manual_seed(0)
    model = Small().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    program = capture(model, (x,))
    again = Program.from_bytes(program.graph_bytes, program.weights_bytes)
    assert program.graph.inputs[0].spec.stride == list(x.stride())
    assert torch.equal(again.run((x,), 0, again.num_stages)[0], whole(model, x))


def test_the_weights_file_is_safetensors_aligned_in_execution_order_and_holds_tied_weights_once() -> None:
    torch.manual_seed(0)
    model = Shared()
    x = torch.randn(4, 6)
    program = capture(model, (x,))
    stored = safetensors.torch.load(bytes(program.weights_bytes))
    weights = {name: tensor for name, tensor in stored.items() if not name.startswith("__pad__")}
    assert len(weights) == 7  # four layers, one weight shared
    order = [weight.key for weight in program.graph.weights]
    assert order[0] in ("first.weight", "second.weight")  # one tensor under two names
    assert order[1:3] == ["first.bias", "second.bias"]
    assert torch.equal(weights["third.weight"], model.third.weight)
    loaded = Program.from_bytes(program.graph_bytes, program.weights_bytes)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded._weights.values())
    assert torch.equal(loaded.run((x,), 0, loaded.num_stages)[0], whole(model, x))


def test_a_program_is_named_by_what_it_holds() -> None:
    x = torch.randn(2, 3, 16, 16)
    model = frozen_small()
    first, second = capture(model, (x,)), capture(model, (torch.randn(2, 3, 16, 16),))
    assert first.digest == second.digest
    with torch.no_grad():
        model.block1.conv1.weight[0, 0, 0, 0] += 1.0
    assert capture(model, (x,)).digest != first.digest


def test_reading_back_checks_both_digests() -> None:
    program = capture(Shared(), (torch.randn(2, 6),))
    with pytest.raises(ProgramError, match="has digest"):
        Program.from_bytes(program.graph_bytes, program.weights_bytes, digest="0" * 64)
    damaged = bytearray(program.weights_bytes)
    damaged[-1] ^= 1
    with pytest.raises(ProgramError, match="weights file has digest"):
        Program.from_bytes(program.graph_bytes, damaged)


@pytest.mark.parametrize("device", some(1, ["toaster", "", "cuda:-1", "meta", "cuda:99"]))
def test_a_device_that_is_not_there_is_named_beside_those_that_are(device: str) -> None:
    program = capture(Shared(), (torch.randn(2, 6),))
    with pytest.raises(ConfigError, match=f"device '{device}' is .*: cpu"):
        Program.from_bytes(program.graph_bytes, program.weights_bytes, device=device)


@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    some(1, [((3, 6), 0, 1), ((2, 5), 0, 1), ((2, 6), -1, 1), ((2, 6), 0, 99), ((2, 6), 2, 1)]),
)
def test_a_run_takes_only_what_the_program_is_made_for(shape: tuple[int, ...], start: int, stop: int) -> None:
    program = capture(Shared(), (torch.randn(2, 6),))
    with pytest.raises(ProgramError):
        program.run((torch.randn(*shape),), start, stop)


class Randomised(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[x > 0].sum()


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Complex(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real


@pytest.mark.parametrize(
    ("layer", "why"),
    some(
        2,
        [
            (Randomised(), "module '1' calls operator rand_like.default, which is random"),
            (Branching(), "control flow depends on data in module '1'"),
            (CallCount(), "changes buffer 'calls' of module '1'"),
            (Choosing(), "module '1' calls operator index.Tensor: gives a tensor whose size depends on data"),
            (Reading(), "module '1' reads a number out of a tensor"),
            (Complex(), "module '1' calls operator fft_fft.default, which no program may hold"),
            (nn.Linear(7, 6), "torch.export could not capture the model in module '1'"),
        ],
    ),
)
def test_what_cannot_be_captured_says_which_module_and_why(layer: nn.Module, why: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6))
    with pytest.raises(CaptureError, match=re.escape(why)):
        capture(model, torch.randn(2, 6))
    program = capture(model, torch.randn(2, 6), outputs=[TensorSource(path="0")])  # the rest does not matter
    assert program.num_stages == 1


@pytest.mark.parametrize(
    "source", [TensorSource(path="0", number=1), TensorSource(path="7"), TensorSource(path="0", leaf=1)]
)
def test_an_output_that_the_model_does_not_give_is_named(source: TensorSource) -> None:
    with pytest.raises(CaptureError, match=re.escape(f"the model gave no '{source}'")):
        capture(nn.Sequential(nn.Linear(6, 6)), torch.randn(2, 6), outputs=[source])


def test_outputs_before_which_nothing_runs_are_refused() -> None:
    with pytest.raises(CaptureError, match="no operator runs"):
        capture(nn.Linear(6, 6), torch.randn(2, 6), outputs=[TensorSource(path=None)])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    some(
        1,
        [
            ((None, 0, 1), "tensors must be a sequence .* got None of type NoneType"),
            (("x", 0, 1), "tensors must be a sequence .* got 'x' of type str"),
            ((torch.ones(1, 2, 6), 0, 1), r"as in run\(\[x\], 0, stop\); got .* of type Tensor"),
            (([torch.ones(2, 6, device="meta")], 0, 1), "a sequence of tensors with values"),
            (([torch.ones(2, 6)], None, 1), "start must be a whole number, a cut's position, got None"),
            (([torch.ones(2, 6)], 0, 1.0), "stop must be a whole number, a cut's position, got 1.0"),
        ],
    ),
)
def test_a_run_of_something_else_is_refused(arguments: tuple[object, ...], problem: str) -> None:
    program = capture(nn.Sequential(nn.Linear(6, 6)), torch.randn(2, 6))
    with pytest.raises(ConfigError, match=problem):
        program.run(*arguments)


def test_flops_and_parameters_are_counted_by_stage() -> None:
    program = capture(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(3, 6),))
    assert [stage.flops for stage in program.stages] == [2 * 6 * 4, 0, 2 * 4 * 2]
    assert [stage.param_bytes for stage in program.stages] == [4 * (24 + 4), 0, 4 * (8 + 2)]
