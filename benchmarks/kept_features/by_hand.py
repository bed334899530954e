"""Keep frozen features by hand: compute them once, overlapped with training, and train on them afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness.training.loader import Batches
from benchmarks.kept_features.networks import Half, halves
from upriver.finetune.prefetch.sampler import EpochOrder
from upriver.pipeline import Dataset

PREFETCH = 4
"""Micro-batches that each worker reads ahead: together a training batch."""

Steps = Iterator[tuple[Callable[[], Any], torch.Tensor]]
"""For each training step: a function that returns the model's answer, and the targets."""


class Kept(ABC):
    """Features of all samples, view by view.

    Args:
        samples: Number of samples.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._rows: dict[int, torch.Tensor] = {}

    @abstractmethod
    def has(self, view: int) -> bool:
        """Return whether the features of a whole view are kept."""

    @abstractmethod
    def _begin(self, view: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return room for a view."""

    @abstractmethod
    def finish(self, view: int) -> None:
        """Note that a view is whole."""

    def put(self, view: int, ids: Sequence[int], features: torch.Tensor) -> None:
        """Keep the features of some samples."""
        if view not in self._rows:
            self._rows[view] = self._begin(view, (self._samples, *features.shape[1:]))
        self._rows[view][list(ids)] = features

    def take(self, view: int, ids: Sequence[int]) -> torch.Tensor:
        """Return the features of some samples."""
        return self._rows[view][list(ids)]


class InMemory(Kept):
    """Keep features in memory, a tensor for each view."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self._whole: set[int] = set()

    def has(self, view: int) -> bool:
        """Return whether the features of a whole view are kept."""
        return view in self._whole

    def _begin(self, view: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape)

    def finish(self, view: int) -> None:
        """Note that a view is whole."""
        self._whole.add(view)


class InFiles(Kept):
    """Keep features in memory-mapped files, one for each view, which later jobs find.

    Args:
        samples: Number of samples.
        folder: Where the files lie.
    """

    def __init__(self, samples: int, folder: Path) -> None:
        super().__init__(samples)
        self._folder = folder
        self._maps: dict[int, np.memmap[Any, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, view: int) -> Path:
        return self._folder / f"view{view}.npy"

    def has(self, view: int) -> bool:
        """Return whether the features of a whole view are kept. Map the file of an earlier job."""
        if view not in self._rows and self._path(view).exists():
            self._rows[view] = torch.from_numpy(np.load(self._path(view), mmap_mode="r+"))
        return self._path(view).exists()

    def _begin(self, view: int, shape: tuple[int, ...]) -> torch.Tensor:
        part = self._path(view).with_suffix(".part")
        self._maps[view] = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
        return torch.from_numpy(self._maps[view])

    def finish(self, view: int) -> None:
        """Write a whole view to its file, which gets its name only then."""
        self._maps.pop(view).flush()
        self._path(view).with_suffix(".part").rename(self._path(view))


class HandMade:
    """Train the tail on features that are computed once for each view.

    While a view is new, the workers of a ``DataLoader`` read and decode micro-batches, the frozen part runs
    on them, and the tail trains on the features at once. One pass of the loader covers all new views, so that
    the link does not rest between two epochs.

    Args:
        network: Name of the network.
        model: The network.
        data: The dataset.
        kept: Keeps the features.
        orders: The order of each epoch.
        views: Number of views; epoch e has view e mod ``views``.
        workers: Worker processes of the loader.
        seed: Seed of random input stages.
    """

    def __init__(
        self,
        network: str,
        model: nn.Module,
        data: Dataset,
        kept: Kept,
        *,
        orders: Sequence[EpochOrder],
        views: int,
        workers: int,
        seed: int,
    ) -> None:
        self._frozen, self._tail = halves(network, model)
        self._data, self._kept, self._orders, self._views = data, kept, orders, views
        self._loader = Batches(data, workers=workers, prefetch=PREFETCH, seed=seed)
        new = [view for view in range(min(views, len(orders))) if not kept.has(view)]
        self._inputs = self._loader.read(
            [(view, sample) for sample in ids] for view in new for ids in orders[view].micro_batches
        )

    def epochs(self) -> Iterator[Steps]:
        """Yield the steps of each epoch."""
        for epoch, order in enumerate(self._orders):
            yield self._steps(order, epoch % self._views)

    def _steps(self, order: EpochOrder, view: int) -> Steps:
        new = not self._kept.has(view)
        for step in range(order.num_steps):
            ids = order.ids[slice(*order.step(step))]
            if new:
                features = self._computed(len(ids), order.micro_batch)
                self._kept.put(view, ids, features)
            else:
                features = self._kept.take(view, ids)
            yield partial(self._tail, features), self._data.targets_of(ids)
        if new:
            self._kept.finish(view)

    def _computed(self, samples: int, micro_batch: int) -> torch.Tensor:
        """Return the features of the next samples, which are whole micro-batches or the epoch's last ones."""
        parts = []
        for _ in range(0, samples, micro_batch):
            inputs, _ = next(self._inputs)
            parts.append(frozen_features(self._frozen, inputs, micro_batch))
        return torch.cat(parts)

    def close(self) -> None:
        """End the workers."""
        self._loader.close()


def frozen_features(frozen: Half, inputs: torch.Tensor, micro_batch: int) -> torch.Tensor:
    """Return the features of a micro-batch. A short one is padded, so that no bit depends on its length."""
    missing = micro_batch - len(inputs)
    padded = torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]) if missing else inputs
    with torch.no_grad():
        return frozen(padded)[: len(inputs)]
