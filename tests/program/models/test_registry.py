"""Check models by name: how they are built, their inputs, and the error for an unknown name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.examples import some
from upriver.errors import ConfigError, ModelError
from upriver.program.capture.input_spec import InputSpec, ModelInputs
from upriver.program.example_inputs import Example
from upriver.program.models.registry import load_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run(name: str, *, batch: int = 2) -> tuple[nn.Module, Example]:
    """Run the model on its own example, which shows that the inputs are right."""
    model, inputs = load_model(name)
    example = Example.of(inputs.example(batch))
    with torch.no_grad():
        model.eval()(*example.args, **example.kwargs)
    return model, example


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("torchvision:squeezenet1_1", (2, 3, 224, 224)),
        ("torchvision:inception_v3", (2, 3, 299, 299)),
        ("timm:mobilenetv3_small_050", (2, 3, 224, 224)),
        ("transformers:WhisperEncoder", (2, 80, 3000)),
    ],
)
@pytest.mark.full
def test_one_input_is_a_tensor(name: str, shape: tuple[int, ...]) -> None:
    _, inputs = load_model(name)
    example = inputs.example(2)
    assert isinstance(example, torch.Tensor)
    assert example.shape == shape
    run(name)


def test_auxiliary_heads_are_there() -> None:
    for name in ("inception_v3", "googlenet"):
        model, _ = load_model(f"torchvision:{name}")
        assert model.aux_logits is True


def test_text_comes_with_a_padding_mask() -> None:
    model, example = run("transformers:T5EncoderModel", batch=3)
    ids, mask = example.kwargs["input_ids"], example.kwargs["attention_mask"]
    lengths = mask.sum(dim=1)
    assert ids.shape == mask.shape == (3, 128)
    assert mask.dtype == torch.int64
    assert (lengths >= 64).all() and len(set(lengths.tolist())) > 1
    assert torch.equal(mask, (torch.arange(128) < lengths[:, None]).long())
    config = model.config
    assert (ids[mask == 0] == config.pad_token_id).all()
    assert (ids[mask == 1] != config.pad_token_id).all()
    assert (ids.gather(1, lengths[:, None] - 1) == config.eos_token_id).all()
    assert ((ids == config.eos_token_id).sum(dim=1) == 1).all()


def test_llama_has_a_published_size_and_no_cache() -> None:
    with torch.device("meta"):
        from upriver.program.models.transformers_configs import build, inputs_of

        transformers = pytest.importorskip("transformers")
        model = build(transformers, "llama")
        assert model is not None
    assert 134e6 < sum(p.numel() for p in model.parameters()) < 135e6
    assert model.config.use_cache is False
    assert set(inputs_of(model, "llama").named) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("name", "near"),
    some(
        1,
        [
            ("torchvision:resnet81", "resnet18"),
            ("timm:resnet5", "resnet50"),
            ("transformers:brt", "bert"),
            ("transformers:T5EncoderModle", "T5EncoderModel"),
        ],
    ),
)
def test_unknown_name_offers_near_ones(name: str, near: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    assert name.partition(":")[2] in str(caught.value)
    assert near in str(caught.value)


@pytest.mark.parametrize("name", ["resnet18", ":resnet18", "torchvision:"])
def test_a_name_of_no_form(name: str) -> None:
    with pytest.raises(ModelError, match="torchvision:NAME"):
        load_model(name)


def test_class_without_a_configuration() -> None:
    with pytest.raises(ModelError, match="BatchEncoding"):
        load_model("transformers:BatchEncoding")


def test_configuration_whose_defaults_make_no_model() -> None:
    with pytest.raises(ModelError, match="transformers:levit cannot be built"):
        load_model("transformers:levit")


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_by_name.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def plain():\n"
        "    return nn.Linear(3, 2)\n"
        "def with_example():\n"
        "    return nn.Bilinear(3, 4, 2), (torch.ones(2, 3), torch.arange(8.0).reshape(2, 4))\n"
        "def with_bad_example():\n"
        "    return nn.Linear(3, 2), 'text'\n"
        "def nothing():\n"
        "    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models_by_name", raising=False)


@pytest.mark.usefixtures("own_models")
def test_own_callable_may_bring_its_example() -> None:
    model, inputs = load_model("models_by_name:with_example")
    example = inputs.example(3)
    assert isinstance(example, Example)
    assert [tuple(t.shape) for t in example.tensors] == [(3, 3), (3, 4)]
    assert torch.equal(example.tensors[1][2], torch.arange(4.0))  # repeated from the first sample
    assert model(*example.args).shape == (3, 2)
    with pytest.raises(ConfigError, match="cannot be changed"):
        load_model("models_by_name:with_example", input_shape=(3,))


@pytest.mark.usefixtures("own_models")
def test_own_callable_takes_images_or_what_is_said() -> None:
    assert load_model("models_by_name:plain")[1].example(1).shape == (1, 3, 224, 224)
    assert load_model("models_by_name:plain", input_shape=(3,))[1].example(1).shape == (1, 3)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("nothing", ModelError, "got int"),
        ("with_bad_example", ConfigError, "got str"),
        ("absent", ModelError, "'absent'"),
    ],
)
def test_own_callable_that_gives_no_model(name: str, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        load_model(f"models_by_name:{name}")


def test_same_seed_same_inputs() -> None:
    inputs = ModelInputs(
        named={
            "pixels": InputSpec(shape=(3, 4)),
            "others": InputSpec(shape=(3, 4)),
            "labels": InputSpec(shape=(), dtype=torch.int64, below=5),
            "ids": InputSpec(shape=(7,), dtype=torch.int32, below=30, pad=1),
            "mask": InputSpec(shape=(7,), dtype=torch.bool, mask=True),
        }
    )
    one, same, other = (Example.of(inputs.example(8, seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, same.tensors, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert not torch.equal(one.kwargs["pixels"], one.kwargs["others"])
    assert torch.equal(one.kwargs["ids"] == 1, ~one.kwargs["mask"])


def test_another_shape_goes_for_the_mask_too() -> None:
    ids = InputSpec(shape=(128,), dtype=torch.int64, below=30, pad=0)
    inputs = ModelInputs(
        named={"ids": ids, "mask": InputSpec(shape=(128,), dtype=torch.int64, mask=True)}
    ).reshaped((16,))
    assert [tuple(t.shape) for t in Example.of(inputs.example(2)).tensors] == [(2, 16), (2, 16)]


def test_the_caller_s_random_state_stays() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model("torchvision:squeezenet1_1")
    assert torch.equal(torch.rand(3), expected)
