"""Check that the tail is the user's own, prefix + tail is the whole, and impossible cuts are refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.examples import often, some
from tests.program.nets import (
    Branching,
    Casting,
    Encoder,
    InPlaceAfter,
    LayerDrop,
    Mixing,
    Reading,
    Shared,
    Small,
    TwoInputs,
    freeze,
    frozen_small,
)
from upriver._torchvision import ensure_torchvision
from upriver.errors import ConfigError, FrozenChanged, ModelError
from upriver.program.eval_mode import no_fast_path
from upriver.program.freeze import freeze_to, frozen_units, keep_in_eval
from upriver.program.module_state.frozen_guard import FrozenGuard
from upriver.program.split.split import Split, UnsplitModel, split


def cut(model: nn.Module, x: torch.Tensor) -> Split:
    parts = split(model, x)
    assert parts.program is not None, parts.why_not
    return parts


def reference(model: nn.Module, parts: Split, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the answer and gradients of the whole model, with frozen parts in eval."""
    model.train()
    keep_in_eval(model, list(parts.in_eval))
    torch.manual_seed(3)
    answer = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    return answer, list(torch.autograd.grad(answer.square().sum(), trained))


@pytest.mark.parametrize("upto", often(["stem", "block1", "block2"], "block1"))
def test_prefix_and_tail_give_answer_and_gradients_of_the_whole(upto: str) -> None:
    model = frozen_small(upto)
    x = torch.randn(4, 3, 16, 16)
    parts = cut(model, x)
    assert parts.boundary == upto
    answer, gradients = reference(model, parts, x)
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    torch.manual_seed(3)
    ours = parts.tail(features)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert torch.equal(ours, answer)
    for mine, theirs in zip(torch.autograd.grad(ours.square().sum(), trained), gradients, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.full
def test_the_tail_takes_any_number_of_samples() -> None:
    model = frozen_small().eval()
    x = torch.randn(4, 3, 16, 16)
    parts = cut(model, x)
    assert parts.program is not None
    features = torch.cat([parts.program.run((x,), 0, parts.freeze)[0]] * 3)[:7]
    with torch.no_grad():
        assert torch.equal(parts.tail(features), model(torch.cat([x] * 3)[:7]))


@pytest.mark.full
def test_the_tail_takes_nothing_but_features() -> None:
    x = torch.randn(4, 3, 16, 16)
    parts = cut(frozen_small(), x)
    for wrong in (x, torch.randn(4, 8, 8), torch.randn(4, 8, 9, 8), "features"):
        with pytest.raises(ConfigError, match=r"of shape \(n, 8, 8, 8\), got"):
            parts.tail(wrong)


@pytest.mark.full
def test_the_tail_shares_everything_with_the_model() -> None:
    model = frozen_small()
    keys = list(model.state_dict())
    parts = cut(model, torch.randn(4, 3, 16, 16))
    mine = {id(parameter) for parameter in parts.tail.parameters()}
    assert mine == {id(parameter) for parameter in model.parameters()}
    assert list(model.state_dict()) == keys
    assert parts.program is not None
    features = parts.program.run((torch.randn(4, 3, 16, 16),), 0, parts.freeze)[0]
    parts.tail(features).sum().backward()
    assert model.head.weight.grad is not None
    assert model.block1.conv1.weight.grad is None


@pytest.mark.full
def test_hooks_on_the_tail_run_and_modules_with_hooks_are_not_skipped() -> None:
    model = frozen_small()
    seen: list[str] = []
    model.block3.register_forward_hook(lambda *_: seen.append("block3"))
    model.register_forward_hook(lambda *_: seen.append("root"))
    x = torch.randn(4, 3, 16, 16)
    parts = cut(model, x)
    seen.clear()
    assert parts.program is not None
    parts.tail(parts.program.run((x,), 0, parts.freeze)[0])
    assert seen == ["block3", "root"]
    model.block1.bn2.register_forward_hook(lambda *_: None)
    parts = split(model, x)
    assert parts.boundary == "block1.conv2"
    assert "'block1.bn2' has hooks" in parts.note


def test_frozen_units_stay_in_eval_across_train() -> None:
    model = frozen_small()
    x = torch.randn(4, 3, 16, 16)
    parts = cut(model, x)
    before = {name: b.clone() for name, b in model.named_buffers() if not name.startswith("block3")}
    model.train()
    assert parts.program is not None
    for _ in range(3):
        parts.tail(parts.program.run((x,), 0, parts.freeze)[0])
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers() if name in before)
    assert model.block3.bn1.training


def test_dropout_before_the_last_frozen_layer_is_off_and_after_it_random() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    freeze(model[0])
    freeze(model[2])
    x = torch.randn(4, 6)
    parts = cut(model.train(), x)
    assert parts.boundary == "2"
    assert "1" in parts.in_eval
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    assert torch.equal(features, parts.program.run((x,), 0, parts.freeze)[0])
    assert not torch.equal(parts.tail(features), parts.tail(features))


def test_in_place_code_after_the_boundary_leaves_the_callers_features_alone() -> None:
    torch.manual_seed(0)
    model = InPlaceAfter()
    freeze(model.first)
    x = torch.randn(4, 6)
    parts = cut(model, x)
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    kept = features.clone()
    first = parts.tail(features)
    assert torch.equal(features, kept)
    assert torch.equal(first, parts.tail(features))


