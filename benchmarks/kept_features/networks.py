"""Cut the networks of `kept_features` by hand, as a practitioner would, and give each job its own head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.harness.networks import build
from upriver._torchvision import ensure_torchvision

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
"""Learning rates of the jobs of a sweep, of plain SGD. A job alone has the first."""

Half = Callable[[torch.Tensor], torch.Tensor]


def import_networks() -> None:
    """Import what builds the networks."""
    ensure_torchvision()
    from torchvision import models  # noqa: F401


def build_for(network: str, job: int) -> nn.Module:
    """Return the network, frozen, in training mode, with the head of a job."""
    model, _ = build(network, samples=1)
    if job:
        *_, head = (module for module in model.modules() if isinstance(module, nn.Linear))
        torch.manual_seed(job)
        nn.init.normal_(head.weight, std=0.02)
    return model


def halves(network: str, model: Any) -> tuple[Half, Half]:
    """Return the frozen part of a network, in eval mode, and the part that is trained."""
    match network:
        case "resnet18":
            stem = model.conv1, model.bn1, model.relu, model.maxpool
            frozen: nn.Module = nn.Sequential(
                *stem, model.layer1, model.layer2, model.layer3, model.layer4[0]
            )
            tail: Half = nn.Sequential(model.layer4[1], model.avgpool, nn.Flatten(1), model.fc)
        case "vit_tiny":
            frozen, tail = _FrozenViT(model), _TrainedViT(model)
        case _:
            frozen, tail = nn.Sequential(*model[:2]), nn.Sequential(*model[2:])
    return frozen.eval(), tail


class _FrozenViT(nn.Module):
    """Patches, positions and the first ten layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.token, self.positions = model.class_token, model.encoder.pos_embedding
        self.patches, self.layers = model._process_input, model.encoder.layers[:10]

    def forward(self, images: torch.Tensor) -> Any:
        patches = self.patches(images)
        token = self.token.expand(len(patches), -1, -1)
        return self.layers(torch.cat([token, patches], dim=1) + self.positions)


class _TrainedViT(nn.Module):
    """The last two layers, and the head on the class token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.norm, self.heads = model.encoder.layers[10:], model.encoder.ln, model.heads

    def forward(self, features: torch.Tensor) -> Any:
        return self.heads(self.norm(self.layers(features))[:, 0])
