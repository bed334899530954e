"""Check that weights come in the order of first use, however they are read, and recording leaves no trace."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load as load_safetensors
from safetensors.torch import save
from torch import nn

from tests.examples import often
from upriver._torchvision import ensure_torchvision
from upriver.coldstart.format.access_order import counted, publish_model, with_data, without_data
from upriver.coldstart.format.checkpoint import find, keep_order
from upriver.errors import ModelError, ProgramError
from upriver.program.eval_mode import no_fast_path
from upriver.store import Store

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def recorded(model: nn.Module, *call: Any) -> list[str]:
    return list(counted(model, *call))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"memory://{tmp_path}")


class Net(nn.Module):
    """Use weights in another order than their registration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


NET_ORDER = [
    *("first.weight", "first.bias"),
    *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    *("last.weight", "last.bias"),
    *("unused.weight", "unused.bias", "norm.num_batches_tracked"),
]


def layers(order: list[str]) -> list[str]:
    """Return the modules that own the names, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in order))


def both_ways(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[str]:
    """Return the order recorded without data, after checking that it equals the order with data."""
    state = dict(model.state_dict(keep_vars=True))
    model.eval()
    with torch.no_grad(), no_fast_path():
        call = (args, dict(kwargs or {}))
        without, touched = list(without_data(model, state, call)), list(with_data(model, state, call))
    assert without == touched
    return without


# ---------------------------------------------------------------------------------- accesses that count


def test_weights_come_in_the_order_of_their_use() -> None:
    order = recorded(Net(), (X,))
    assert layers(order[:8]) == ["first", "norm", "last"]
    assert sorted(order) == sorted(NET_ORDER)
    assert order[8:] == ["unused.weight", "unused.bias", "norm.num_batches_tracked"]
    assert both_ways(Net(), (X,)) == order[:8]


def test_a_weight_that_is_read_without_its_module() -> None:
    class Reading(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(F.linear(x, self.last.weight))

    order = both_ways(Reading(), (X,))
    assert order[0] == "last.weight"
    assert layers(order) == ["last", "first"]


def test_making_a_view_reads_nothing() -> None:
    class Viewing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = self.last.weight[:2].reshape(-1).detach()
            parts = self.unused.weight.chunk(2)
            return (self.first(x) * parts[1].sum()).sum() * last

    assert layers(both_ways(Viewing(), (X,))) == ["first", "unused", "last"]


def test_what_is_given_back_counts_after_all_that_is_read() -> None:
    class Gives(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return {"scale": self.unused.bias[:2], "sums": [super().forward(x)]}

    rest = ["unused.bias", "unused.weight", "norm.num_batches_tracked"]
    assert both_ways(Gives(), (X,))[-1] == rest[0]
    assert recorded(Gives(), (X,))[-3:] == rest


def test_a_view_that_copies_reads() -> None:
    class Copying(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last = self.last.weight.T.reshape(-1)
            return self.first(x).sum() * last

    assert layers(both_ways(Copying(), (X,))) == ["last", "first"]


def test_ties_count_under_all_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 10)
            self.between = nn.Linear(4, 4)
            self.embed = nn.Embedding(10, 4)
            self.head.weight = self.embed.weight
            self.register_buffer("rows", self.embed.weight.detach()[2:5])

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.head(self.between(self.embed(tokens)))

    order = both_ways(Tied(), (torch.tensor([[1, 2]]),))
    assert sorted(order[:3]) == ["embed.weight", "head.weight", "rows"]
    assert layers(order[3:]) == ["between", "head"]


def test_parts_of_one_storage_count_by_themselves() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(40)
            self.b = nn.Parameter(flat[:16].view(4, 4))
            self.a = nn.Parameter(flat[16:32].view(4, 4))
            self.unused = nn.Parameter(flat[32:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.a @ self.b

    assert both_ways(Flat(), (X,)) == ["a", "b"]
    assert recorded(Flat(), (X,)) == ["a", "b", "unused"]


def test_empty_weights_and_entries_that_are_no_tensors_come_last() -> None:
    class Extra(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("nothing", torch.empty(0))

        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.nothing.sum()

    order = recorded(Extra(), (X,))
    assert layers(order[:8]) == ["first", "norm", "last"]
    assert set(order[8:]) == {*NET_ORDER[8:], "nothing", "_extra_state"}


def test_arguments_by_name_and_nested() -> None:
    class Nested(Net):
        def forward(self, given: dict[str, Any], *, twice: bool = False) -> torch.Tensor:
            x = given["x"][0]
            return self.last(x) if twice else self.first(x)

    assert layers(recorded(Nested(), ({"x": [X]},), {"twice": True}))[0] == "last"
    assert layers(recorded(Nested(), (), {"given": {"x": [X]}}))[0] == "first"


# ---------------------------------------------------------------------------------- without and with data


class Seeing(Net):
    """A forward that reads values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTS.append(type(x).__name__)
        return self.last(x) if x.sum() > 0 else self.first(x)


