"""Where a loader stands, as plain data, so that another process goes on from there.

The protocol of torchdata's stateful loader: ``state_dict`` at any step, ``load_state_dict`` before the next
``iter()``. The order of an epoch is the sampler's, which may draw from any generator when it begins. So how
these stood then is part of the state: whoever goes on lets the sampler begin in the same way, and leaves out
what was handed out. No sample is made for that.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from upriver.errors import ConfigError
from upriver.pipeline.seeding import apart

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Drawn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generators as an epoch found them.

    Attributes:
        python: `random.getstate`.
        numpy: `numpy.random.get_state`.
        shared: PyTorch's default generator, in hexadecimal digits.
        own: Those that the loader and its sampler were given, likewise.
        starts: Whether a number is drawn for loader processes before: PyTorch does not where they persist.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    shared: str
    own: list[str]
    starts: bool

    @classmethod
    def now(cls, own: Sequence[torch.Generator], *, starts: bool) -> Drawn:
        """As they stand."""
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, words, following = random.getstate()
        return cls(
            python=(version, words, following),
            numpy=(str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
            shared=_hex(torch.default_generator),
            own=[_hex(each) for each in own],
            starts=starts,
        )

    @contextmanager
    def again(self, own: Sequence[torch.Generator]) -> Iterator[None]:
        """The same inside; afterwards those that all share go on as if nothing had been.

        Raises:
            ConfigError: If there are others than there were, or one cannot be set so.
        """
        with apart():
            self.set(own)
            yield

    def set(self, own: Sequence[torch.Generator]) -> None:
        """The same from here on.

        Raises:
            ConfigError: As :meth:`again`.
        """
        if len(own) != len(self.own):
            raise ConfigError(
                f"the state is of a loader with {len(self.own)} generators of its own, and this one has "
                f"{len(own)}"
            )
        try:
            random.setstate(self.python)
            name, keys, position, has_gauss, gauss = self.numpy
            np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
            for generator, state in zip(
                (torch.default_generator, *own), (self.shared, *self.own), strict=True
            ):
                generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"the state's generators are damaged: {error}") from None


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `DataLoader.state_dict` gives.

    Attributes:
        epoch: Its number, counted from 0.
        batches: How many of it were handed out.
        seed: Of what is drawn for samples.
        samples: Of the dataset.
        batch_size: As the loader was told.
        drop_last: As the loader was told; None in states that do not say.
        sampler_epoch: What the sampler was told by ``set_epoch``; None where it has none.
        drawn: None where no epoch has begun.
    """

    schema: Literal["upriver.loader-state/1"] = "upriver.loader-state/1"
    epoch: Count
    batches: Count
    seed: Count
    samples: Count | None
    batch_size: int | None
    drop_last: bool | None = None
    sampler_epoch: int | None
    drawn: Drawn | None

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> State:
        """From plain data.

        Raises:
            ConfigError: If it is no state.
        """
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a state of a loader: {error}") from None

    def check(self, mine: State) -> None:
        """Whether it is of a loader like the one that gives ``mine``.

        Raises:
            ConfigError: If not; names what differs.
        """
        for name in ("seed", "samples", "batch_size"):
            theirs, here = getattr(self, name), getattr(mine, name)
            if theirs != here:
                raise ConfigError(f"the state is of another loader: its {name} is {theirs}, and here {here}")
        if self.drop_last not in (None, mine.drop_last):
            raise ConfigError(
                f"the state is of another loader: its drop_last is {self.drop_last}, and here "
                f"{mine.drop_last}"
            )
        if (self.sampler_epoch is None) != (mine.sampler_epoch is None):
            raise ConfigError("the state is of another loader: only one of both has a sampler with set_epoch")


@dataclass(slots=True)
class Place:
    """Where an epoch stands.

    Attributes:
        epoch: Its number.
        drawn: Generators as it found them.
        batches: How many were handed out.
        over: Whether that was all.
    """

    epoch: int
    drawn: Drawn
    batches: int = 0
    over: bool = False


class Counted(Iterator[Any]):
    """Batches, and how many there were: what a sample raises stands in place of its batch.

    Args:
        batches: An epoch's.
        place: Told of it.
        handed_out: How many there were, with those before the first.
    """

    def __init__(self, batches: Iterator[Any], place: Place, handed_out: Callable[[], int]) -> None:
        self._batches, self._place, self._handed_out = batches, place, handed_out

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._place.over = True
            raise
        finally:
            self._place.batches = self._handed_out()


def behind(indices: Iterable[Any], count: int) -> Iterator[Any]:
    """What comes after the first ``count``; these are drawn now, and the next one too."""
    drawn = iter(indices)
    head = list(itertools.islice(drawn, count + 1))
    return itertools.chain(head[count:], drawn)


def _hex(generator: torch.Generator) -> str:
    return bytes(generator.get_state().numpy()).hex()
