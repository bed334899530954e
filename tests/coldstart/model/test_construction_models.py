"""Check that models of three libraries equal plainly built ones, except for values that a load overwrites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from tests.coldstart.same import assert_same_but_unread, assert_same_outputs, globals_now
from tests.examples import some
from upriver.coldstart.model.construction import construct
from upriver.program.example_inputs import Example
from upriver.program.models.registry import load_model


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = globals_now()
    yield
    assert globals_now() == before


NAMED = [
    "torchvision:resnet18",
    "torchvision:mobilenet_v3_small",
    "torchvision:efficientnet_b0",
    "torchvision:regnet_y_400mf",
    "torchvision:densenet121",
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:googlenet",
    "torchvision:vit_b_16",
    "torchvision:swin_t",
    "torchvision:convnext_tiny",
    "timm:resnet10t",
    "timm:vit_tiny_patch16_224",
    "timm:mobilenetv3_small_050",
    "timm:convnext_atto",
    "timm:swin_tiny_patch4_window7_224",
    "timm:mixer_s32_224",
    "timm:levit_128s",
    "timm:beit_base_patch16_224",
]

QUICK = (
    "torchvision:resnet18",
    "torchvision:shufflenet_v2_x0_5",
    "timm:vit_tiny_patch16_224",
    "timm:levit_128s",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in NAMED]
)
def test_models_by_name(name: str) -> None:
    plain, inputs = load_model(name)
    made = construct(name)
    assert_same_but_unread(made, plain)
    example = Example.of(inputs.example(1))
    assert_same_outputs(made, plain, example.args, example.kwargs)


class _Small(NamedTuple):
    """A model of transformers, of few and narrow layers."""

    model: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]

    def __call__(self) -> nn.Module:
        kind = getattr(transformers, self.model)
        model: nn.Module = kind(kind.config_class(**self.settings))
        return model


def _ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(1, 13).reshape(2, 6)}


def _both() -> dict[str, torch.Tensor]:
    return _ids() | {"decoder_input_ids": torch.arange(2, 10).reshape(2, 4)}


def _pixels(size: int = 32) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size)}


_BERT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}

_WAV = {
    **_BERT,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

SMALL = [
    _Small("GPT2LMHeadModel", {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 2}, _ids),
    _Small("BertForMaskedLM", _BERT, _ids),
    _Small("RobertaModel", _BERT, _ids),
    _Small(
        "DistilBertModel", {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, _ids
    ),
    _Small(
        "DistilBertModel",
        {"vocab_size": 60, "dim": 32, "n_layers": 1, "n_heads": 2, "sinusoidal_pos_embds": True},
        _ids,
    ),
    _Small(
        "T5ForConditionalGeneration",
        {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2},
        _both,
    ),
    _Small(
        "BartForConditionalGeneration",
        {"vocab_size": 60, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64},
        _both,
    ),
    _Small("LlamaForCausalLM", {**_BERT, "num_key_value_heads": 1}, _ids),
    _Small("AlbertModel", {**_BERT, "embedding_size": 16}, _ids),
    _Small("ViTModel", {**_BERT, "image_size": 32, "patch_size": 8}, _pixels()),
    _Small("BeitModel", {**_BERT, "image_size": 32, "patch_size": 8}, _pixels()),
    _Small(
        "SwinModel",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        _pixels(),
    ),
    _Small(
        "CLIPModel",
        {
            "text_config": _BERT,
            "vision_config": {**_BERT, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        lambda: _ids() | _pixels()(),
    ),
    _Small(
        "Wav2Vec2Model",
        _WAV,
        lambda: {"input_values": torch.linspace(-1, 1, 2000).reshape(1, 2000)},
    ),
    _Small("HubertModel", _WAV, lambda: {"input_values": torch.linspace(-1, 1, 2000).reshape(1, 2000)}),
    _Small(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 60,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        lambda: {
            "input_features": torch.linspace(-1, 1, 80 * 40).reshape(1, 80, 40),
            "decoder_input_ids": torch.tensor([[3, 4, 5]]),
        },
    ),
]


@pytest.mark.parametrize("build", some(6, SMALL), ids=lambda build: build.model)
def test_small_transformers(build: _Small) -> None:
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    made = construct(build)
    assert_same_but_unread(made, plain)
    assert_same_outputs(made, plain, (), build.inputs())


RECURRENT: list[Callable[[], nn.Module]] = [
    lambda: nn.LSTM(5, 6, num_layers=2, bidirectional=True, proj_size=3),
    lambda: nn.GRU(5, 6),
    lambda: nn.RNN(5, 6),
    lambda: nn.Sequential(nn.Linear(5, 6), nn.MultiheadAttention(6, 2, batch_first=True)),
    lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    lambda: nn.Sequential(nn.Bilinear(3, 4, 5), nn.EmbeddingBag(9, 4), nn.GroupNorm(1, 4), nn.PReLU()),
]


@pytest.mark.parametrize("build", RECURRENT)
def test_layers_of_torch(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    made = construct(build)
    assert_same_but_unread(made, plain)
    made.load_state_dict(plain.state_dict())
    for name, value in made.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
