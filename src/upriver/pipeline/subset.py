"""Map parts of an indexed dataset to its rows: `random_split`, `Subset`, and `ConcatDataset` of these.

A part is a choice of rows of the index. Loaders and jobs map positions in the part to rows. Samples of a part
therefore equal those of the whole dataset to the bit, and requests to servers always name rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from upriver.errors import ConfigError
from upriver.pipeline.dataset import Dataset
from upriver.pipeline.mapstyle import row_within


def whole_of(dataset: Any) -> Any:
    """Return the indexed dataset of a part; the argument itself if it is no part of one.

    Raises:
        ConfigError: If it has parts of several indexed datasets, or of one and other datasets, or a part
            makes samples by code of its own.
    """
    wholes = list(_wholes(dataset))
    ours = [each for each in wholes if isinstance(each, Dataset)]
    if not ours or dataset is ours[0]:
        return dataset
    _check_plain(dataset)
    if len({each.digest for each in ours}) > 1 or len(ours) < len(wholes):
        raise ConfigError(
            "a ConcatDataset of an upriver.Dataset may have parts of that one alone: index the samples of "
            "all as one dataset (upriver.index of the folder above them), or give each a loader of its own"
        )
    return ours[0]


def rows_of(part: Any) -> Sequence[int]:
    """Return the rows of the index that a part has, in its order; a range if these are all rows.

    Raises:
        ConfigError: If the part names a row that the index does not have.
    """
    everything = range(len(whole_of(part)))
    if isinstance(part, Dataset):
        return everything
    try:
        rows = tuple(_row(part, at) for at in range(len(part)))
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"the dataset's {type(part).__name__} cannot be read: {error}") from None
    return everything if rows == tuple(everything) else rows


class Rows:
    """Batches of rows of the whole dataset, from batches of positions in a part.

    A position that the part does not have is named in its batch, where reading it raises. The next batch
    follows, as in PyTorch's loader.
    """

    def __init__(self, part: Any, batches: Iterable[tuple[Any, ...]]) -> None:
        self._part, self._batches = part, batches

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(map(self._row, batch)) for batch in self._batches)

    def _row(self, index: Any) -> Any:
        try:
            return _row(self._part, index)
        except (LookupError, TypeError, ValueError):
            return f"{index!r} of a {type(self._part).__name__} of {len(self._part)}"


def _wholes(dataset: Any) -> Iterator[Any]:
    match dataset:
        case Subset():
            yield from _wholes(dataset.dataset)
        case ConcatDataset():
            for each in dataset.datasets:
                yield from _wholes(each)
        case _:
            yield dataset


def _check_plain(part: Any) -> None:
    """Check that a part, and its own parts, choose rows and do nothing else.

    Raises:
        ConfigError: If a class derived from PyTorch's makes samples in its own way.
    """
    for kind in (Subset, ConcatDataset):
        names = [name for name in ("__getitem__", "__getitems__", "__len__") if hasattr(kind, name)]
        if isinstance(part, kind) and any(
            getattr(type(part), name) is not getattr(kind, name) for name in names
        ):
            raise ConfigError(
                f"{type(part).__name__} is a {kind.__name__} with samples of its own, and samples of an "
                "upriver.Dataset are made by its stages: declare what it does as a stage, or do it to batches"
            )
    for each in (part.dataset,) if isinstance(part, Subset) else getattr(part, "datasets", ()):
        _check_plain(each)


def _row(part: Any, index: Any) -> int:
    """Return the row of the whole dataset that ``part[index]`` would ask for.

    Raises:
        LookupError: If there is none.
    """
    match part:
        case Subset():
            return _row(part.dataset, part.indices[index])
        case ConcatDataset():
            at = row_within(len(part), operator.index(index))
            for each in part.datasets:
                if at < len(each):  # type: ignore[arg-type]
                    break
                at -= len(each)  # type: ignore[arg-type]
            return _row(each, at)
    return row_within(len(part), index)
