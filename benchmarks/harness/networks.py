"""Build frozen networks, those of the papers and two more, with random weights."""

from __future__ import annotations

import torch
from torch import nn

from upriver._torchvision import ensure_torchvision
from upriver.program.freeze import freeze_to

BATCH = 16

NETWORKS = {
    # network: last frozen module, near the freeze points that HAPI (2025, Table 3) uses
    "alexnet": "classifier.1",
    "resnet18": "layer4.0",
    "resnet50": "layer4.1",
    "vgg11": "classifier.0",
    "vgg19": "features.34",
    "densenet121": "features.denseblock4",
    "vit_b_16": "encoder.layers.encoder_layer_9",
}
"""The seven networks of the papers; their Transformer is ViT-B/16 here."""

SMALLER = {"vit_tiny": "encoder.layers.encoder_layer_9", "small": "1"}
"""More networks: a ViT of 192 features, and a few convolutions that show in seconds that a claim works."""

FROZEN = {**NETWORKS, **SMALLER}
"""The last frozen module of each network."""


def build(name: str, samples: int = BATCH) -> tuple[nn.Module, torch.Tensor]:
    """Return the network with random weights, frozen, and a batch of this many samples."""
    torch.manual_seed(0)
    model = _small() if name == "small" else _torchvision(name)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)  # a head of zeros has the same loss for any features
    freeze_to(model, FROZEN[name])
    return model.train(), torch.randn(samples, 3, 224, 224)


def _torchvision(name: str) -> nn.Module:
    ensure_torchvision()
    from torchvision import models

    if name == "vit_tiny":
        return models.VisionTransformer(
            image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768
        )
    model: nn.Module = getattr(models, name)(weights=None)
    return model


def _small() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, stride=4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, stride=4), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * 14 * 14, 10),
    )