COUNTS: list[str] = []


def test_values_are_looked_at_only_where_they_must_be() -> None:
    COUNTS.clear()
    assert layers(recorded(Seeing(), (torch.ones(2, 4),)))[0] == "last"
    assert layers(recorded(Seeing(), (-torch.ones(2, 4),)))[0] == "first"
    assert COUNTS == ["FakeTensor", "Tensor"] * 2
    COUNTS.clear()
    model = Net()
    model.first.register_forward_hook(lambda _m, _a, result: COUNTS.append(type(result).__name__))
    recorded(model, (X,))
    assert COUNTS == ["FakeTensor"]


def test_a_model_that_cannot_be_called_is_an_error_that_says_why() -> None:
    with pytest.raises(ModelError, match=r"cannot be called: RuntimeError: .*mat1 and mat2"):
        recorded(Net(), (torch.ones(2, 5),))
    with pytest.raises(ModelError, match=r"cannot be called: TypeError: .*forward"):
        recorded(Net(), ())

    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("own")

    with pytest.raises(ModelError, match="KeyError: 'own'"):
        recorded(Failing(), (X,))


def test_a_weight_without_a_shape_is_named() -> None:
    with pytest.raises(ModelError, match=r"weight '0\.weight' has no shape yet"):
        recorded(nn.Sequential(nn.LazyLinear(3)), (X,))


def test_weights_without_memory_of_their_own_come_last() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.sparse.mm(self.mixing, x))

    order = recorded(Sparse(), (X,))
    assert layers(order[:8]) == ["first", "norm", "last"]
    assert set(order[8:]) == {*NET_ORDER[8:], "mixing"}


# --------------------------------------------------------------------------------------- nothing changes


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


class Changing(Net):
    """A forward that changes all it can."""

    looks = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("kept", None)
        self.embed = nn.Embedding(10, 4, max_norm=0.1)
        self.cache: Any = None
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks and x.sum() > 1e9:
            return x
        self.train()
        self.steps.add_(1)
        self.kept = x * 2
        self.cache = x
        self.seen.append(x)
        self.late = x
        self.last.bias.data.add_(1)
        self.first.weight.mul_(2)
        self.unused.weight = nn.Parameter(torch.zeros(4, 4))
        x.add_(torch.rand(2, 4) + random.random() + np.random.rand())
        return super().forward(x) + (self.embed(torch.tensor([1, 2])) if self.looks else 0)


@pytest.mark.parametrize("looks", [False, True])
def test_model_arguments_and_random_numbers_are_as_they_were(looks: bool) -> None:
    model = Changing()
    model.looks = looks
    model.norm.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = set(vars(model))
    given = X.clone()
    seed()
    expected = random.random(), np.random.rand(), torch.rand(3).tolist()
    seed()
    order = recorded(model, (given,))
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == expected
    assert sorted(order) == sorted(before)
    assert torch.equal(given, X)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == identities
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert (model.cache, model.seen, model.kept, set(vars(model))) == (None, [], None, attributes)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()


class Writes(nn.Module):
    """Call a function that writes to a chosen place."""

    def __init__(self, write: Callable[[Any], object], looks: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(3))
        self.counts, self.array, self.flag = {"calls": [0]}, np.zeros(3), False
        self.generator = torch.Generator()
        self.write, self.looks = write, looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self)
        if self.looks and x.sum() > 1e9:
            return x
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


