"""Build the demo's network: ResNet-18 with a new classifier, frozen through ``layer4.0``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from upriver.coldstart.plain_load import load_weights
from upriver.engine.engine import Engine
from upriver.engine.read import read_samples
from upriver.pipeline import Dataset
from upriver.program.freeze import freeze_to
from upriver.program.models.registry import load_model

FREEZE_TO = "layer4.0"
"""Last frozen module. layer4.1 and the classifier train."""

CALIBRATION_IMAGES = 32
"""Images that set the batch statistics of random weights. More did not change the held-out accuracy."""


def build_model(
    num_classes: int, *, seed: int, weights: Path | None = None, cache: Path | None = None
) -> tuple[nn.Module, str]:
    """Return ResNet-18 with the best available weights.

    Args:
        num_classes: Outputs of the new classifier.
        seed: Seed of random weights and of the new classifier.
        weights: Safetensors file; by default torchvision's own file, if it was downloaded before.
        cache: Folder of torchvision's downloads; torch's own folder by default.

    Returns:
        The model, without frozen parameters, and the origin of its weights (``"random"`` if there is none).
    """
    model, origin = _backbone(seed, weights, cache)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.fc = nn.Linear(model.get_submodule("fc").in_features, num_classes)  # type: ignore[arg-type]
    return model, origin


def freeze(model: nn.Module) -> None:
    """Freeze through `FREEZE_TO`; the rest trains."""
    freeze_to(model, FREEZE_TO)


@torch.no_grad()
def calibrate(model: nn.Module, dataset: Dataset, *, seed: int, micro_batch: int = 16) -> None:
    """Set a random model's batch statistics from real images.

    This replaces pre-training: with initial BatchNorm statistics, features of a random network grow or fade
    from layer to layer.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the following batches
    model.train()
    for images in _images(dataset, CALIBRATION_IMAGES, seed=seed, micro_batch=micro_batch):
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _images(dataset: Dataset, count: int, *, seed: int, micro_batch: int) -> Sequence[torch.Tensor]:
    """Return the first images of a dataset as model inputs, in whole micro-batches or one short one."""
    micro_batch = min(micro_batch, len(dataset))
    engine = Engine(chain=dataset.chain, program=None, micro_batch=micro_batch)
    batches = []
    for first in range(0, min(count, len(dataset)) // micro_batch * micro_batch, micro_batch):
        ids = list(range(first, first + micro_batch))
        names = [place.object for place in dataset.locate(ids)]
        blobs = read_samples(dataset, ids)
        batches.append(engine.begin(blobs, ids, object_names=names, stop=0, seed=seed, epoch=0).tensors[0])
    return batches


def _backbone(seed: int, weights: Path | None, cache: Path | None) -> tuple[nn.Module, str]:
    model, _ = load_model("torchvision:resnet18", seed=seed)
    if weights is not None:
        load_weights(model, weights)
        return model, str(weights)
    # Imported late: load_model makes the import possible if compiled operators are missing.
    from torchvision.models import ResNet18_Weights

    published = ResNet18_Weights.DEFAULT
    file = (cache or Path(torch.hub.get_dir()) / "checkpoints") / Path(published.url).name
    if not _is_published(file):
        return model, "random"
    model.load_state_dict(published.get_state_dict(progress=False, model_dir=str(file.parent)))
    return model, f"torchvision ({file.name})"


def _is_published(file: Path) -> bool:
    """Return True if the file exists and has the digest that torchvision puts into its name."""
    if not file.is_file():
        return False
    expected = file.stem.rpartition("-")[2]
    return bool(expected) and hashlib.sha256(file.read_bytes()).hexdigest().startswith(expected)
