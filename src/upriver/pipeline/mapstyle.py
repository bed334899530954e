"""Adapt a user's own map-style dataset as a chain of two stages: read a sample, and make it.

A sample made in one place is the one that PyTorch's loader asks for. That is ``dataset[index]``, or for
batches ``dataset.__getitems__([index])`` if the dataset has that method, one sample at a time. A dataset with
``read(index)`` and ``transform(raw)`` can be read at one place and computed at another. The generators are
set before ``read``, and ``transform`` continues with them as ``read`` has left them, as in
``dataset[index]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate as collate_by
from torch.utils.data._utils.collate import default_collate_fn_map

from upriver.errors import ConfigError, DatasetError
from upriver.pipeline.draw import Draw
from upriver.pipeline.seeding import Generators, seed_generators
from upriver.text import printable
from upriver.types import DONE, RAW, START

MAKE, COLLATE = 0, 2
"""Stage numbers, as in `Draw`. The random numbers of collating belong to the batch, by its number."""

_RAW, _DRAWN = "upriver.raw", "upriver.drawn"
"""Keys of the value and the generators after a ``read`` that drew; ``transform`` continues from these."""


@runtime_checkable
class Divided(Protocol):
    """Dataset whose reading and computing can be separated.

    For every index ``dataset[index]`` must be ``self.transform(self.read(index))`` and no more. Many datasets
    use these names otherwise, so that is checked (`upriver.dataloader.datasets.divided`).
    """

    def read(self, index: int) -> Any:
        """Return the stored data, such as bytes."""

    def transform(self, raw: Any) -> Any:
        """Return a sample, from the stored data."""


@dataclass(frozen=True, slots=True)
class MapStyle:
    """A map-style dataset with separate random numbers for every sample.

    Attributes:
        seed: The job's seed, 0 to 2**63 - 1.
        by_batch: Whether PyTorch's loader would ask for batches, as it does unless ``batch_size`` is None.
        divided: Whether the dataset has methods to be read at one place and computed at another.

    Raises:
        ConfigError: If the dataset is not map-style: it has no ``__getitem__``.
    """

    dataset: Any
    seed: int = 0
    by_batch: bool = True
    divided: bool = field(init=False, repr=False)
    _many: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__getitem__"):
            kind = type(self.dataset).__name__
            raise ConfigError(f"dataset must be map-style: {kind} has no samples by index (__getitem__)")
        # Done once: a protocol check takes as long as seeding a generator. A transform may be None.
        many = self.by_batch and callable(getattr(self.dataset, "__getitems__", None))
        divided = isinstance(self.dataset, Divided) and callable(self.dataset.read) and not many
        object.__setattr__(self, "divided", divided and callable(self.dataset.transform))
        object.__setattr__(self, "_many", many)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions that a sample can have, from its index alone to the end."""
        return (START, RAW, DONE) if self.divided else (START, DONE)

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the stages' names from each position to the next."""
        return ("read", "transform") if self.divided else ("make",)

    def make(self, index: Any, *, epoch: int, sample: int, start: int = START, stop: int = DONE) -> Any:
        """Make one sample, or run a part of its stages; leave the process's generators changed.

        The result does not depend on how the stages are divided or where they run.

        Args:
            index: The sampler's index; the value that was read if ``start`` is `RAW`.
            sample: Number of ``index``, for the random numbers.

        Raises:
            ConfigError: If the dataset has no such stages.
        """
        if not START <= start < stop <= DONE or (RAW in (start, stop) and not self.divided):
            raise ConfigError(
                f"{type(self.dataset).__name__} has no stretch [{start}, {stop}): only one with read and "
                "transform is divided"
            )
        seed_generators(Draw(seed=self.seed, epoch=epoch, sample=sample, stage=MAKE))
        try:
            if stop == RAW:
                return _read(self.dataset, index)
            if start == RAW:
                return _transformed(self.dataset, index)
            return _one_of(self.dataset, index) if self._many else self.dataset[index]
        except Exception as caught:
            error = not_the_end(caught)
            which = sample if start == RAW or whole_number(index) == sample else printable(repr(index), 80)
            note(error, f"raised for sample {which} of epoch {epoch}")
            if error is caught:
                raise
            raise error from caught

    def make_all(
        self,
        indices: Sequence[Any],
        *,
        epoch: int,
        samples: Sequence[int],
        start: int = START,
        stop: int = DONE,
        given: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Run :meth:`make` for some samples, which are ``given`` if they are beyond their start."""
        values = indices if given is None else given
        return [
            self.make(value, epoch=epoch, sample=sample, start=start, stop=stop)
            for value, sample in zip(values, samples, strict=True)
        ]

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """Collate samples into a batch; leave the process's generators changed."""
        return collated(samples, collate, seed=self.seed, epoch=epoch, batch=batch)


def _one_of(dataset: Any, index: Any) -> Any:
    """Ask a dataset that makes lists of samples for one.

    Raises:
        DatasetError: If the result is not a list of one sample.
    """
    found = dataset.__getitems__([index])
    if isinstance(found, list) and len(found) == 1:
        return found[0]
    raise DatasetError(
        f"{type(dataset).__name__}.__getitems__ must return a list with one sample for each index, "
        f"and gets one index at a time; got {printable(repr(found), 60)} of type {type(found).__name__}"
    )


def collated(
    samples: list[Any], collate: Callable[[list[Any]], Any], *, seed: int, epoch: int, batch: int
) -> Any:
    """Collate samples into a batch; leave the process's generators changed.

    The batches of PyTorch's own collate function are contiguous, wherever it runs.
    """
    seed_generators(Draw(seed=seed, epoch=epoch, sample=batch, stage=COLLATE))
    try:
        return collated_by_default(samples) if collate is default_collate else collate(samples)
    except Exception as caught:
        error = not_the_end(caught)
        note(error, f"raised where batch {batch} of epoch {epoch} was collated")
        if error is caught:
            raise
        raise error from caught


def collated_by_default(samples: list[Any]) -> Any:
    """Run `default_collate` as in PyTorch's loader processes. It draws no random numbers.

    Elsewhere, samples of four and more dimensions pass their memory order on to the batch. The batch, and low
    bits of kernels' results, would then show where it was collated.
    """
    tensors = default_collate_fn_map[torch.Tensor]

    def joined(rows: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        batch: torch.Tensor = tensors(rows, collate_fn_map=collate_fn_map)
        return batch.contiguous() if batch.layout is torch.strided else batch

    return collate_by(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: joined})


def whole_number(index: Any) -> int | None:
    """Return an index as a number if it is one in Python, NumPy or a tensor; None otherwise.

    An array of one number is not a number, as it may stand for a list of samples. A truth value is not one
    either: sent as a number, it would be another index to the dataset.
    """
    if isinstance(index, bool) or getattr(index, "dtype", None) is torch.bool:
        return None
    try:
        return None if getattr(index, "ndim", 0) else operator.index(index)
    except TypeError:
        return None


def row_within(count: int, index: Any) -> int:
    """Return a number counted from the first sample; negative ones count from the end.

    Raises:
        IndexError: If there is no such sample.
    """
    at = whole_number(index)
    if at is None or not -count <= at < count:
        raise IndexError(f"samples have numbers in 0..{count - 1}, got {printable(repr(index), 60)}")
    return at % count


def not_the_end(error: Exception) -> Exception:
    """Return the error, or a `DatasetError` for `StopIteration`, which would silently end the epoch.

    Python does the same for generators (PEP 479).
    """
    if not isinstance(error, StopIteration):
        return error
    return DatasetError("the dataset's code raised StopIteration, as next() does where nothing is left")


def note(error: Exception, text: str) -> None:
    """Add a note to an error, once, as the same error may be raised repeatedly."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


# ------------------------------------------------------------------------------------- divided in two


def _read(dataset: Divided, index: Any) -> Any:
    """Return the value that was read, with the generators' states if reading has moved them."""
    before = Generators.now()
    raw = dataset.read(index)
    drawn = Generators.now().moved_since(before)
    return {_RAW: raw, _DRAWN: drawn} if drawn else raw


def _transformed(dataset: Divided, raw: Any) -> Any:
    """Return the sample of a value that was read, with the generators as reading left them."""
    if isinstance(raw, dict) and raw.keys() == {_RAW, _DRAWN}:
        Generators.move(raw[_DRAWN])
        raw = raw[_RAW]
    return dataset.transform(raw)