WRITES: dict[str, Callable[[Any], object]] = {
    "momentum": lambda m: [
        q.data.mul_(0.9).add_(p.data, alpha=0.1)
        for p, q in zip(m.first.parameters(), m.second.parameters(), strict=True)
    ],
    "a clamped weight": lambda m: m.first.weight.data.clamp_(min=0),
    "a buffer": lambda m: m.steps.add_(1),
    "a buffer by its array": lambda m: m.steps.numpy().__iadd__(1),
    "a weight by its array": lambda m: m.first.weight.detach().numpy().__imul__(2),
    "a buffer's memory": lambda m: m.steps.untyped_storage().fill_(1),
    "a buffer of another size": lambda m: m.steps.resize_(5),
    "other memory": lambda m: setattr(m.first.weight, "data", torch.zeros(4, 4)),
    "another parameter": lambda m: setattr(m.first, "weight", nn.Parameter(torch.zeros(4, 4))),
    "another module": lambda m: setattr(m, "first", m.second),
    "a new buffer": lambda m: m.register_buffer("late", torch.ones(1)),
    "a nested count": lambda m: m.counts["calls"].append(1),
    "an array": lambda m: m.array.__iadd__(1),
    "a flag": lambda m: setattr(m, "flag", True),
    "a hook": lambda m: m.first.register_forward_hook(lambda *_: None),
    "a frozen weight": lambda m: m.first.weight.requires_grad_(False),
    "generators": lambda m: (random.random(), np.random.rand(), torch.rand(3)),
    "a generator of its own": lambda m: torch.rand(2, generator=m.generator),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_publish_model_leaves_what_a_forward_writes_as_it_was(write: str, looks: bool) -> None:
    model, store = Writes(WRITES[write], looks), Store.open(f"memory://writes-{write}-{looks}")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    own = model.generator.get_state()
    seed()
    drawn = random.random(), np.random.rand(), torch.rand(3).tolist()
    seed()
    publish_model(model, store, "net.safetensors", (X,))
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == drawn
    assert torch.equal(model.generator.get_state(), own)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == identities
    published = load_safetensors(store.get("net.safetensors"))
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value) and torch.equal(published[name], value), name
    assert (model.counts, model.array.any(), model.flag) == ({"calls": [0]}, False, False)
    assert model.training and model.first.weight.requires_grad and not model.first._forward_hooks


def test_nothing_changes_where_recording_fails() -> None:
    class Broken(Changing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("broken")

    model = Broken()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match="broken"):
        recorded(model, (X.clone(),))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch._C._len_torch_dispatch_stack() == 0
    assert model.training and model.cache is None


def test_arguments_that_cannot_be_copied_as_a_whole() -> None:
    made = (X.clone().requires_grad_() * 2).relu()
    before = made.detach().clone()

    class Writing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    assert layers(recorded(Writing(), (made,)))[0] == "first"
    assert torch.equal(made, before)


# ------------------------------------------------------------------------------------- published models


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=False)
        self.gru = nn.GRU(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


def resnet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    ensure_torchvision()
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(), (torch.randn(1, 3, 64, 64),), {}


def vision_transformer() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    ensure_torchvision()
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    return model, (torch.randn(1, 3, 16, 16),), {}


def from_transformers(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    ensure_torchvision()
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 3}
    tokens = torch.arange(3, 15).reshape(2, 6)
    text = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    match name:
        case "bert":
            return transformers.BertModel(transformers.BertConfig(vocab_size=50, **size)), (), text
        case "llama":
            config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, pad_token_id=0, **size)
            return transformers.LlamaForCausalLM(config), (), text
        case "t5":
            config = transformers.T5Config(
                vocab_size=50, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=3
            )
            return transformers.T5EncoderModel(config), (), text
        case "wav2vec2":
            config = transformers.Wav2Vec2Config(
                vocab_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), **size
            )
            return transformers.Wav2Vec2Model(config), (torch.randn(1, 800),), {}
        case _:
            config = transformers.GPT2Config(
                n_layer=3, n_embd=32, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0
            )
            return transformers.GPT2LMHeadModel(config), (tokens,), {}


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    match name:
        case "resnet":
            return resnet()
        case "vit":
            return vision_transformer()
        case "encoder":
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            return nn.TransformerEncoder(layer, 3), (torch.randn(2, 5, 16),), {}
        case "recurrent":
            return Recurrent(), (torch.randn(3, 2, 4),), {}
        case "weight_norm":
            norm = nn.utils.parametrizations.weight_norm
            named = OrderedDict(b=norm(nn.Linear(4, 4)), a=nn.utils.spectral_norm(nn.Linear(4, 4)))
            return nn.Sequential(named), (X,), {}
        case _:
            return from_transformers(name)


