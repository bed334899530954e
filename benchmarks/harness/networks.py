"""Build the frozen networks of the papers, with random weights."""

from __future__ import annotations

import torch

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


def build(name: str, samples: int = BATCH) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the network with random weights, frozen, and a batch of this many samples."""
    ensure_torchvision()
    from torchvision import models

    torch.manual_seed(0)
    model = getattr(models, name)(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not module.weight.any():
            torch.nn.init.normal_(
                module.weight, std=0.02
            )  # a head of zeros has the same loss for any features
    freeze_to(model, NETWORKS[name])
    return model.train(), torch.randn(samples, 3, 224, 224)
