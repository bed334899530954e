"""A dataset of ours, whose stages are declared, as the loader takes it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from upriver.engine.read import read_samples
from upriver.errors import BadSample
from upriver.pipeline import Dataset, SampleError, stored_tensor
from upriver.pipeline.mapstyle import DONE, collated, whole_number

READ = "read"
"""The first stage of every such dataset: from the store."""


class Declared:
    """Samples of an `upriver.Dataset`: a tensor and its target, as torchvision's folders give them.

    Attributes:
        dataset: Indexed.
        seed: Of what its stages draw.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    @property
    def positions(self) -> tuple[int, ...]:
        """Where a sample can stand, from nothing but its number to the end."""
        return tuple(range(self.dataset.chain.start - 1, DONE + 1))

    @property
    def stages(self) -> tuple[str, ...]:
        """What leads from each position to the next; a name that was there before has a number."""
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
        """Some samples, or a stretch of their way.

        Args:
            indices: Rows of the index.
            epoch: Counted by the loader.
            samples: The same, as what is drawn for a sample hangs on its row.
            start: Where they stand.
            stop: Where they are to stand.
            given: They themselves, tensors or arrays; None where nothing is read.

        Raises:
            BadSample: If one cannot pass a stage.
            StoreError: If one cannot be read.
            IndexError: If there is no such row.
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
                self._run(value, sample, epoch, first, stop)
                for value, sample in zip(values, samples, strict=True)
            ]
        if stop < DONE:
            return values
        return list(zip(values, self.targets(indices), strict=True))

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """A batch of its samples; sets the generators of this process and leaves them so."""
        return collated(samples, collate, seed=self.seed, epoch=epoch, batch=batch)

    def targets(self, indices: Sequence[Any]) -> list[int]:
        """Of some samples."""
        targets: list[int] = self.dataset.targets[list(map(operator.index, indices))].tolist()
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

    def _run(self, value: torch.Tensor, sample: int, epoch: int, start: int, stop: int) -> torch.Tensor:
        try:
            return self.dataset.chain.run(
                value, sample=sample, epoch=epoch, seed=self.seed, start=start, stop=stop
            )
        except SampleError as error:
            (place,) = self.dataset.locate([sample])
            raise BadSample(sample=sample, object_name=place.object, reason=str(error)) from None
