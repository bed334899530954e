"""Build the networks of `first_batch`, and write the samples that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness.networks import NETWORKS as FREEZE_POINTS
from benchmarks.harness.networks import build as build_torchvision
from benchmarks.harness.photographs import CLASSES, jpeg
from upriver._torchvision import ensure_torchvision
from upriver.pipeline import CenterCrop, Decode, InputStage, LoadTensor, Normalize, Resize
from upriver.program.freeze import freeze_to

TOKENS, VOCABULARY = 128, 30_522
"""Tokens of a text, and of BERT's vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network and its stored samples.

    Attributes:
        title: Name in the report.
        make: Returns the network with random weights.
        last_frozen: Its last frozen module.
        stages: Input stages of a sample.
        store: Writes a sample, given a path without its ending.
    """

    title: str
    make: Callable[[], nn.Module]
    last_frozen: str
    stages: Sequence[InputStage]
    store: Callable[[np.random.Generator, Path], None]

    def build(self) -> nn.Module:
        """Return the network, frozen, in training mode."""
        torch.manual_seed(0)
        model = self.make()
        freeze_to(model, self.last_frozen)
        return model.train()


def _torchvision(name: str, title: str) -> Network:
    return Network(
        title=title,
        make=lambda: build_torchvision(name)[0],
        last_frozen=FREEZE_POINTS[name],
        stages=(Decode(), Resize(256), CenterCrop(224), Normalize()),
        store=lambda rng, path: _write(path.with_suffix(".jpg"), jpeg(rng)),
    )


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _bert() -> nn.Module:
    ensure_torchvision()  # transformers imports it
    from transformers import BertConfig, BertForSequenceClassification

    configuration: Any = BertConfig  # mypy knows no field of its base class
    return BertForSequenceClassification(configuration(num_labels=CLASSES))


def _small() -> nn.Module:
    """Return a network whose preparation takes little: a few convolutions."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, CLASSES),
    )


NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "resnet18": _torchvision("resnet18", "ResNet-18"),
        "vit_b_16": _torchvision("vit_b_16", "ViT-B/16"),
        "bert_base": Network(
            title="BERT-base",
            make=_bert,
            last_frozen="bert.encoder.layer.9",
            stages=(LoadTensor("npy"),),
            store=lambda rng, path: np.save(path, rng.integers(1000, VOCABULARY, TOKENS)),
        ),
        "small": Network(
            title="a small network",
            make=_small,
            last_frozen="1",
            stages=(LoadTensor("npy"),),
            store=lambda rng, path: np.save(path, rng.standard_normal((3, 32, 32), dtype=np.float32)),
        ),
    }
)
"""The networks by name. All but the last two encoder layers of the Transformers are frozen."""


def make_data(network: str, samples: int, folder: Path) -> None:
    """Write stored samples in class folders. The samples are always the same."""
    for number in range(samples):
        place = folder / "data" / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        NETWORKS[network].store(np.random.default_rng([number, 1]), place / f"{number:05}")
