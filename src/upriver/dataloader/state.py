"""Define a loader's position as plain data, from which another process continues.

The protocol is that of torchdata's stateful loader: ``state_dict`` at any step, ``load_state_dict`` before
the next ``iter()``. The sampler gives the order of an epoch, and may draw from any generator when it begins.
The state therefore holds the generators as the epoch found them. A resumed loader begins the sampler in the
same way and skips the batches that were handed out. It makes no sample for that.

A sampler that draws from a hidden generator needs a ``state_dict`` of its own. A digest of the indices handed
out shows whether the sampler gives the same order again. A sampler's state may instead hold its position, as
torchdata's samplers do; before an epoch begins, that is the position in the previous one. Such a sampler
gives other indices, or none, and is begun once more, so its state is used once.
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
from upriver.dataloader.resumed_order import GeneratorState, OrderGenerators
from upriver.errors import ConfigError
from upriver.pipeline import Dataset
from upriver.pipeline.seeding import NUMBER_OF_WORDS, apart

ProcessesOfRun: TypeAlias = Literal["none", "each epoch", "persistent"]
"""Time at which loader processes start; PyTorch's draws depend on it, and so does the order."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class EpochGenerators(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generators as an epoch found them.

    Attributes:
        python, numpy, shared: As in `GeneratorState`.
        own: States of the generators that the loader and its sampler were given, in hexadecimal digits.
        starts: Whether a number is drawn for loader processes; PyTorch draws none where they persist.
        twice: Whether the sampler is begun twice, before and after that number is drawn, as PyTorch does
            where processes start; otherwise only before. None in older states, whose loaders began it only
            after.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], Annotated[int, msgspec.Meta(ge=0, le=NUMBER_OF_WORDS)], int, float]
    shared: str
    own: list[str]
    starts: bool
    twice: bool | None = None

    @classmethod
    def now(cls, own: Sequence[torch.Generator], *, starts: bool, twice: bool) -> EpochGenerators:
        """Return the generators' current states."""
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
        """Draw the number and begin the sampler in PyTorch's order, as a sampler may draw when it begins.

        Args:
            draw: Draw a number for loader processes.

        Returns:
            The number, 0 where none is drawn, and the sampler's iterator.
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
        """Set the generators inside the context; restore the shared ones afterwards."""
        with apart():
            self.set(own)
            yield

    def set(self, own: Sequence[torch.Generator]) -> None:
        """Set the generators to these states.

        Raises:
            ConfigError: If the number of generators differs, or one cannot be set.
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
    """Return the generators' states, in hexadecimal digits."""
    return [_hex(each) for each in generators]


