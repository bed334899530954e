"""Where a loader draws the order of further epochs from once it has gone on from a state.

PyTorch's samplers draw from the generators that everybody shares. In a process that goes on from a state
these stand where its script has set them, which is where the first epoch began: its order would come again.
So from then on a loader draws from a copy, which begins where the run stood that the state is of. That run's
model drew from the same generators (dropout), so the copy follows: as many numbers are left out as were drawn
here since. The shared ones are left as if the loader had drawn from them.

All three are Mersenne Twisters (Matsumoto, Nishimura: ACM TOMACS 8(1), 1998). How many numbers lie between
two states is found by running one until it is at the other. Where that is nowhere near, the script has set
the generator (`torch.manual_seed` for each epoch, `torch.set_rng_state` of a checkpoint), and is obeyed.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import torch
from numpy import random as numpy_random

from upriver.errors import ConfigError
from upriver.pipeline.seeding import Generators

WORDS = 624
"""In a state: as many numbers come of it before the next one."""

MOST_WORDS = 2**25
"""Looked through for a state, which takes a tenth of a second."""

_TORCH = struct.Struct("<QiiQ")
"""Seed, numbers left, whether it was seeded, and the next number; then the words, eight bytes each."""


class Stood(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The generators that everybody shares, as plain data.

    Attributes:
        python: `random.getstate`.
        numpy: `numpy.random.get_state`.
        shared: PyTorch's default generator, in hexadecimal digits.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    shared: str

    @classmethod
    def of(cls, generators: Generators) -> Self:
        """As they stand."""
        name, keys, position, has_gauss, gauss = generators.numpy
        return cls(
            python=generators.python,
            numpy=(str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
            shared=bytes(generators.torch.numpy()).hex(),
        )

    def generators(self) -> Generators:
        """The same to be set.

        Raises:
            ConfigError: If they are damaged.
        """
        try:
            name, keys, *rest = self.numpy
            found = Generators(
                self.python,
                (name, np.array(keys, dtype=np.uint32), *rest),
                torch.frombuffer(bytearray.fromhex(self.shared), dtype=torch.uint8),
            )
            random.Random().setstate(found.python)
            numpy_random.RandomState().set_state(found.numpy)
            torch.Generator().set_state(found.torch)
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
            raise ConfigError(f"the state's generators are damaged: {error}") from None
        return found


class Onward:
    """What a loader draws from.

    Args:
        stood: The shared generators in the run that goes on; None where none does: then it is these.
    """

    def __init__(self, stood: Stood | None = None) -> None:
        self._here = self._there = Generators.now() if stood is not None else None
        if stood is not None:
            self._there = stood.generators()
        self._fresh = True

    def stands(self) -> Stood:
        """Tell where the order would be drawn from now."""
        now = Generators.now()
        return Stood.of(now if self._there is None else self._followed(now))

    def begin(self) -> None:
        """The first epoch begins: generators that have been set to where the run stood are drawn from."""
        if self._fresh and self._here is not None and self._there is not None:
            now = Generators.now()
            self._here = Generators(
                *(
                    each if _same(each, there) else here
                    for each, here, there in _each(now, self._here, self._there)
                )
            )
        self._fresh = False

    @property
    def apart(self) -> bool:
        """Whether that is another than the shared generators."""
        return self._there is not None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What is drawn inside belongs to the order."""
        if self._there is None:
            yield
            return
        self.begin()
        now = Generators.now()
        there = self._followed(now)
        set_generators(there)
        try:
            yield
        finally:
            after = Generators.now()
            here = Generators(*(_moved(*each) for each in _each(now, there, after)))
            set_generators(here)
            self._here, self._there = here, after

    def _followed(self, now: Generators) -> Generators:
        """Where the run would stand, after what was drawn here since."""
        assert self._here is not None and self._there is not None
        return Generators(*(_follows(*each) for each in _each(now, self._here, self._there)))


def set_generators(generators: Generators) -> None:
    """Have those of this process stand so."""
    random.setstate(generators.python)
    numpy_random.set_state(generators.numpy)
    torch.default_generator.set_state(generators.torch)


