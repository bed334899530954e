"""Adapt an `upriver.Dataset`, whose stages are declared, to the loader."""

from __future__ import annotations

import operator
import time
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
        views: Number of epochs after which random numbers repeat; None if they never do.
    """

    def __init__(self, dataset: Dataset, seed: int, *, views: int | None = None) -> None:
        self.dataset, self.seed, self.views = dataset, seed, views

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

    def drawn_as(self, epoch: int) -> int:
        """Return the epoch as which the stages draw random numbers in an epoch."""
        return epoch % self.views if self.views else epoch

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
        values = self.values(indices, epoch=epoch, samples=samples, start=start, stop=stop, given=given)
        return values if stop < DONE else self.finished(indices, values)

    def values(
        self,
        indices: Sequence[Any],
        *,
        epoch: int,
        samples: Sequence[int],
        start: int | None = None,
        stop: int = DONE,
        given: Sequence[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Return samples without their targets; see :meth:`make_all`."""
        values = self.read(self.rows(indices)) if given is None else [as_tensor(each) for each in given]
        first = self.dataset.chain.start if start is None else max(start, self.dataset.chain.start)
        if stop <= first:
            return values
        return [
            self._run(value, sample=sample, epoch=epoch, start=first, stop=stop)
            for value, sample in zip(values, samples, strict=True)
        ]

    def pass_by(
        self,
        values: Sequence[Any],
        *,
        samples: Sequence[int],
        epoch: int,
        at: int,
        stop: int,
        there: Sequence[bool],
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], float]:
        """Bring samples past a position, one after another.

        Args:
            values: The samples, stored or at position ``at``.
            there: For each sample whether it is at position ``at``.

        Returns:
            The samples at ``stop``; those that were stored, at ``at``; and the seconds that took.

        Raises:
            BadSample: If a sample cannot pass a stage.
        """
        done, passed, seconds = list[torch.Tensor](), dict[int, torch.Tensor](), 0.0
        for given, sample, is_there in zip(values, samples, there, strict=True):
            value = as_tensor(given)
            if not is_there:
                began_s = time.perf_counter()
                value = self._run(value, sample=sample, epoch=epoch, start=self.dataset.chain.start, stop=at)
                seconds += time.perf_counter() - began_s
                passed[sample] = value
            done.append(self._run(value, sample=sample, epoch=epoch, start=at, stop=stop))
        return done, passed, seconds

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """Collate samples into a batch; leave the process's generators changed."""
        return collated(samples, collate, seed=self.seed, epoch=epoch, batch=batch)

    def finished(self, indices: Sequence[Any], values: Sequence[torch.Tensor]) -> list[Any]:
        """Return finished samples with their targets."""
        return list(zip(values, self.targets(indices), strict=True))

    def targets(self, indices: Sequence[Any]) -> list[int]:
        """Return the targets of samples."""
        targets: list[int] = self.dataset.targets_of(list(map(operator.index, indices))).tolist()
        return targets

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: Sequence[Any]) -> list[int]:
        """Return indices as rows of the index.

        Raises:
            IndexError: If a row does not exist.
        """
        rows = list[int]()
        for index in indices:
            row = whole_number(index)
            if row is None or not 0 <= row < len(self.dataset):
                raise IndexError(f"samples have numbers in 0..{len(self.dataset) - 1}, got {index!r}")
            rows.append(row)
        return rows

    def read(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Return stored samples.

        Raises:
            StoreError: If a sample cannot be read.
        """
        return [stored_tensor(blob) for blob in read_samples(self.dataset, rows)]

    def _run(self, value: torch.Tensor, *, sample: int, epoch: int, start: int, stop: int) -> torch.Tensor:
        return self.dataset.run(
            value, sample=sample, epoch=self.drawn_as(epoch), seed=self.seed, start=start, stop=stop
        )


def as_tensor(value: Any) -> torch.Tensor:
    """Return a sample, which may have come as an array, as a tensor."""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
