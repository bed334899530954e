"""LoADPart's six networks with random weights, as `latency_models.py` and `load_aware.py` take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from upriver._torchvision import ensure_torchvision

NETWORKS: Mapping[str, int] = {
    "alexnet": 224,
    "vgg16": 224,
    "resnet18": 224,
    "resnet50": 224,
    "squeezenet1_0": 227,
    "xception": 299,
}
"""How many pixels across they take, as in section V-A."""


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A network in eval, the same one every time, and one sample."""
    ensure_torchvision()  # which timm needs, too
    torch.manual_seed(0)
    model: nn.Module
    if name == "xception":
        import timm

        model = timm.create_model("legacy_xception", pretrained=False)
    else:
        from torchvision import models

        model = getattr(models, name)(weights=None)
    return model.eval(), torch.randn(1, 3, NETWORKS[name], NETWORKS[name])