FIRST_AND_LAST = {
    "resnet": ("conv1", "fc"),
    "vit": ("conv_proj", "heads.head"),
    "encoder": ("layers.0.self_attn", "layers.2.norm2"),
    "recurrent": ("lstm", "head"),
    "weight_norm": ("b", "a"),
    "bert": ("embeddings", "pooler.dense"),
    "llama": ("model.embed_tokens", "lm_head"),
    "t5": ("shared", "encoder.final_layer_norm"),
    "wav2vec2": ("feature_extractor", "encoder.layers.2.final_layer_norm"),
    "gpt2": ("transformer.wte", "transformer.ln_f"),
}


@pytest.mark.parametrize("name", sorted(FIRST_AND_LAST))
@pytest.mark.full
def test_models_are_recorded_alike_without_and_with_data(name: str) -> None:
    model, args, kwargs = build(name)
    touched = both_ways(model, args, kwargs)
    first, last = FIRST_AND_LAST[name]
    assert touched[0].startswith(first)
    assert touched[-1].startswith(last)
    assert set(recorded(model, args, kwargs)) == set(model.state_dict())
    assert recorded(model, args, kwargs)[: len(touched)] == touched


@pytest.mark.parametrize("name", often(["gpt2", "resnet", "encoder"], "encoder"))
def test_a_published_model_lies_in_the_order_of_its_use(store: Store, name: str) -> None:
    model, args, kwargs = build(name)
    manifest = publish_model(model, store, "net.safetensors", args, kwargs)
    source = find(store, "net")
    assert source.ordered
    stored = [tensor.name for tensor in source.tensors]
    assert stored == [tensor.name for tensor in manifest.tensors]
    order = recorded(model, args, kwargs)
    assert stored == [each for each in order if each not in source.ties]
    assert source.ties == ({"lm_head.weight": "transformer.wte.weight"} if name == "gpt2" else {})
    found = load_safetensors(store.get("net.safetensors"))
    assert all(torch.equal(found[key], model.state_dict()[key]) for key in stored)


def test_what_is_no_tensor_cannot_be_published(store: Store) -> None:
    class Extra(Net):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(ProgramError, match="'_extra_state' in the state dict is a dict; only tensors"):
        publish_model(Extra(), store, "net.safetensors", (X,))
    assert list(store.list()) == []


def test_the_order_of_a_foreign_file_is_that_of_the_model(store: Store) -> None:
    model = Net()
    store.put("net.safetensors", save(model.state_dict()))
    keep_order(find(store, "net"), recorded(model, (X,)))
    source = find(store, "net")
    assert source.ordered
    assert [tensor.name for tensor in source.tensors] == recorded(model, (X,))


def test_nothing_is_computed_where_no_data_is_needed() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.zeros(())  # no buffer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            SEEN.append((type(self.last.weight * 2).__name__, torch.tensor(3).item()))
            return super().forward(x)

    SEEN.clear()
    model = Counting()
    recorded(model, (X,))
    assert SEEN == [("FakeTensor", 3)]
    assert model.steps == 0


SEEN: list[tuple[str, Any]] = []


def test_a_call_that_does_not_fit_is_told_in_one_line(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="the model cannot be called: RuntimeError"):
        publish_model(Net(), store, "net.safetensors", (torch.ones(3),))
    assert not [record for record in caplog.records if record.name.startswith("torch")]
