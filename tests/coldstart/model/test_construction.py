"""Check that a constructed model equals its plain constructor's, except for weights that no code read."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.coldstart.same import Ran, checked, filled, globals_now
from upriver.coldstart.model import deferred_init
from upriver.coldstart.model.construction import construct
from upriver.errors import ModelError


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check after any test that no mode, hook or function of ours remains, and no other random state."""
    before = globals_now()
    yield
    assert globals_now() == before


# ---------------------------------------------------------------------------------- deferred fills


def test_no_random_number_is_drawn_for_what_is_loaded() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Conv1d(3, 4, 5), nn.Embedding(9, 4))
        nn.init.trunc_normal_(net[0].weight, std=0.02)
        nn.init.kaiming_normal_(net[2].weight)
        return net

    state = torch.get_rng_state()
    assert filled(build) == 0
    assert torch.equal(torch.get_rng_state(), state)
    checked(build)


def test_a_chain_in_place_is_put_off() -> None:
    def build() -> nn.Module:
        net = nn.Linear(40, 40)
        with torch.no_grad():
            net.weight.uniform_(-0.9, 0.9).erfinv_().mul_(0.1).add_(0.5).clamp_(min=-2, max=2)
            net.bias.data.normal_().mul_(torch.tensor(0.5))
        return net

    assert filled(build) == 0
    checked(build)


def test_padding_rows_and_gates_are_put_off() -> None:
    def build() -> nn.Module:
        net = nn.Embedding(30, 8, padding_idx=3)
        nn.init.normal_(net.weight)
        with torch.no_grad():
            net.weight[net.padding_idx].zero_()
            net.weight[5:7] = 1
        return net

    assert filled(build) == 0
    checked(build, torch.arange(30))


def test_copies_of_layers_are_put_off() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    assert filled(build) == 0
    checked(build, torch.randn(2, 5, 16))


def test_another_type_is_put_off() -> None:
    build = lambda: nn.Linear(30, 20).to(torch.bfloat16)  # noqa: E731
    assert filled(build) == 0
    made = checked(build, torch.randn(2, 30, dtype=torch.bfloat16))
    assert made.weight.dtype is torch.bfloat16


def test_parameters_made_of_random_tensors_are_put_off() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 40))
            self.position = nn.Parameter(torch.empty(1, 40).normal_(std=0.02))
            self.old = nn.Parameter(torch.Tensor(40).uniform_())
            self.both = nn.Parameter(torch.rand(3, generator=torch.Generator().manual_seed(1)))

    assert filled(Net) == 0
    checked(Net)


def test_what_is_thrown_away_is_not_filled() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1000))
        net[1] = nn.Linear(30, 2)
        return net

    assert filled(build) == 0
    checked(build)


# ------------------------------------------------------------------------------------------- reads


