"""A small real job: PNG images in a store, a small network, a few training steps."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

import upriver
from tests.program.nets import Small, frozen_small
from upriver.finetune.job import FinetuneJob
from upriver.pipeline import Dataset, InputStage

STAGES: tuple[InputStage, ...] = (
    upriver.Decode(),
    upriver.RandomResizedCrop(16),
    upriver.RandomHorizontalFlip(),
    upriver.Normalize(),
)

OPTIONS: dict[str, Any] = {
    "sampling": upriver.Sampling,
    "splitting": upriver.Splitting,
    "prefetch": upriver.Prefetch,
    "replanning": upriver.Replanning,
}

BATCH, MICRO = 12, 8
"""Sizes that do not divide each other, so that steps cut through micro-batches."""


def png(seed: int, side: int = 24) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="png")
    return out.getvalue()


def images(
    root: Path, count: int = 50, *, folder: str = "photos", bad: dict[int, bytes] | None = None
) -> upriver.Store:
    """Return class folders of ``count`` small PNG images; ``bad`` replaces the bytes of some."""
    for number in range(count):
        of_class = root / folder / f"class{number % 5}"
        of_class.mkdir(parents=True, exist_ok=True)
        path, content = of_class / f"{number:03}.png", (bad or {}).get(number, png(number))
        if not path.exists() or path.read_bytes() != content:  # writing changes the ETag
            path.write_bytes(content)
    return upriver.Store.open(root.as_uri())


def photos(
    root: Path, count: int = 50, *, folder: str = "photos", bad: dict[int, bytes] | None = None
) -> Dataset:
    return upriver.index(images(root, count, folder=folder, bad=bad), folder, stages=STAGES)


def grouped(**given: Any) -> dict[str, Any]:
    """Return arguments of ``finetune``, those that are fields of an option moved into it."""
    for keyword, kind in OPTIONS.items():
        names = given.keys() & {field.name for field in fields(kind)}
        if names:
            given[keyword] = kind(**{name: given.pop(name) for name in names})
    return given


def root_of(data: Dataset) -> Path:
    """Return the folder that is a dataset's store."""
    return Path(data.store.uri.removeprefix("file://"))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def train(
    job: FinetuneJob,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 1,
    first: int = 0,
    after_step: Callable[[int], object] = lambda step: None,
    losses: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the losses of every step; dropout draws from a generator seeded by the step number."""
    losses = [] if losses is None else losses
    model.train()
    for _ in range(epochs):
        for features, targets in job:
            torch.manual_seed(first + len(losses))
            loss = nn.functional.cross_entropy(job(features), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            after_step(len(losses))
    return losses


def run(
    near: Any, data: Dataset, *, epochs: int = 2, model: Small | None = None, **options: Any
) -> tuple[list[torch.Tensor], Small, FinetuneJob]:
    """Run a whole job, from seeded weights by default; return losses, trained model and closed job."""
    model = model or frozen_small()
    options = {"batch_size": BATCH, "micro_batch": MICRO, "seed": 7, **options}
    with near.finetune(model, data, **options) as job:
        losses = train(job, model, optimizer_of(model), epochs=epochs)
    return losses, model, job


def same(a: tuple[list[torch.Tensor], nn.Module], b: tuple[list[torch.Tensor], nn.Module]) -> bool:
    """Return whether two runs have the same losses and the same final weights, to the bit."""
    weights = [x.state_dict() for x in (a[1], b[1])]
    equal_weights = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return len(a[0]) == len(b[0]) and all(map(torch.equal, a[0], b[0])) and equal_weights
