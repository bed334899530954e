"""Where a loader stands, as plain data, so that another process goes on from there.

The protocol of torchdata's stateful loader: ``state_dict`` at any step, ``load_state_dict`` before the next
``iter()``. The order of an epoch is the sampler's, which may draw from any generator when it begins. So how
these stood then is part of the state: whoever goes on lets the sampler begin in the same way, and leaves out
what was handed out. No sample is made for that. A sampler that draws from what nobody sees must have a state
of its own; whether it gives the same order again shows by a digest of what was handed out. A state may say
how far a sampler was instead, as those of torchdata do; before an epoch begins, that is how far it was in the
one before. It gives other indices then, or none, and is begun once more: such a state is used once.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from upriver.dataloader.datasets.named import NamedDataset
from upriver.dataloader.resumed_order import Onward, Stood
from upriver.errors import ConfigError
from upriver.pipeline import Dataset
from upriver.pipeline.seeding import NUMBER_OF_WORDS, apart

ProcessesOfRun: TypeAlias = Literal["none", "each epoch", "persistent"]
"""When loader processes start: PyTorch draws numbers by that, and begins samplers, so orders depend on it."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Drawn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generators as an epoch found them.

    Attributes:
        python: `random.getstate`.
        numpy: `numpy.random.get_state`.
        shared: PyTorch's default generator, in hexadecimal digits.
        own: Those that the loader and its sampler were given, likewise.
        starts: Whether a number is drawn for loader processes: PyTorch does not where they persist.
        twice: Whether the sampler was begun once before that number was drawn and once after, and not only
            before, as by PyTorch where processes start; None in states that do not say, of loaders that began
            it after.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], Annotated[int, msgspec.Meta(ge=0, le=NUMBER_OF_WORDS)], int, float]
    shared: str
    own: list[str]
    starts: bool
    twice: bool | None = None

    @classmethod
    def now(cls, own: Sequence[torch.Generator], *, starts: bool, twice: bool) -> Drawn:
        """As they stand."""
        name, keys, position, has_gauss, gauss = np.random.get_state()
        version, words, following = random.getstate()
        return cls(
            python=(version, words, following),
            numpy=(str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
            shared=_hex(torch.default_generator),
            own=said_by(own),
            starts=starts,
            twice=twice,
        )

    def begin(self, batches: Iterable[Any], draw: Callable[[], int]) -> tuple[int, Iterator[Any]]:
        """Draw and begin in PyTorch's order, as a sampler may draw as soon as it is begun.

        Args:
            batches: Of the sampler.
            draw: A number for loader processes.

        Returns:
            The number, 0 where none is drawn, and what the sampler gives.
        """
        if self.twice is None:
            return draw() if self.starts else 0, iter(batches)
        begun = iter(batches)
        if not self.starts:
            return 0, begun
        number = draw()
        return number, iter(batches) if self.twice else begun

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
        set_own(own, self.own)
        try:
            random.setstate(self.python)
            name, keys, position, has_gauss, gauss = self.numpy
            np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise _damaged(error) from None
        _set(torch.default_generator, self.shared)


def said_by(generators: Sequence[torch.Generator]) -> list[str]:
    """How they stand, in hexadecimal digits."""
    return [_hex(each) for each in generators]


def set_own(generators: Sequence[torch.Generator], said: Sequence[str]) -> None:
    """The same for generators that a loader and its sampler were given.

    Raises:
        ConfigError: If there are others than there were, or one cannot be set so.
    """
    if len(generators) != len(said):
        raise ConfigError(
            f"the state is of a loader with {len(said)} generators of its own, and this one has "
            f"{len(generators)}"
        )
    for generator, state in zip(generators, said, strict=True):
        _set(generator, state)


def _set(generator: torch.Generator, said: str) -> None:
    try:
        generator.set_state(torch.frombuffer(bytearray.fromhex(said), dtype=torch.uint8))
    except (ValueError, TypeError, RuntimeError) as error:
        raise _damaged(error) from None


def _damaged(error: Exception) -> ConfigError:
    return ConfigError(f"the state's generators are damaged: {error}")


class Past(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The epoch that was over when a state was taken between two.

    Attributes:
        drawn: Generators as it found them.
        batches: How many it had.
        digest: Of their indices.
        sampler_epoch: What the sampler had been told by ``set_epoch``; None where it has none.
    """

    drawn: Drawn
    batches: Count
    digest: str
    sampler_epoch: int | None = None

    def comes_again(self, begin: Callable[[int], list[tuple[Any, ...]]], most: int) -> bool:
        """Begin the epoch until its order comes, as the run has, or the sampler stands still.

        A sampler that draws from something of its own, or counts, stands behind it then as in the run.

        Args:
            begin: Has the sampler begin it, and give so many batches at most.
            most: How often, at most.
        """
        found = before = ""
        for _ in range(most):
            digest = hashlib.blake2b(digest_size=16)
            for indices in begin(self.batches + 1):
                digest.update(_said(indices))
            found, before = digest.hexdigest(), found
            if found in (self.digest, before):
                break
        return found == self.digest


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
        num_replicas: Ranks that train together; None where the sampler does not know, or the state not say.
        rank: Of them, likewise.
        drawn: None where no epoch has begun.
        digest: Of the indices that were handed out; None in states that do not say.
        sampler: What its own ``state_dict`` gave when the epoch began; None where it has none.
        own: Where no epoch has begun, the generators that the loader and its sampler were given, in
            hexadecimal digits; None where one has, and in states that do not say.
        starts: Likewise, whether the next epoch draws a number for loader processes.
        processes: Of the run, whose order goes on whatever the next loader has; None in states that do not
            say.
        dataset: Says which one it is, as far as that is sure (`identity`); None in states that do not say.
        order_by: Type of the sampler, likewise.
        stood: The generators that everybody shares, when the state was taken, likewise.
        past: The epoch before, where none is under way, likewise.
        planned: How many batches had been drawn from the sampler, likewise.
        ahead: Digest of their indices.
    """

    schema: Literal["upriver.loader-state/1"] = "upriver.loader-state/1"
    epoch: Count
    batches: Count
    seed: Count
    samples: Count | None
    batch_size: int | None
    drop_last: bool | None = None
    sampler_epoch: int | None
    num_replicas: int | None = None
    rank: int | None = None
    drawn: Drawn | None
    digest: str | None = None
    sampler: Any = None
    own: list[str] | None = None
    starts: bool | None = None
    processes: ProcessesOfRun | None = None
    dataset: str | None = None
    order_by: str | None = None
    stood: Stood | None = None
    past: Past | None = None
    planned: Count | None = None
    ahead: str | None = None

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

    def plain(self) -> dict[str, Any]:
        """What JSON can say, and `read` reads.

        Raises:
            ConfigError: If JSON cannot say the sampler's own state.
        """
        found: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(msgspec.structs.replace(self, sampler=None))
        )
        try:
            found["sampler"] = json.loads(json.dumps(self.sampler))  # of numbers of any size
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the sampler's state_dict gives what JSON cannot say: {error}") from None
        return found

    def check(self, mine: State) -> None:
        """Whether it is of a loader like the one that gives ``mine``.

        Raises:
            ConfigError: If not; names what differs.
        """
        for name in ("seed", "samples", "batch_size"):
            theirs, here = getattr(self, name), getattr(mine, name)
            if theirs != here:
                raise ConfigError(f"the state is of another loader: its {name} is {theirs}, and here {here}")
        for name, said in (
            ("drop_last", "drop_last"),
            ("num_replicas", "num_replicas"),
            ("rank", "rank"),
            ("dataset", "dataset"),
            ("order_by", "sampler"),
        ):
            theirs, here = getattr(self, name), getattr(mine, name)
            if theirs not in (None, here):
                raise ConfigError(f"the state is of another loader: its {said} is {theirs}, and here {here}")
        if self.sampler is not None and mine.sampler is None:
            raise ConfigError("the state is of another loader: only its sampler has a state_dict")
        if (self.sampler_epoch is None) != (mine.sampler_epoch is None):
            raise ConfigError("the state is of another loader: only one of both has a sampler with set_epoch")


class BatchOrder(Iterator[tuple[Any, ...]]):
    """Indices of an epoch's batches, and a digest of those that were handed out.

    Args:
        batches: Of indices, as the sampler gives them.
        onward: What these are drawn from.
        late: Whether a sampler may draw with every batch, and not with the first one alone.
    """

    def __init__(self, batches: Iterator[tuple[Any, ...]], onward: Onward, *, late: bool) -> None:
        self._batches, self._onward, self._late = batches, onward, late
        self._drawn: deque[tuple[Any, ...]] = deque()
        self._given = 0
        self._begun = False
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """In hexadecimal digits."""
        return self._digest.hexdigest()

    @property
    def ahead(self) -> tuple[int, str]:
        """How many were drawn and not handed out, and a digest of these and all before."""
        digest = self._digest.copy()
        for indices in self._drawn:
            digest.update(_said(indices))
        return len(self._drawn), digest.hexdigest()

    def __next__(self) -> tuple[Any, ...]:
        if self._given == len(self._drawn):
            self._drawn.append(self._draw())
        self._given += 1
        return self._drawn[self._given - 1]

    def _draw(self) -> tuple[Any, ...]:
        if self._onward.apart and (self._late or not self._begun):
            with self._onward.drawing():
                found = next(self._batches)
        else:
            found = next(self._batches)
        self._begun = True
        return found

    def leave(self) -> None:
        """The first that was not is handed out."""
        self._digest.update(_said(self._drawn.popleft()))
        self._given -= 1

    def go_behind(self, state: State) -> None:
        """Draw what had been drawn when the state was taken, and leave out what was handed out.

        Raises:
            ConfigError: If these are others.
        """
        planned = state.batches + 1 if state.planned is None else state.planned
        head = list(itertools.islice(self._batches, planned))
        self._begun = bool(head)
        self._drawn.extend(head)
        self._given = min(state.batches, len(head))
        for _ in range(self._given):
            self.leave()
        same = state.digest in (None, self.digest) and state.ahead in (None, self.ahead[1])
        if not same or (state.planned is not None and len(head) < planned):
            raise ConfigError(
                "the sampler gives another order than the one that the state's epoch had: it draws from "
                "something that is in no state; give it state_dict and load_state_dict, or have it draw from "
                "the generators that torch, numpy and random share, or from its attribute generator; where "
                "it draws from the shared ones with every batch, nothing else may draw in between"
            )


def identity(dataset: Any) -> str:
    """Say which dataset it is, as far as that is sure: what it holds, its name, or its type."""
    match dataset:
        case Dataset():
            return f"upriver.Dataset {dataset.digest}"
        case NamedDataset():
            return dataset.name
        case Subset():
            rows = getattr(dataset.indices, "tolist", lambda: dataset.indices)()
            rows = hashlib.blake2b(_said(tuple(rows)), digest_size=16).hexdigest()
            return f"Subset {rows} of {identity(dataset.dataset)}"
        case ConcatDataset():
            return f"ConcatDataset of {', '.join(map(identity, dataset.datasets))}"
    return type(dataset).__qualname__


def _said(indices: tuple[Any, ...]) -> bytes:
    """Say the same of the same indices in every process: how many, and numbers or what JSON says of them."""
    return len(indices).to_bytes(8, "little") + _numbers(indices)


def _numbers(indices: tuple[Any, ...]) -> bytes:
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):
        return json.dumps(indices, default=lambda each: type(each).__name__).encode()


