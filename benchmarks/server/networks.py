"""Define the networks that a server runs, and that plain trainers train."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness.networks import NETWORKS
from benchmarks.harness.networks import build as build_published
from upriver.program.freeze import freeze_to

TINY = "tiny"
SIDES = {TINY: 32}
SIDE = 224
"""Width and height of a network's input, in pixels."""

TINY_CLASSES = 10


class Tiny(nn.Module):
    """A network without noticeable compute time, for runs that only show that everything works."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 3, stride=2, padding=1), nn.ReLU()
        )
        self.classifier = nn.Linear(4 * 16 * 16, TINY_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def build(spec: str) -> tuple[nn.Module, str]:
    """Return a frozen network with random weights, and the name of its last frozen module.

    Args:
        spec: ``resnet18`` is frozen as in `split_overhead`; ``alexnet:features`` up to that module instead.
    """
    name, _, last = spec.partition(":")
    if name == TINY:
        torch.manual_seed(0)
        model: nn.Module = Tiny().train()
    else:
        model, _ = build_published(name)
    last = last or NETWORKS.get(name, "features")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    freeze_to(model, last)
    return model, last
