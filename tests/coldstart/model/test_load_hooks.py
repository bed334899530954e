"""Check that models whose own code runs at load time are refused where that code changes anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from upriver import coldstart
from upriver.errors import ModelError


class Net(nn.Module):
    """A model that does on load what a test tells it."""

    def __init__(self, tell: Callable[[Net], object] = lambda net: None) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.seen = 0
        tell(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def pre(hook: Callable[[dict[str, Any]], object]) -> Callable[[Net], object]:
    return lambda net: net.register_load_state_dict_pre_hook(lambda module, state, *_: hook(state))


def post(hook: Callable[[Any], object]) -> Callable[[Net], object]:
    def tell(module: nn.Module, keys: object) -> None:
        with torch.no_grad():
            hook(module)

    return lambda net: net.register_load_state_dict_post_hook(tell)


def double(state: dict[str, Any]) -> None:
    state["linear.weight"] = state["linear.weight"] * 2


class OfPart(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "bias"] = state[prefix + "bias"] + 1
        super()._load_from_state_dict(state, prefix, *rest)


class OfWhole(Net):
    def load_state_dict(self, state: Any, *rest: Any, **options: Any) -> Any:
        found = super().load_state_dict(state, *rest, **options)
        with torch.no_grad():
            self.linear.bias.zero_()
        return found


CHANGES: dict[str, Callable[[], nn.Module]] = {
    "another one in its place": lambda: Net(pre(double)),
    "in place": lambda: Net(pre(lambda state: state["linear.bias"].add_(1))),
    "two swapped": lambda: Net(
        pre(lambda s: s.update({"norm.bias": s["norm.weight"], "norm.weight": s["norm.bias"]}))
    ),
    "by its value": lambda: Net(pre(lambda state: float(state["linear.bias"].sum()))),
    "behind it": lambda: Net(post(lambda net: nn.init.zeros_(net.linear.bias))),
    "a parameter replaced": lambda: Net(
        post(lambda net: setattr(net.linear, "bias", nn.Parameter(net.linear.bias * 2)))
    ),
    "kept beside": lambda: Net(post(lambda net: setattr(net, "folded", net.linear.weight.sum()))),
    "a method of a part": lambda: nn.Sequential(OfPart(4, 3)),
    "a method of the whole": OfWhole,
}

LEAVES: dict[str, Callable[[], nn.Module]] = {
    "none": Net,
    "looks": lambda: Net(pre(lambda state: [tensor.shape for tensor in state.values()])),
    "old names": lambda: Net(pre(lambda state: state.update(x=state.pop("old")) if "old" in state else None)),
    "a view is none": lambda: Net(pre(lambda state: state["linear.weight"].view(12))),
    "notes something": lambda: Net(post(lambda net: setattr(net, "seen", net.seen + 1))),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))).eval(),
}


def stored(build: Callable[[], nn.Module], folder: Path, *, without: str = "-") -> tuple[str, Path]:
    state = {name: value + 1 for name, value in build().state_dict().items() if without not in name}
    save_file(state, folder / "net.safetensors")
    return f"file://{folder}/net", folder / "net.safetensors"


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_that_changes_its_weights_when_it_is_loaded_is_refused(what: str, tmp_path: Path) -> None:
    uri, path = stored(CHANGES[what], tmp_path)
    CHANGES[what]().load_state_dict(load_file(path))  # which can be done, and gives another model
    with pytest.raises(ModelError, match=r"code of its own .*load_state_dict"):
        coldstart.load(CHANGES[what], uri)


@pytest.mark.parametrize("what", LEAVES)
def test_code_that_leaves_weights_as_they_are_is_run_and_no_more(what: str, tmp_path: Path) -> None:
    uri, path = stored(LEAVES[what], tmp_path)
    whole = LEAVES[what]().eval()
    whole.load_state_dict(load_file(path))
    built = LEAVES[what]().eval()
    own = {name: id(value) for name, value in [*built.named_parameters(), *built.named_buffers()]}
    model = coldstart.load(lambda: built, uri)
    x = torch.randn(5, 4)
    assert torch.equal(model(x), whole(x))
    assert {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]} == own
    assert getattr(model, "seen", 0) == getattr(whole, "seen", 0)


def test_a_model_that_only_loads_what_says_its_version_is_taken_as_of_now(tmp_path: Path) -> None:
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            if metadata.get("version") != 2:
                raise ValueError("version must be 2")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    def build() -> nn.Module:
        return nn.Sequential(Versioned(4, 3))

    uri, path = stored(build, tmp_path)
    model = coldstart.load(build, uri)
    assert torch.equal(model(torch.eye(4)), torch.eye(4) @ load_file(path)["0.weight"].T + model[0].bias)


def test_a_file_may_lack_the_number_of_batches_as_old_ones_do(tmp_path: Path) -> None:
    uri, path = stored(Net, tmp_path, without="num_batches")
    whole = Net().eval()
    whole.load_state_dict(load_file(path))
    model = coldstart.load(lambda: Net().eval(), uri)
    x = torch.randn(5, 4)
    assert torch.equal(model(x), whole(x))
    assert model.norm.num_batches_tracked.item() == whole.norm.num_batches_tracked.item() == 0
    copied = copy.deepcopy(model).train()
    copied(x)
    assert copied.norm.num_batches_tracked.item() == 1