def set_own(generators: Sequence[torch.Generator], said: Sequence[str]) -> None:
    """Set the generators that a loader and its sampler were given.

    Raises:
        ConfigError: If the number of generators differs, or one cannot be set.
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


class CompletedEpoch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The completed epoch before a state that was saved between two epochs.

    Attributes:
        batches: Number of its batches.
        digest: Digest of its indices.
        sampler_epoch: Epoch that the sampler was given by ``set_epoch``; None if it has no such method.
    """

    drawn: EpochGenerators
    batches: Count
    digest: str
    sampler_epoch: int | None = None

    def comes_again(self, begin: Callable[[int], list[tuple[Any, ...]]], most: int) -> bool:
        """Begin the epoch until its order matches the run's, or no longer changes; return whether it matches.

        A sampler that counts, or draws from a generator of its own, is then where it was in the run.

        Args:
            begin: Have the sampler begin the epoch, and return at most the given number of batches.
            most: Maximum number of attempts.
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
    """State returned by `DataLoader.state_dict`.

    Fields with the default None are None in states of loaders that did not save them.

    Attributes:
        epoch: Number of the epoch, counted from 0.
        batches: Number of its batches that were handed out.
        seed: Seed of the random numbers drawn for samples.
        samples: Number of samples in the dataset.
        batch_size: The loader's argument.
        drop_last: The loader's argument.
        sampler_epoch: Epoch that the sampler was given by ``set_epoch``; None if it has no such method.
        num_replicas: Number of ranks that train together; None also where the sampler does not say.
        rank: Rank of this process; None also where the sampler does not say.
        drawn: Generators as the epoch found them; None where no epoch has begun.
        digest: Digest of the indices that were handed out.
        sampler: The sampler's own ``state_dict`` when the epoch began; None if it has no such method.
        own: States of the generators that the loader and its sampler were given, in hexadecimal digits, where
            no epoch has begun; else None.
        starts: Whether the next epoch draws a number for loader processes, where no epoch has begun; else
            None.
        processes: How the run starts loader processes; its order continues with any other loader.
        dataset: Identity of the dataset, where it is certain (`identity`).
        order_by: Type of the sampler.
        stood: Generators shared by the process when the state was saved.
        past: The previous epoch, where none is under way.
        planned: Number of batches that had been drawn from the sampler.
        ahead: Digest of the indices of these batches.
        views: Number of epochs after which random numbers repeat; 0 if they never do.
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
    drawn: EpochGenerators | None
    digest: str | None = None
    sampler: Any = None
    own: list[str] | None = None
    starts: bool | None = None
    processes: ProcessesOfRun | None = None
    dataset: str | None = None
    order_by: str | None = None
    stood: GeneratorState | None = None
    past: CompletedEpoch | None = None
    planned: Count | None = None
    ahead: str | None = None
    views: Count | None = None

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> State:
        """Read a state from plain data.

        Raises:
            ConfigError: If the data are no valid state.
        """
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a state of a loader: {error}") from None

    def plain(self) -> dict[str, Any]:
        """Return the state as plain JSON data, which `read` reads.

        Raises:
            ConfigError: If the sampler's own state does not fit into JSON.
        """
        found: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(msgspec.structs.replace(self, sampler=None))
        )
        try:
            found["sampler"] = json.loads(json.dumps(self.sampler))  # integers of any size
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the sampler's state_dict gives what JSON cannot say: {error}") from None
        return found

    def check(self, mine: State) -> None:
        """Check that the state fits the loader whose state is ``mine``.

        Raises:
            ConfigError: If it does not; the message names the difference.
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
            ("views", "views"),
        ):
            theirs, here = getattr(self, name), getattr(mine, name)
            if theirs not in (None, here):
                raise ConfigError(f"the state is of another loader: its {said} is {theirs}, and here {here}")
        if self.sampler is not None and mine.sampler is None:
            raise ConfigError("the state is of another loader: only its sampler has a state_dict")
        if (self.sampler_epoch is None) != (mine.sampler_epoch is None):
            raise ConfigError("the state is of another loader: only one of both has a sampler with set_epoch")


class BatchOrder(Iterator[tuple[Any, ...]]):
    """Indices of an epoch's batches, with a digest of those that were handed out.

    Args:
        batches: Batches of indices, from the sampler.
        onward: Generators that the sampler draws from.
        late: Whether the sampler may draw with every batch, not only with the first.
    """

    def __init__(self, batches: Iterator[tuple[Any, ...]], onward: OrderGenerators, *, late: bool) -> None:
        self._batches, self._onward, self._late = batches, onward, late
        self._drawn: deque[tuple[Any, ...]] = deque()
        self._given = 0
        self._begun = False
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Return the digest of the indices handed out, in hexadecimal digits."""
        return self._digest.hexdigest()

    @property
    def ahead(self) -> tuple[int, str]:
        """Return the number of batches drawn and not handed out, and a digest of these and all before."""
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
        """Count the oldest drawn batch as handed out."""
        self._digest.update(_said(self._drawn.popleft()))
        self._given -= 1

    def go_behind(self, state: State) -> None:
        """Draw the batches that the state's run had drawn, and skip those that it had handed out.

        Raises:
            ConfigError: If the batches differ.
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
    """Return the dataset's identity where it is certain: a digest of its contents, its name, or its type."""
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
    """Return bytes that are equal for equal indices in every process: their count, then numbers or JSON."""
    return len(indices).to_bytes(8, "little") + _numbers(indices)


def _numbers(indices: tuple[Any, ...]) -> bytes:
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):
        return json.dumps(indices, default=lambda each: type(each).__name__).encode()


@dataclass(slots=True)
class EpochPosition:
    """Position in an epoch.

    Attributes:
        batches: Number of batches handed out.
        sampler, sampler_epoch: As in `State`.
    """

    epoch: int
    drawn: EpochGenerators
    order: BatchOrder
    batches: int = 0
    sampler: Any = None
    sampler_epoch: int | None = None
    over: bool = False

    @property
    def past(self) -> CompletedEpoch | None:
        """Return the epoch as a completed one; None while it is under way."""
        if not self.over:
            return None
        return CompletedEpoch(
            drawn=self.drawn,
            batches=self.batches,
            digest=self.order.digest,
            sampler_epoch=self.sampler_epoch,
        )

    def go_on(self, batches: int) -> None:
        """Advance to the given number of batches handed out."""
        while self.batches < batches:
            self.order.leave()
            self.batches += 1


class CountedBatches(Iterator[Any]):
    """Iterator over an epoch's batches that counts them; an error of a sample takes the place of its batch.

    Args:
        place: Position that is advanced.
        handed_out: Return the number of batches handed out, including those before the first.
        length: Return the number of batches in the whole epoch.
        on_end: Called after the last batch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        place: EpochPosition,
        handed_out: Callable[[], int],
        length: Callable[[], int],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._batches, self._place, self._handed_out = batches, place, handed_out
        self._length, self._on_end = length, on_end

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._place.over = True
            self._on_end()
            raise
        finally:
            self._place.go_on(self._handed_out())


def begun_anew(begun: Iterator[Any], batches: Iterable[Any]) -> Iterator[Any]:
    """Yield a sampler's batches; begin it once more if it gives none because its state was at its end."""
    nothing = object()
    first = next(begun, nothing)
    yield from iter(batches) if first is nothing else itertools.chain([first], begun)


def own_state(*samplers: Any) -> Any:
    """Return the state of the first sampler with a ``state_dict`` of its own; None if none has one."""
    stateful = stateful_of(*samplers)
    return None if stateful is None else copy.deepcopy(stateful.state_dict())


def stateful_of(*samplers: Any) -> Any:
    """Return the first sampler with a state of its own, by torchdata's protocol; None if none has one."""
    for each in samplers:
        if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            return each
    return None


def _hex(generator: torch.Generator) -> str:
    return bytes(generator.get_state().numpy()).hex()
