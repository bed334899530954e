"""LoADPart's six networks with random weights, as `latency_models.py` and `load_aware.py` take them."""

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
"""How many pixels across they take, as in section V-A."""

NAMED: Mapping[str, tuple[int, ...]] = {"alexnet": (4, 8, 19), "squeezenet1_0": (5, 39)}
"""Cuts inside them that the paper finds, by its numbers (sections V-B and V-C)."""


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


def paper_numbers(stages: Sequence[Stage], nodes: Sequence[PaperNode]) -> dict[int, int]:
    """The paper's number of each cut that it has one for.

    A stage is one operator, and a layer's bias no operator of its own: of the nodes that a stage stands for
    the first counts, which the same crosses.

    Args:
        stages: Of a program that may be cut after every operator.
        nodes: Of the same network, the input first.
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
