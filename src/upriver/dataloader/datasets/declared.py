"""Adapt an `upriver.Dataset`, whose stages are declared, to the loader."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from upriver.engine.read import read_samples
from upriver.pipeline import Dataset, stored_tensor
from upriver.pipeline.mapstyle import collated, whole_number
from upriver.types import DONE

READ = "read"
"""First stage of every such dataset, which reads from the store."""


class Declared:
    """Samples of an `upriver.Dataset`: a tensor and its target, as torchvision's folders give them.

    Attributes:
        seed: Seed of the random numbers that its stages draw.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions that a sample can have, from its number alone to the end."""
        return tuple(range(self.dataset.chain.start - 1, DONE + 1))

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the stages' names from each position to the next; a repeated name gets a number."""
        seen: Counter[str] = Counter()
        names = [READ]
        for stage in self.dataset.chain.stages:
            seen[stage.name] += 1
            names.append(stage.name if seen[stage.name] == 1 else f"{stage.name}#{seen[stage.name]}")
        return tuple(names)

    def make_all(
        self,
        indices: Sequence[Any],
        *,
        epoch: int,
        samples: Sequence[int],
        start: int,
        stop: int = DONE,
        given: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return samples, or run a part of their stages.

        Args:
            indices: Rows of the index.
            samples: The same rows, as a sample's random numbers depend on its row.
            start: Position at which the samples are.
            stop: Position to which they are brought.
            given: The samples, as tensors or arrays; None if they are to be read.

        Raises:
            BadSample: If a sample cannot pass a stage.
            StoreError: If a sample cannot be read.
            IndexError: If a row does not exist.
        """
        values = (
            self._read(indices)
            if given is None
            else [
                each if isinstance(each, torch.Tensor) else torch.as_tensor(each, device="cpu")
                for each in given
            ]
        )
        first = max(start, self.dataset.chain.start)
        if stop > first:
            values = [
                self.dataset.run(value, sample=sample, epoch=epoch, seed=self.seed, start=first, stop=stop)
                for value, sample in zip(values, samples, strict=True)
            ]
        if stop < DONE:
            return values
        return list(zip(values, self.targets(indices), strict=True))

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """Collate samples into a batch; leave the process's generators changed."""
        return collated(samples, collate, seed=self.seed, epoch=epoch, batch=batch)

    def targets(self, indices: Sequence[Any]) -> list[int]:
        """Return the targets of samples."""
        targets: list[int] = self.dataset.targets_of(list(map(operator.index, indices))).tolist()
        return targets

    def __len__(self) -> int:
        return len(self.dataset)

    def _read(self, indices: Sequence[Any]) -> list[torch.Tensor]:
        rows = list[int]()
        for index in indices:
            row = whole_number(index)
            if row is None or not 0 <= row < len(self.dataset):
                raise IndexError(f"samples have numbers in 0..{len(self.dataset) - 1}, got {index!r}")
            rows.append(row)
        return [stored_tensor(blob) for blob in read_samples(self.dataset, rows)]