def test_a_module_called_on_both_sides_of_the_boundary_runs_where_it_should() -> None:
    torch.manual_seed(0)
    model = Shared()
    freeze(model.first)
    freeze(model.second)
    x = torch.randn(4, 6)
    parts = cut(model, x)
    assert parts.boundary == "second"
    assert parts.program is not None
    with torch.no_grad():
        assert torch.equal(parts.tail(parts.program.run((x,), 0, parts.freeze)[0]), model(x))


@pytest.mark.parametrize(
    ("model", "frozen", "shape"),
    some(
        2,
        [
            (Reading(), ["first", "second"], (4, 6)),
            (Casting(), ["first", "second"], (4, 3, 8, 8)),
            (Encoder(), ["encoder.layers.0", "encoder.layers.1"], (4, 5, 16)),
        ],
    ),
)
def test_what_the_tail_reads_of_skipped_modules_is_as_ever(
    model: nn.Module, frozen: list[str], shape: tuple[int, ...]
) -> None:
    for name in frozen:
        freeze(model.get_submodule(name))
    x = torch.randn(*shape)
    parts = cut(model, x)
    assert parts.boundary == frozen[-1]
    assert parts.program is not None
    features = parts.program.run((x,), 0, parts.freeze)[0]
    model.eval()
    with no_fast_path():
        assert torch.equal(parts.tail(features), model(x))


def test_control_flow_on_data_gives_one_line_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = Branching()
    freeze(model.first)
    freeze(model.second)
    parts = split(model, torch.randn(4, 6))
    assert parts.boundary == "first"
    given_up = parts.attempts[0].why_not
    assert "could not capture" in given_up
    assert "\n" not in given_up
    assert capfd.readouterr() == ("", "")


def test_a_model_that_cannot_be_called_with_one_tensor_says_so() -> None:
    model = TwoInputs()
    freeze(model.first)
    with pytest.raises(ModelError, match=r"float32 \(2, 6\): TypeError.*'y'"):
        split(model, torch.randn(4, 6))


def test_what_is_no_input_is_refused() -> None:
    for wrong in ([torch.randn(4, 6)], "x", (), {"x": None}, torch.tensor(1.0)):
        with pytest.raises(ConfigError, match="inputs"):
            split(frozen_small(), wrong)  # type: ignore[arg-type]


@pytest.mark.full
def test_threads_do_not_disturb_each_other() -> None:
    model = frozen_small().eval()
    x = [torch.randn(4, 3, 16, 16) for _ in range(4)]
    parts = cut(model, x[0])
    assert parts.program is not None
    features = [parts.program.run((value,), 0, parts.freeze)[0] for value in x]
    with torch.no_grad():
        wanted = [model(value) for value in x]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for _ in range(30):
                if not torch.equal(parts.tail(features[number]), wanted[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("model", "frozen", "reason"),
    [
        (Mixing(), ["first", "second"], "influence each other"),
        (Branching(), ["second"], "trained, begins"),
        (LayerDrop(), ["layers.0", "layers.1"], "random number which of its layers run"),
    ],
)
def test_what_cannot_be_cut_exactly_runs_unsplit_and_says_why(
    model: nn.Module, frozen: list[str], reason: str
) -> None:
    model.eval()  # in training, chance decides which layers of one of them run
    for name in frozen:
        freeze(model.get_submodule(name))
    x = torch.randn(4, 6)
    parts = split(model, x)
    assert parts.program is None
    assert reason in parts.why_not
    assert isinstance(parts.tail, UnsplitModel)
    assert torch.equal(parts.tail(x), model(x))


def test_a_frozen_module_behind_a_trainable_one_is_no_prefix() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    freeze(model[1])
    parts = split(model, torch.randn(4, 6))
    assert parts.program is None
    assert "'0'" in parts.why_not


def test_nothing_or_everything_frozen_is_an_error() -> None:
    with pytest.raises(ModelError, match="nothing is frozen"):
        split(Small(), torch.randn(2, 3, 16, 16))
    model = Small()
    freeze(model)
    with pytest.raises(ModelError, match="everything is frozen"):
        split(model, torch.randn(2, 3, 16, 16))


def test_freezing_up_to_a_module_by_name() -> None:
    ensure_torchvision()
    from torchvision.models import resnet18

    model = resnet18(weights=None)
    freeze_to(model, "layer4.0")
    assert frozen_units(model) == ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4.0"]
    with pytest.raises(ConfigError, match=r"no module 'layer5'.*conv1"):
        freeze_to(model, "layer5")


def test_frozen_parameters_that_change_are_noticed_and_named() -> None:
    model = frozen_small()
    guard = FrozenGuard(model, ["block1", "block2"])
    with torch.no_grad():
        model.block3.conv1.weight.add_(1.0)  # trained: allowed
    guard.check_versions()
    guard.check_values()
    with torch.no_grad():
        model.block1.conv1.weight.add_(1.0)
    with pytest.raises(FrozenChanged, match=r"block1\.conv1\.weight"):
        guard.check_versions()
    hidden = FrozenGuard(model, ["block1", "block2"])
    model.block2.bn1.running_mean.data[0] += 1.0  # version counters do not see this change
    hidden.check_versions()
    with pytest.raises(FrozenChanged, match=r"block2\.bn1\.running_mean"):
        hidden.check_values()


def test_loading_the_same_values_again_is_no_change() -> None:
    model = frozen_small()
    guard = FrozenGuard(model, ["block1"])
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    guard.check_versions()
    guard.check_values()


def test_unfreezing_in_mid_job_is_noticed() -> None:
    model = frozen_small()
    guard = FrozenGuard(model, ["block1"])
    model.block1.conv1.weight.requires_grad_(True)
    with pytest.raises(FrozenChanged, match=r"block1\.conv1\.weight"):
        guard.check_versions()
