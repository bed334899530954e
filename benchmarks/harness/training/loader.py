"""Run the baseline of the benchmarks of plans: an ordinary loop over a PyTorch ``DataLoader``."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as MapDataset

from upriver.engine.read import read_samples
from upriver.finetune.prefetch.sampler import EpochOrder
from upriver.pipeline import Dataset
from upriver.pipeline.chain import stored_tensor
from upriver.program.freeze import frozen_units, keep_in_eval

CONTEXT = multiprocessing.get_context("forkserver")
"""Workers fork from a process without busy threads. A fork of this process would copy locks its threads hold.
"""
CONTEXT.set_forkserver_preload(["torch.utils.data", "upriver.pipeline", "upriver.engine.read"])

Sample = tuple[torch.Tensor, int]

Drawn = tuple[int, int]
"""The epoch by which random input stages draw, and a sample's row in the dataset's index."""


class Stored(MapDataset[Sample]):
    """A map-style dataset over the store: epoch and id to inputs and target."""

    def __init__(self, data: Dataset, *, seed: int) -> None:
        self._data, self._seed = data, seed

    def __getitem__(self, drawn: Drawn) -> Sample:
        return self.__getitems__([drawn])[0]

    def __getitems__(self, drawn: Sequence[Drawn]) -> list[Sample]:
        """Read a whole batch with joined and parallel reads.

        A ``DataLoader`` calls this method where it exists.
        """
        blobs = read_samples(self._data, [sample for _, sample in drawn])
        chain, seed = self._data.chain, self._seed
        return [
            (
                chain.run(
                    stored_tensor(blob), sample=sample, epoch=epoch, seed=seed, start=chain.start, stop=0
                ),
                int(self._data.targets_of([sample])),
            )
            for blob, (epoch, sample) in zip(blobs, drawn, strict=True)
        ]


class Batches:
    """Read batches of inputs and targets through a ``DataLoader``, whose workers run the input stages.

    Args:
        data: The dataset.
        workers: Worker processes; 0 reads in this one.
        prefetch: Batches that each worker reads ahead.
        seed: Seed of random input stages.
    """

    def __init__(self, data: Dataset, *, workers: int, prefetch: int, seed: int = 0) -> None:
        self._batches: list[list[Drawn]] = [[(0, 0)]] * max(workers, 1)
        many: dict[str, Any] = {"prefetch_factor": prefetch, "persistent_workers": True}
        many["multiprocessing_context"] = CONTEXT
        self._loader: DataLoader[Sample] | None = DataLoader(
            Stored(data, seed=seed),
            batch_sampler=self._batches,
            num_workers=workers,
            generator=torch.Generator(),  # each pass draws from it, not the tail's dropout
            **(many if workers else {}),
        )

    def start_workers(self) -> None:
        """Start every worker with one sample, as an earlier epoch would have done."""
        list(self._loader or ())

    def read(self, batches: Iterable[Sequence[Drawn]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets of these batches, in order."""
        self._batches[:] = map(list, batches)
        yield from self._loader or ()

    def close(self) -> None:
        """End the workers."""
        self._loader = None
        gc.collect()


class Loop:
    """Train the user's own model, whole and on its device, on whole batches from a ``DataLoader``."""

    def __init__(
        self, model: nn.Module, data: Dataset, *, workers: int, prefetch: int, seed: int = 0
    ) -> None:
        self._model, self._device = model, next(model.parameters()).device
        self._in_eval = list(frozen_units(model))
        self._batches = Batches(data, workers=workers, prefetch=prefetch, seed=seed)

    def start_workers(self) -> None:
        """Start every worker with one sample, as an earlier epoch would have done."""
        self._batches.start_workers()

    def steps(self, order: EpochOrder, *, view: int = 0) -> Iterator[tuple[Callable[[], Any], torch.Tensor]]:
        """Yield for each step of an epoch a function that returns the model's answer, and the targets.

        Args:
            order: The epoch's samples.
            view: The epoch by which random input stages draw.
        """
        steps = (order.ids[slice(*order.step(step))] for step in range(order.num_steps))
        for inputs, targets in self._batches.read([(view, sample) for sample in ids] for ids in steps):
            keep_in_eval(self._model, self._in_eval)
            yield partial(self._model, inputs.to(self._device)), targets.to(self._device)

    def close(self) -> None:
        """End the workers."""
        self._batches.close()
