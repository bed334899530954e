"""Define the models of `cold_start`: real architectures with made-up weights, and their inputs.

Peers import this module in an environment of their own. PyTorch and the models' libraries are imported when a
model is prepared, so that a process can report the end of its imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

SEED = 8

IMAGE_SIDE = 224
AUDIO_RATE = 16_000
GPT2_WORDS, BERT_WORDS, WHISPER_WORDS = 32, 32, 4
MEL_FRAMES = 1000
"""Frames of Whisper's input: 10 s of sound instead of 30, by a smaller number of positions. Its weights are
the same except for 1,000 rows of 768."""

Inputs = dict[str, "torch.Tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An architecture.

    Attributes:
        title: Name in the report.
        library: Library of the model.
        build: Its constructor, as a user has it.
        inputs: Arguments of a call by name, for a number of samples.
    """

    title: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]

    def prepare(self) -> None:
        """Import the modules that the constructor needs."""
        from upriver._torchvision import ensure_torchvision

        ensure_torchvision()  # transformers imports it, too, where it is installed
        if self.library == "torchvision":
            importlib.import_module("torchvision.models")
        else:
            family = _FAMILIES[self.title.split()[0]]
            importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def answer(network: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a model's answer as one tensor: its logits, or the last hidden state."""
    import torch

    with torch.no_grad():
        found = network(**inputs)
    value: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
    return value


def made_up(model: Model) -> nn.Module:
    """Return a model with weights that its constructor does not give. Without them no answer can be right."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    network = model.build().eval()
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value.mul_(1 + 0.1 * torch.rand(value.shape, generator=generator))
                if value.dim() < 2:  # mostly zeros and ones, as constructed
                    value.add_(0.01 * torch.rand(value.shape, generator=generator))
    return network


def _generator() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(SEED)


def _image(batch: int) -> Inputs:
    import torch

    return {"x": torch.randn(batch, 3, IMAGE_SIDE, IMAGE_SIDE, generator=_generator())}


def _words(count: int, most: int = 30_000) -> Callable[[int], Inputs]:
    def made(batch: int) -> Inputs:
        import torch

        return {"input_ids": torch.randint(1, most, (batch, count), generator=_generator())}

    return made


def _sound(batch: int) -> Inputs:
    import torch

    return {"input_values": torch.randn(batch, AUDIO_RATE, generator=_generator())}


def _spectrum(batch: int) -> Inputs:
    import torch

    words = torch.randint(1, 30_000, (batch, WHISPER_WORDS), generator=_generator())
    return {
        "input_features": torch.randn(batch, 80, MEL_FRAMES, generator=_generator()),
        "decoder_input_ids": words,
    }


def _vision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision import models

        network: nn.Module = getattr(models, name)()
        return network

    return build


_FAMILIES = {
    "GPT-2": "gpt2",
    "GPT-2-XL": "gpt2",
    "BERT": "bert",
    "wav2vec2": "wav2vec2",
    "Whisper": "whisper",
}


def _transformer(config: str, kind: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        network: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**values))
        return network

    return build


MODELS: Mapping[str, Model] = {
    "resnet50": Model(title="ResNet-50", library="torchvision", build=_vision("resnet50"), inputs=_image),
    "vgg19": Model(title="VGG19", library="torchvision", build=_vision("vgg19"), inputs=_image),
    "regnet": Model(
        title="RegNet-Y 8 GF", library="torchvision", build=_vision("regnet_y_8gf"), inputs=_image
    ),
    "gpt2": Model(
        title="GPT-2",
        library="transformers",
        build=_transformer("GPT2Config", "GPT2LMHeadModel", use_cache=False),
        inputs=_words(GPT2_WORDS),
    ),
    "bert": Model(
        title="BERT base",
        library="transformers",
        build=_transformer("BertConfig", "BertModel"),
        inputs=_words(BERT_WORDS),
    ),
    "wav2vec2": Model(
        title="wav2vec2 base",
        library="transformers",
        build=_transformer("Wav2Vec2Config", "Wav2Vec2Model"),
        inputs=_sound,
    ),
    "whisper": Model(
        title="Whisper small",
        library="transformers",
        build=_transformer(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            d_model=768,
            encoder_layers=12,
            encoder_attention_heads=12,
            encoder_ffn_dim=3072,
            decoder_layers=12,
            decoder_attention_heads=12,
            decoder_ffn_dim=3072,
            max_source_positions=MEL_FRAMES // 2,
            use_cache=False,
        ),
        inputs=_spectrum,
    ),
    "mobilenet": Model(
        title="MobileNetV3 small",
        library="torchvision",
        build=_vision("mobilenet_v3_small"),
        inputs=_image,
    ),
    "squeezenet": Model(
        title="SqueezeNet 1.1", library="torchvision", build=_vision("squeezenet1_1"), inputs=_image
    ),
    "gpt2-xl": Model(
        title="GPT-2-XL",
        library="transformers",
        build=_transformer(
            "GPT2Config", "GPT2LMHeadModel", n_embd=1600, n_layer=48, n_head=25, use_cache=False
        ),
        inputs=_words(GPT2_WORDS),
    ),
}

SMALL = ("mobilenet", "squeezenet")
"""Models of 10 MB and less, where a superfluous request or thread would show."""
