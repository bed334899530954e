"""A user's own map-style dataset as a chain of two stages: what reads a sample, and what makes it.

Wherever a sample is made in one place it is what PyTorch's loader asks for: ``dataset[index]``, or for
batches ``dataset.__getitems__([index])`` of a dataset that has that, one sample at a time. One that offers
``read(index)`` and ``transform(raw)`` instead can be read at one place and computed at another: the
generators are set before the first of the two, and stand for the second as the first has left them, as in
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

START, RAW, DONE = -2, -1, 0
"""Positions of a sample: nothing but its index, what was read, what a batch is made of."""

MAKE, COLLATE = 0, 2
"""Stages, as `Draw` counts them. Where batches are collated, what is drawn is the batch's, by its number."""

_RAW, _DRAWN = "upriver.raw", "upriver.drawn"
"""What was read, where reading has drawn: what is computed elsewhere goes on with the numbers after these."""


@runtime_checkable
class Divided(Protocol):
    """A dataset whose reading and computing can be apart.

    For every index ``dataset[index]`` is ``self.transform(self.read(index))`` and no more. Many a dataset has
    something else by these names, so that is looked at (`upriver.dataloader.datasets.divided`).
    """

    def read(self, index: int) -> Any:
        """What is stored, such as bytes."""

    def transform(self, raw: Any) -> Any:
        """A sample, from what is stored."""


@dataclass(frozen=True, slots=True)
class MapStyle:
    """A map-style dataset with randomness of its own for every sample.

    Attributes:
        dataset: The user's.
        seed: The job's, 0 to 2**63 - 1.
        by_batch: Whether PyTorch's loader would ask for batches, as it does unless ``batch_size`` is None.
        divided: Whether it has what could be read at one place and computed at another.

    Raises:
        ConfigError: If it is not map-style: it has no ``__getitem__``.
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
        # Once: to ask a protocol takes as long as to seed a generator does. A transform may be None.
        many = self.by_batch and callable(getattr(self.dataset, "__getitems__", None))
        divided = isinstance(self.dataset, Divided) and callable(self.dataset.read) and not many
        object.__setattr__(self, "divided", divided and callable(self.dataset.transform))
        object.__setattr__(self, "_many", many)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where a sample can stand, from nothing but its index to the end."""
        return (START, RAW, DONE) if self.divided else (START, DONE)

    @property
    def stages(self) -> tuple[str, ...]:
        """What leads from each position to the next."""
        return ("read", "transform") if self.divided else ("make",)

    def make(self, index: Any, *, epoch: int, sample: int, start: int = START, stop: int = DONE) -> Any:
        """One sample, or a stretch of its way; sets the generators of this process and leaves them so.

        However the way is divided, and wherever its parts run, the result is the same.

        Args:
            index: What the sampler gave; where ``start`` is `RAW`, what was read.
            epoch: Counted by the loader.
            sample: A number that stands for ``index``, for what is drawn.
            start: `START` or `RAW`.
            stop: `RAW` or `DONE`.

        Raises:
            ConfigError: If the stretch is none that the dataset has.
        """
        if not START <= start < stop <= DONE or (RAW in (start, stop) and not self.divided):
            raise ConfigError(
                f"{type(self.dataset).__name__} has no stretch [{start}, {stop}): only one with read and "
                "transform is divided"
            )
        self._seed(epoch, sample, MAKE)
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
        """:meth:`make` for some samples, which are ``given`` where they stand beyond their start."""
        values = indices if given is None else given
        return [
            self.make(value, epoch=epoch, sample=sample, start=start, stop=stop)
            for value, sample in zip(values, samples, strict=True)
        ]

    def join(self, samples: list[Any], collate: Callable[[list[Any]], Any], *, epoch: int, batch: int) -> Any:
        """A batch of its samples; sets the generators of this process and leaves them so.

        Args:
            collate: From a list of samples to a batch.
            epoch: Counted by the loader.
            batch: Number of the batch in its epoch.
        """
        return collated(samples, collate, seed=self.seed, epoch=epoch, batch=batch)

    def _seed(self, epoch: int, sample: int, stage: int) -> None:
        seed_generators(Draw(seed=self.seed, epoch=epoch, sample=sample, stage=stage))


def _one_of(dataset: Any, index: Any) -> Any:
    """Ask a dataset that makes lists of samples for one.

    Raises:
        DatasetError: If it gives anything but a list of one sample.
    """
    found = dataset.__getitems__([index])
    if isinstance(found, list) and len(found) == 1:
        return found[0]
    raise DatasetError(
        f"{type(dataset).__name__}.__getitems__ must give a list with a sample for each index, and is "
        f"asked for one at a time; got {printable(repr(found), 60)} of type {type(found).__name__}"
    )


def collated(
    samples: list[Any], collate: Callable[[list[Any]], Any], *, seed: int, epoch: int, batch: int
) -> Any:
    """A batch of its samples; sets the generators of this process and leaves them so.

    What PyTorch's own collating makes is contiguous, wherever it runs.
    """
    seed_generators(Draw(seed=seed, epoch=epoch, sample=batch, stage=COLLATE))
    try:
        return _contiguous(samples) if collate is default_collate else collate(samples)
    except Exception as caught:
        error = not_the_end(caught)
        note(error, f"raised where batch {batch} of epoch {epoch} was collated")
        if error is caught:
            raise
        raise error from caught


def _contiguous(samples: list[Any]) -> Any:
    """`default_collate`, as it is in PyTorch's loader processes.

    Elsewhere it leaves the order of dimensions in memory to that of the samples, where these have four and
    more: who has collated a batch would show in it, and in the low bits of what kernels make of it.
    """
    tensors = default_collate_fn_map[torch.Tensor]

    def joined(rows: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        batch: torch.Tensor = tensors(rows, collate_fn_map=collate_fn_map)
        return batch.contiguous() if batch.layout is torch.strided else batch

    return collate_by(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: joined})


def whole_number(index: Any) -> int | None:
    """The number that an index is, be it Python's, NumPy's or in a tensor; None where it is something else.

    An array of one number is something else: it may stand for a list of samples. So is a truth value: where
    it is sent as a number a dataset gets another index.
    """
    if isinstance(index, bool) or getattr(index, "dtype", None) is torch.bool:
        return None
    try:
        return None if getattr(index, "ndim", 0) else operator.index(index)
    except TypeError:
        return None


def not_the_end(error: Exception) -> Exception:
    """The error, but no `StopIteration`: raised for a sample it would end the epoch as if that were whole.

    Python does the same for generators (PEP 479).
    """
    if not isinstance(error, StopIteration):
        return error
    return DatasetError("the dataset's code raised StopIteration, as next() does where nothing is left")


def note(error: Exception, text: str) -> None:
    """Say more of an error than it says itself; once, as the same one may be raised again and again."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


# ------------------------------------------------------------------------------------- divided in two


def _read(dataset: Divided, index: Any) -> Any:
    """What was read; with how the generators stand where that has moved them."""
    before = Generators.now()
    raw = dataset.read(index)
    drawn = Generators.now().moved_since(before)
    return {_RAW: raw, _DRAWN: drawn} if drawn else raw


def _transformed(dataset: Divided, raw: Any) -> Any:
    """A sample of what was read; the generators stand as before it was."""
    if isinstance(raw, dict) and raw.keys() == {_RAW, _DRAWN}:
        Generators.move(raw[_DRAWN])
        raw = raw[_RAW]
    return dataset.transform(raw)
