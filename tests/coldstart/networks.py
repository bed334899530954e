"""Small models of many kinds, each with an input; each kind reads its weights in another way."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from upriver._torchvision import ensure_torchvision

Network = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]
"""A constructor of the model, and a constructor of the arguments of a call."""


def image(size: int = 64) -> dict[str, Any]:
    """Return one picture, under the argument name of torchvision's and timm's models."""
    return {"x": torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(size))}


def ids(name: str = "input_ids", length: int = 9) -> dict[str, Any]:
    """Return some token numbers."""
    return {name: torch.arange(length).reshape(1, length) * 7 % 90}


class Encoder(nn.Module):
    """PyTorch's own encoder, which runs as one fused operator per layer in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (batch, tokens, 32)."""
        out: torch.Tensor = self.layers(x)
        return out


class Bare(nn.Module):
    """Read weights of modules that are never called, by a list, by a view, and by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.parts = nn.ParameterList([torch.randn(16) for _ in range(5)])
        self.table = nn.Parameter(torch.randn(10, 16))
        self.register_buffer("scale", torch.linspace(0, 1, 16), persistent=False)
        self.register_buffer("shift", torch.randn(16))
        self.flag = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for ``x`` of shape (rows, 16)."""
        hidden = nn.functional.linear(x, self.inner.weight.t(), self.inner.bias)
        hidden = hidden + torch.stack(list(self.parts)).sum(0) + self.table[3]
        return hidden * self.scale + (self.shift if self.flag.item() > 0 else -self.shift)


class Tied(nn.Module):
    """An embedding that is its own head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 90, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer for token numbers."""
        out: torch.Tensor = self.head(self.norm(self.embedding(x)))
        return out


def _transformer(kind: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = getattr(importlib.import_module("transformers"), kind)
        model: nn.Module = made(made.config_class(**values))
        return model

    return build


def _vision(kind: str, *given: Any, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: nn.Module = getattr(ensure_torchvision().models, kind)(*given, **values)
        return model

    return build


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        ensure_torchvision()
        model: nn.Module = importlib.import_module("timm").create_model(name)
        return model

    return build


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}

NETWORKS: Mapping[str, Network] = {
    "resnet18": (_vision("resnet18"), image),
    "mobilenet_v3_small": (_vision("mobilenet_v3_small"), image),
    "shufflenet": (_vision("shufflenet_v2_x0_5"), image),
    "squeezenet": (_vision("squeezenet1_1"), image),
    "regnet": (_vision("regnet_y_400mf"), image),
    "densenet": (_vision("DenseNet", 8, (2, 2), 16, num_classes=10), image),
    "efficientnet": (_timm("test_efficientnet"), lambda: image(160)),
    "vit": (_timm("test_vit"), lambda: image(160)),
    "convnext": (_timm("test_convnext"), lambda: image(160)),
    "gpt2": (
        _transformer("GPT2LMHeadModel", vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=32),
        ids,
    ),
    "bert": (_transformer("BertModel", vocab_size=90, **_SMALL), ids),
    "llama": (_transformer("LlamaForCausalLM", vocab_size=90, tie_word_embeddings=True, **_SMALL), ids),
    "t5": (
        _transformer(
            "T5ForConditionalGeneration",
            vocab_size=90,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
        ),
        lambda: ids() | ids("decoder_input_ids", 5),
    ),
    "clip": (
        _transformer("CLIPTextModel", vocab_size=90, max_position_embeddings=20, **_SMALL),
        ids,
    ),
    "encoder": (Encoder, lambda: {"x": torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))}),
    "bare": (Bare, lambda: {"x": torch.randn(2, 16, generator=torch.Generator().manual_seed(0))}),
    "tied": (Tied, lambda: ids("x")),
}


OF_EACH_KIND = ("resnet18", "vit", "gpt2", "t5", "encoder", "bare", "tied")

EACH = [name if name in OF_EACH_KIND else pytest.param(name, marks=pytest.mark.full) for name in NETWORKS]
"""Names of the models, for parametrization: one of each kind under ``make test``."""


def all_made_up(seed: int) -> dict[str, nn.Module]:
    """Return each model with new weight values, none equal to the constructor's."""
    torch.manual_seed(seed)
    found = {name: build().eval() for name, (build, _) in NETWORKS.items()}
    for model in found.values():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) * 0.1 + 0.01)
    return found


def answer(
    model: nn.Module, arguments: Mapping[str, Any], mode: Callable[[], Any] = torch.no_grad
) -> list[torch.Tensor]:
    """Return every tensor of a model's answer."""
    torch.get_num_threads()  # before a thread's first call, MKL uses its own number of threads
    with mode():
        found = model(*arguments.values()) if "x" in arguments else model(**arguments)
    return list(_tensors(found))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []
