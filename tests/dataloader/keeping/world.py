"""Make small datasets of images, and count their reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.pipeline.making import encoded, pixels, write
from upriver.dataloader import DataLoader
from upriver.pipeline import (
    CenterCrop,
    Dataset,
    Decode,
    InputStage,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    index,
)
from upriver.store import Store

COUNT, SEED = 20, 3
RANDOM = (Decode(), Resize((30, 40)), RandomResizedCrop(24), RandomHorizontalFlip(), Normalize())
STEADY = (Decode(), Resize(28), CenterCrop(24), Normalize())
LATE = (Decode(), Resize((30, 40)), CenterCrop(24), RandomHorizontalFlip())
"""Chains that draw in the middle, never, and at the end, where a stage may return its input itself."""

CHAINS = {"random": RANDOM, "steady": STEADY, "late": LATE}


class Reads:
    """Observer that counts the reads of each object."""

    piece_bytes = 2**20

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, store: Store, path: str, start: int | None, stop: int | None) -> Iterator[None]:
        with self._lock:
            self.paths.append(path)
        yield


def files(count: int = COUNT) -> dict[str, bytes]:
    return {f"{'ab'[at % 2]}/{at:02}.jpg": encoded(pixels(30 + at, 60 - at, at)) for at in range(count)}


def stored(root: Path, stages: tuple[InputStage, ...] = RANDOM, count: int = COUNT) -> Dataset:
    return index(write(root, files(count)), stages=stages)


def counted(data: Dataset) -> tuple[Dataset, Reads]:
    """Return the same dataset, and the reads of its store from now on."""
    reads = Reads()
    return data.with_store(data.store.observed_by(reads)), reads


def loader_of(data: Any, **arguments: Any) -> DataLoader:
    options: dict[str, Any] = {"batch_size": 6, "shuffle": True, "seed": SEED}
    return DataLoader(data, generator=torch.Generator().manual_seed(1), **{**options, **arguments})


def epochs(data: Any, number: int = 3, **arguments: Any) -> list[list[Any]]:
    loader = loader_of(data, **arguments)
    return [list(loader) for _ in range(number)]