@dataclass(slots=True)
class EpochPosition:
    """Where an epoch stands.

    Attributes:
        epoch: Its number.
        drawn: Generators as it found them.
        order: What it hands out.
        batches: How many were handed out.
        sampler: What its own ``state_dict`` gave when the epoch began; None where it has none.
        sampler_epoch: What it had been told by ``set_epoch``; None where it has none.
        over: Whether that was all.
    """

    epoch: int
    drawn: Drawn
    order: BatchOrder
    batches: int = 0
    sampler: Any = None
    sampler_epoch: int | None = None
    over: bool = False

    @property
    def past(self) -> Past | None:
        """The epoch, once it is over."""
        if not self.over:
            return None
        return Past(
            drawn=self.drawn,
            batches=self.batches,
            digest=self.order.digest,
            sampler_epoch=self.sampler_epoch,
        )

    def go_on(self, batches: int) -> None:
        """So many have been handed out by now."""
        while self.batches < batches:
            self.order.leave()
            self.batches += 1


class Counted(Iterator[Any]):
    """Batches, and how many there were: what a sample raises stands in place of its batch.

    Args:
        batches: An epoch's.
        place: Told of it.
        handed_out: How many there were, with those before the first.
        length: How many the whole epoch has.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        place: EpochPosition,
        handed_out: Callable[[], int],
        length: Callable[[], int],
    ) -> None:
        self._batches, self._place, self._handed_out = batches, place, handed_out
        self._length = length

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._place.over = True
            raise
        finally:
            self._place.go_on(self._handed_out())


def begun_anew(begun: Iterator[Any], batches: Iterable[Any]) -> Iterator[Any]:
    """What a sampler gives; where that is nothing, since its state said that it was at its end, once more."""
    nothing = object()
    first = next(begun, nothing)
    yield from iter(batches) if first is nothing else itertools.chain([first], begun)


def own_state(*samplers: Any) -> Any:
    """What the first of them gives that has a state of its own; None where none has."""
    stateful = stateful_of(*samplers)
    return None if stateful is None else copy.deepcopy(stateful.state_dict())


def stateful_of(*samplers: Any) -> Any:
    """The first of them that has a state of its own, as torchdata's protocol says; None where none has."""
    for each in samplers:
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            return each
    return None


def _hex(generator: torch.Generator) -> str:
    return bytes(generator.get_state().numpy()).hex()