class Words(NamedTuple):
    """A Mersenne Twister.

    Attributes:
        key: Of uint32.
        position: Of the next word; behind the last one where these are used up.
        seed: As PyTorch says it; None for the others.
    """

    key: np.ndarray[Any, Any]
    position: int
    seed: int | None = None

    @classmethod
    def of(cls, state: Any) -> Words | None:
        """Read any of the three; None where it is something else, as NumPy's may be."""
        if isinstance(state, torch.Tensor):
            data = state.numpy().tobytes()
            seed, left, _seeded, _next = _TORCH.unpack_from(data)
            words = np.frombuffer(data, dtype="<u8", count=WORDS, offset=_TORCH.size)
            return cls(words.astype(np.uint32), WORDS + 1 - left, seed)
        if isinstance(state[0], str):
            return cls(np.asarray(state[1]), state[2]) if state[0] == "MT19937" else None
        return cls(np.array(state[1][:-1], dtype=np.uint32), state[1][-1])

    def into(self, state: Any) -> Any:
        """The same as the state of the kind that is given."""
        if isinstance(state, torch.Tensor):
            found = bytearray(state.numpy().tobytes())
            seed, _left, seeded, _next = _TORCH.unpack_from(found)
            _TORCH.pack_into(found, 0, seed, WORDS + 1 - self.position, seeded, self.position)
            found[_TORCH.size : _TORCH.size + 8 * WORDS] = self.key.astype("<u8").tobytes()
            return torch.frombuffer(found, dtype=torch.uint8)
        if isinstance(state[0], str):
            return state[0], self.key, self.position, 0, 0.0
        return state[0], (*self.key.tolist(), self.position), None

    def same(self, other: Words) -> bool:
        """Whether the same numbers come of both."""
        return self.position == other.position and np.array_equal(self.key, other.key)

    def to(self, other: Words) -> int | None:
        """How many words lie between; None where the other one is not within `MOST_WORDS`."""
        if self.seed != other.seed:
            return None
        if np.array_equal(self.key, other.key) and other.position >= self.position:
            return other.position - self.position
        sought = _bits(Words(other.key, 0)).random_raw(WORDS)
        bits, count, blocks = _bits(Words(self.key, WORDS)), WORDS - self.position, 1
        while count < MOST_WORDS:
            found = bits.random_raw(blocks * WORDS).reshape(blocks, WORDS)
            for at in np.flatnonzero(found[:, 0] == sought[0]).tolist():
                if np.array_equal(found[at], sought):
                    return count + int(at) * WORDS + other.position
            count, blocks = count + blocks * WORDS, min(2 * blocks, 1024)
        return None

    def ahead(self, count: int) -> Words:
        """So many words on."""
        bits = _bits(self)
        bits.random_raw(count, output=False)
        state: Any = bits.state["state"]
        return Words(state["key"], state["pos"], self.seed)


def _bits(words: Words) -> np.random.MT19937:
    bits = np.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": words.key, "pos": words.position}}
    return bits


def _each(*generators: Generators) -> list[tuple[Any, ...]]:
    return [
        tuple(each.python for each in generators),
        tuple(each.numpy for each in generators),
        tuple(each.torch for each in generators),
    ]


def _same(one: Any, other: Any) -> bool:
    ours, theirs = Words.of(one), Words.of(other)
    return ours is not None and theirs is not None and ours.same(theirs)


def _follows(now: Any, here: Any, there: Any) -> Any:
    """One of the run's, after what was drawn of this process's.

    PyTorch's, set to the seed of the run, would give the order of its first epoch again: that is not obeyed.
    """
    if _same(here, there):
        return now
    at, was, run = Words.of(now), Words.of(here), Words.of(there)
    if at is None or was is None or run is None:
        return now
    count = was.to(at)
    if count is not None:
        return run.ahead(count).into(there) if count else there
    return there if at.seed is not None and at.seed == run.seed else now


def _moved(now: Any, there: Any, after: Any) -> Any:
    """One of this process's, after the loader has drawn from the run's."""
    if now is there:
        return after
    at, before, then = Words.of(now), Words.of(there), Words.of(after)
    if at is None or before is None or then is None:
        return now
    count = before.to(then)
    return at.ahead(count).into(now) if count else now