class _Reading(nn.Module):
    """Compute from its weights during construction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.register_buffer("norm", self.second.weight.norm())
        self.register_buffer("rows", self.first.weight.detach().clone()[2:4], persistent=False)
        self.register_buffer("window", torch.empty(5).fill_(3.0), persistent=False)
        self.scale = float(self.first.bias.detach().sum())
        self.listed = self.second.bias.tolist()
        self.array = self.first.weight.detach().numpy().copy()
        nn.init.zeros_(self.first.weight)
        self.after = self.first.weight.detach().sum()


def test_what_is_computed_from_weights_is_right() -> None:
    made = checked(_Reading)
    torch.manual_seed(5)
    plain = _Reading()
    assert (made.scale, made.listed) == (plain.scale, plain.listed)
    assert np.array_equal(made.array, plain.array)
    assert torch.equal(made.after, plain.after)


def test_random_buffers_are_those_of_plain_construction() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(9, 9)
            self.register_buffer("projection", torch.randn(3, 3) * 2)
            self.two = nn.Linear(9, 9)
            self.register_buffer("order", torch.randperm(20), persistent=False)

    checked(Net)


def test_seeds_inside_a_constructor_hold() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.one = nn.Linear(9, 9)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                self.register_buffer("inner", torch.randn(4) + 0)
            self.register_buffer("outer", torch.randn(4) + 0)
            self.two = nn.Linear(9, 9)
            torch.manual_seed(3)
            self.register_buffer("again", torch.randn(4) + 0)

    with torch.random.fork_rng(devices=[]):
        checked(Net)


def test_norms_of_weights() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 4))
        parametrizations.weight_norm(net[0])
        parametrizations.spectral_norm(net[1])
        parametrizations.spectral_norm(net[2])
        parametrizations.orthogonal(net[3])
        return net

    checked(build)


def test_copies_made_in_inference_mode() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(9, 8)
            self.register_buffer("halves", torch.randn(30, 20).half())
            self.register_buffer("turned", torch.randn(30, 20).t().contiguous())
            self.register_buffer("flat", self.one.weight.t().reshape(-1), persistent=False)
            self.register_buffer("doubled", self.one.weight.detach().chunk(2)[1] * 2)
            self.two = nn.Linear(8, 3).to(torch.float64)

    with torch.inference_mode():
        checked(Net)


def test_initialisations_that_read() -> None:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Conv2d(3, 3, 3), nn.Linear(6, 6))
        nn.init.orthogonal_(net[0].weight)
        nn.init.sparse_(net[1].weight, 0.5)
        nn.init.dirac_(net[2].weight)
        nn.init.eye_(net[3].weight)
        net.register_buffer("copy", torch.cat([net[0].weight.flatten(), net[1].weight.flatten()]).detach())
        return net

    checked(build)


@pytest.mark.parametrize(
    ("std", "low", "high"), [(1.0, -2.0, 2.0), (1.0, -0.1, 0.1), (0.02, -2.0, 2.0), (1.0, 3.0, 4.0)]
)
def test_truncated_numbers_that_are_read(std: float, low: float, high: float) -> None:
    def build() -> nn.Module:
        net = nn.Linear(50, 50)
        nn.init.trunc_normal_(net.weight, std=std, a=low, b=high)
        net.register_buffer("copy", net.weight.detach() * 1)
        return net

    if low > 2:
        with pytest.warns(UserWarning, match="more than 2 std"):
            checked(build)
    else:
        checked(build)


def test_a_forward_pass_while_it_is_made() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.LazyLinear(5))
            self.register_buffer("seen", self.features(torch.ones(1, 3, 8, 8)).detach())

    checked(Net)


def test_a_refused_fill_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="normal expects std"):
        construct(lambda: nn.init.normal_(nn.Linear(3, 3).weight, std=-1.0))  # type: ignore[arg-type,return-value]
    with pytest.raises(RuntimeError, match="uniform_ expects"):
        construct(lambda: nn.init.uniform_(nn.Linear(3, 3).weight, 2.0, 1.0))  # type: ignore[arg-type,return-value]


# ------------------------------------------------------------------------------------------ fills


def test_what_no_state_dict_names_is_filled() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(200, 200)]
            self.table = nn.Embedding(200, 100).weight.data
            self.register_buffer("view", nn.Embedding(200, 100).weight.data[:, 1:], persistent=False)
            self.kept = nn.Linear(200, 200)
            self.left_out = nn.Parameter(torch.empty(200, 200).normal_())
            self.register_state_dict_post_hook(self._leave_out)

        @staticmethod
        def _leave_out(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            del state[f"{prefix}left_out"]

    torch.manual_seed(5)
    plain = Net()
    torch.manual_seed(5)
    made = construct(Net)
    assert torch.equal(made.hidden[0].weight, plain.hidden[0].weight)
    assert torch.equal(made.table, plain.table)
    assert torch.equal(made.view, plain.view)
    assert torch.equal(made.left_out, plain.left_out)
    assert filled(Net) == filled_parts(Net)


def filled_parts(net: type[nn.Module]) -> int:
    """Return the parts that must be filled: all draws before the last number that code may read."""
    with Ran() as ran:
        net()
    return ran.filled


def test_views_of_one_storage() -> None:
    class Net(nn.Module):
        def __init__(self, *, whole: bool) -> None:
            super().__init__()
            flat = torch.empty(60_000).normal_()
            self.one = nn.Parameter(flat[:30_000].view(300, 100).t())
            self.two = nn.Parameter(flat[30_000:] if whole else flat[40_000:])
            self.rest = flat[30_000:40_000]

    torch.manual_seed(5)
    plain = Net(whole=False)
    torch.manual_seed(5)
    made = construct(lambda: Net(whole=False))
    assert torch.equal(made.rest, plain.rest)
    whole = lambda: Net(whole=True)  # noqa: E731
    assert filled(whole) == 0
    made = construct(whole)
    assert made.one.untyped_storage().data_ptr() == made.two.untyped_storage().data_ptr()
    made.load_state_dict(Net(whole=True).state_dict())
    assert torch.equal(made.rest, made.two[:10_000])


def test_ties_survive() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            self.twin = nn.Linear(8, 50, bias=False)
            self.twin.weight.data = self.embed.weight.data

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x)) + self.twin(self.embed(x))

    made = checked(Net, torch.arange(9))
    assert made.head.weight is made.embed.weight


def test_memory_from_outside_is_filled_at_once() -> None:
    outside = nn.Embedding(40, 1000)
    frozen = np.ones(20_000, dtype=np.float32)

    def build() -> nn.Module:
        net = nn.Linear(40, 4)
        net.embed = outside
        nn.init.constant_(outside.weight, 2.0)
        nn.init.constant_(torch.from_numpy(frozen), 3.0)
        assert (frozen == 3).all()
        return net

    construct(build)
    assert (outside.weight == 2).all()


def test_memory_that_python_got_hold_of_is_filled_at_once() -> None:
    def build() -> nn.Module:
        net = nn.Linear(400, 400)
        array = net.weight.detach().numpy()
        nn.init.constant_(net.weight, 2.0)
        assert (array == 2).all()
        nn.init.constant_(net.bias, 3.0)
        assert torch.tensor([net.bias.data[0], net.bias.data[1]]).tolist() == [3, 3]
        net.spare = copy.deepcopy(net.bias.detach() + 1)
        return net

    checked(build)


# --------------------------------------------------------------------------- settings and globals


def test_lazy_parameters_stay_lazy() -> None:
    made = construct(lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()))
    made.load_state_dict(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).state_dict())
    assert made(torch.ones(3, 5)).shape == (3, 4)


def test_subclasses_of_parameters_survive() -> None:
    class Marked(nn.Parameter):
        pass

    def build() -> nn.Module:
        net = nn.Linear(8, 8)
        net.weight = Marked(torch.empty(8, 8))
        nn.init.normal_(net.weight)
        return net

    assert type(checked(build, torch.randn(2, 8)).weight) is Marked


def test_devices_and_types_of_the_context() -> None:
    with torch.device("meta"):
        assert construct(lambda: nn.Linear(3, 3)).weight.is_meta

    def build() -> nn.Module:
        with torch.device("cpu"):
            return nn.Linear(3, 3)

    checked(build)
    torch.set_default_dtype(torch.float64)
    try:
        assert checked(build).weight.dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_an_accelerator() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(300, 300)
            self.register_buffer("drawn", torch.randn(30) * 2)
            self.two = nn.Linear(300, 300).half()
            nn.init.trunc_normal_(self.one.weight)

    def build() -> nn.Module:
        with torch.device("cuda"):
            return Net()

    def undrawn() -> nn.Module:
        return nn.Linear(300, 300, device="cuda")

    assert checked(build).one.weight.is_cuda
    assert filled(undrawn) == 0
    assert checked(lambda: nn.Linear(300, 300).to("cuda")).weight.is_cuda


def test_memory_that_must_be_filled_is() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        made = construct(lambda: nn.Linear(30, 30))
        assert made.weight.isnan().all()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_whatever_build_raises_is_passed_on() -> None:
    kept: list[torch.Tensor] = []

    def build() -> nn.Module:
        kept.append(torch.empty(30_000).fill_(4.0))
        nn.init.trunc_normal_(nn.Linear(9, 9).weight)
        raise KeyError("mine")

    before = globals_now()
    with pytest.raises(KeyError, match="mine"):
        construct(build)
    assert globals_now() == before
    assert (kept[0] == 4).all()
    checked(lambda: nn.Linear(3, 3))


@pytest.mark.parametrize("result", [None, 3, (nn.Linear(1, 1), 2)])
def test_only_modules_are_models(result: Any) -> None:
    with pytest.raises(ModelError, match="torch module"):
        construct(lambda: result)


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cold_nets.py").write_text(
        "import torch\nfrom torch import nn\nTABLE = torch.empty(30_000).fill_(7.0)\n"
        "def net():\n    return nn.Linear(300, 300)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = construct("cold_nets:net")
    assert made.weight.shape == (300, 300)
    assert (sys.modules.pop("cold_nets").TABLE == 7).all()
    assert construct("torchvision:squeezenet1_1").num_classes == 1000
    with pytest.raises(ModelError, match="no callable"):
        construct("torch.nn:nothing")


def test_one_construction_within_another() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(9, 9)
            self.inner = construct(lambda: nn.Linear(9, 9))
            nn.init.trunc_normal_(self.one.weight)

    made = construct(Net)
    made.load_state_dict(Net().state_dict())
    assert filled(Net) == 0


def test_several_threads() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(20))
            self.register_buffer("twice", torch.empty(20_000).fill_(2.0) * 2)
            nn.init.trunc_normal_(self.layers[0].weight)

    made: list[nn.Module] = []
    state = torch.get_rng_state()
    threads = [threading.Thread(target=lambda: made.append(construct(Net))) for _ in range(8)]
    for thread in threads:
        thread.start()
    plain = nn.Linear(50, 50)  # another thread's own model is unaffected
    nn.init.constant_(plain.weight, 3.0)
    assert (plain.weight == 3).all()
    for thread in threads:
        thread.join()
    torch.set_rng_state(state)
    assert len(made) == 8
    assert all((net.twice == 4).all() for net in made)


def test_nothing_is_kept_alive() -> None:
    made = construct(lambda: nn.Linear(20, 20))
    gc.collect()
    assert not [
        thing
        for thing in gc.get_objects()
        if type(thing) in (deferred_init.FillWatch, deferred_init.DeferredFills)
    ]
    assert made.weight.shape == (20, 20)


def test_compiled_functions_run_as_they_are_written() -> None:
    @torch.compile(backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.ones_like(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(30, 30)
            self.register_buffer("twice", doubled(self.one.weight.detach()))

    try:
        checked(Net)
    finally:
        torch._dynamo.reset()
