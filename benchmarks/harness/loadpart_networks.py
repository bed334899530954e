"""Define LoADPart's six networks with random weights, for `latency_models` and `load_aware`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from upriver._torchvision import ensure_torchvision
from upriver.program.graph.schema import Stage
from upriver.program.models.loadpart_nodes import PaperNode

NETWORKS: Mapping[str, int] = {
    "alexnet": 224,
    "vgg16": 224,
    "resnet18": 224,
    "resnet50": 224,
    "squeezenet1_0": 227,
    "xception": 299,
}
"""Width and height of their inputs in pixels, as in section V-A."""

NAMED: Mapping[str, tuple[int, ...]] = {"alexnet": (4, 8, 19), "squeezenet1_0": (5, 39)}
"""The paper's cuts inside them, by its numbers (sections V-B and V-C)."""


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network in eval, the same one every time, and one sample."""
    ensure_torchvision()  # timm needs it, too
    torch.manual_seed(0)
    model: nn.Module
    if name == "xception":
        import timm

        model = timm.create_model("legacy_xception", pretrained=False)
    else:
        from torchvision import models

        model = getattr(models, name)(weights=None)
    return model.eval(), torch.randn(1, 3, NETWORKS[name], NETWORKS[name])


def paper_numbers(stages: Sequence[Stage], nodes: Sequence[PaperNode]) -> dict[int, int]:
    """Return the paper's number of each cut that has one there.

    A stage is one operator, and a layer's bias is no operator of its own. Of a stage's nodes the first one
    counts, because the same tensor crosses it.

    Args:
        stages: Stages of a program that may be cut after every operator.
        nodes: Nodes of the same network, the input first.
    """
    places = [(node.name if node.name != node.kind else "", node.cut_bytes) for node in nodes]
    found, begin = {0: 0}, 1
    for cut, stage in enumerate(stages, start=1):
        module, inside, _ = stage.name.partition(": ")
        wanted = (module if inside else "", stage.out_bytes)
        if wanted not in places[begin:]:
            continue
        at = places.index(wanted, begin)
        found[cut] = nodes[at].number
        begin = next((each for each in range(at, len(places)) if places[each] != wanted), len(places))
    return found
