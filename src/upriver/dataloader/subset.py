"""Parts of a dataset of ours, as PyTorch makes them: `random_split`, `Subset`, and `ConcatDataset` of these.

A part is the rows that it has of the index. The loader maps what a sampler gives to rows as batches are
planned, so samples of a part are the whole dataset's to the bit, and servers are asked for them as ever.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from upriver.errors import ConfigError
from upriver.pipeline import Dataset


def whole_of(dataset: Any) -> Any:
    """The dataset of ours that this is a part of; itself where it is none.

    Raises:
        ConfigError: If it has parts of several, or of one of ours and others.
    """
    wholes = list(_wholes(dataset))
    ours = [each for each in wholes if isinstance(each, Dataset)]
    if not ours or dataset is ours[0]:
        return dataset
    if len({each.digest for each in ours}) > 1 or len(ours) < len(wholes):
        raise ConfigError(
            "a ConcatDataset of an upriver.Dataset may have parts of that one alone: index the samples of "
            "all as one dataset (upriver.index of the folder above them), or give each a loader of its own"
        )
    return ours[0]


class Rows:
    """Batches of a part, by rows of the whole dataset.

    Args:
        part: Of a dataset of ours.
        batches: Of indices of the part.
    """

    def __init__(self, part: Any, batches: Iterable[tuple[Any, ...]]) -> None:
        self._part, self._batches = part, batches

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(_row(self._part, index) for index in batch) for batch in self._batches)


def _wholes(dataset: Any) -> Iterator[Any]:
    match dataset:
        case Subset():
            yield from _wholes(dataset.dataset)
        case ConcatDataset():
            for each in dataset.datasets:
                yield from _wholes(each)
        case _:
            yield dataset


def _row(part: Any, index: Any) -> Any:
    """Which row of the whole dataset a sample is, as ``part[index]`` would ask for it."""
    match part:
        case Subset():
            return _row(part.dataset, part.indices[index])
        case ConcatDataset():
            at = operator.index(index)
            if not -len(part) <= at < len(part):
                raise IndexError(f"samples have numbers in 0..{len(part) - 1}, got {index!r}")
            at %= len(part)
            for each in part.datasets:
                if at < len(each):  # type: ignore[arg-type]
                    return _row(each, at)
                at -= len(each)  # type: ignore[arg-type]
    return index
