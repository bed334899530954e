"""Draw the order of further epochs after a loader has resumed from a state.

PyTorch's samplers draw from the generators that the whole process shares. In a resumed process these stand
where its script has set them, which is where the first epoch began, so its order would repeat. A resumed
loader therefore draws from a copy, which begins where the saved run's generators stood. That run's model drew
from the same generators (dropout), so the copy follows: it skips as many numbers as were drawn in this
process since. The shared generators advance as if the loader had drawn from them.

All three are Mersenne Twisters (Matsumoto, Nishimura: ACM TOMACS 8(1), 1998). The count of numbers between
two states is found by running one until it reaches the other. If the other state is out of reach, the script
has set the generator (`torch.manual_seed` for each epoch, `torch.set_rng_state` of a checkpoint), and the
loader follows the script.
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
"""Words in a generator's state, and the numbers drawn from it before the next state."""

MOST_WORDS = 2**25
"""Number of words searched for a state, which takes a tenth of a second."""

_TORCH = struct.Struct("<QiiQ")
"""Header: seed, numbers left, whether seeded, next number. The words follow, eight bytes each."""


class GeneratorState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shared generators as plain data.

    Attributes:
        python: State of Python's `random`, from `random.getstate`.
        numpy: State of NumPy, from `numpy.random.get_state`.
        shared: State of PyTorch's default generator, in hexadecimal digits.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    shared: str

    @classmethod
    def of(cls, generators: Generators) -> Self:
        """Convert the states of generators."""
        name, keys, position, has_gauss, gauss = generators.numpy
        return cls(
            python=generators.python,
            numpy=(str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
            shared=bytes(generators.torch.numpy()).hex(),
        )

    def generators(self) -> Generators:
        """Return the states in the form that sets the generators.

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


class OrderGenerators:
    """Generators that a loader draws its order from.

    Args:
        stood: The shared generators of the resumed run; None where no run is resumed, to draw from this
            process's.
    """

    def __init__(self, stood: GeneratorState | None = None) -> None:
        self._here = self._there = Generators.now() if stood is not None else None
        if stood is not None:
            self._there = stood.generators()
        self._fresh = True

    def stands(self) -> GeneratorState:
        """Return the generators that the order would be drawn from now."""
        now = Generators.now()
        return GeneratorState.of(now if self._there is None else self._followed(now))

    def begin(self) -> None:
        """Begin the first epoch; use generators directly that the script has set to the run's states."""
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
        """Return whether the order is drawn from a copy of the shared generators."""
        return self._there is not None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the order's generators inside the context."""
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
        """Return the run's generators, advanced by the numbers drawn in this process since."""
        assert self._here is not None and self._there is not None
        return Generators(*(_follows(*each) for each in _each(now, self._here, self._there)))


def set_generators(generators: Generators) -> None:
    """Set the shared generators of this process."""
    random.setstate(generators.python)
    numpy_random.set_state(generators.numpy)
    torch.default_generator.set_state(generators.torch)


class TwisterState(NamedTuple):
    """State of a Mersenne Twister.

    Attributes:
        key: Words, as uint32.
        position: Index of the next word; past the last one when all are used.
        seed: Seed in PyTorch's state; None for the other generators.
    """

    key: np.ndarray[Any, Any]
    position: int
    seed: int | None = None

    @classmethod
    def of(cls, state: Any) -> TwisterState | None:
        """Read the state of any of the three generators; None if it is of another kind, as NumPy's may be."""
        if isinstance(state, torch.Tensor):
            data = state.numpy().tobytes()
            seed, left, _seeded, _next = _TORCH.unpack_from(data)
            words = np.frombuffer(data, dtype="<u8", count=WORDS, offset=_TORCH.size)
            return cls(words.astype(np.uint32), WORDS + 1 - left, seed)
        if isinstance(state[0], str):
            return cls(np.asarray(state[1]), state[2]) if state[0] == "MT19937" else None
        return cls(np.array(state[1][:-1], dtype=np.uint32), state[1][-1])

    def into(self, state: Any) -> Any:
        """Return this state in the form of the given one."""
        if isinstance(state, torch.Tensor):
            found = bytearray(state.numpy().tobytes())
            seed, _left, seeded, _next = _TORCH.unpack_from(found)
            _TORCH.pack_into(found, 0, seed, WORDS + 1 - self.position, seeded, self.position)
            found[_TORCH.size : _TORCH.size + 8 * WORDS] = self.key.astype("<u8").tobytes()
            return torch.frombuffer(found, dtype=torch.uint8)
        if isinstance(state[0], str):
            return state[0], self.key, self.position, 0, 0.0
        return state[0], (*self.key.tolist(), self.position), None

    def same(self, other: TwisterState) -> bool:
        """Return whether both states give the same numbers."""
        return self.position == other.position and np.array_equal(self.key, other.key)

    def to(self, other: TwisterState) -> int | None:
        """Return the number of words up to the other state; None if it is not within `MOST_WORDS`."""
        if self.seed != other.seed:
            return None
        if np.array_equal(self.key, other.key) and other.position >= self.position:
            return other.position - self.position
        sought = _bits(TwisterState(other.key, 0)).random_raw(WORDS)
        bits, count, blocks = _bits(TwisterState(self.key, WORDS)), WORDS - self.position, 1
        while count < MOST_WORDS:
            found = bits.random_raw(blocks * WORDS).reshape(blocks, WORDS)
            for at in np.flatnonzero(found[:, 0] == sought[0]).tolist():
                if np.array_equal(found[at], sought):
                    return count + int(at) * WORDS + other.position
            count, blocks = count + blocks * WORDS, min(2 * blocks, 1024)
        return None

    def ahead(self, count: int) -> TwisterState:
        """Return the state after ``count`` words."""
        bits = _bits(self)
        bits.random_raw(count, output=False)
        state: Any = bits.state["state"]
        return TwisterState(state["key"], state["pos"], self.seed)


def _bits(words: TwisterState) -> np.random.MT19937:
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
    ours, theirs = TwisterState.of(one), TwisterState.of(other)
    return ours is not None and theirs is not None and ours.same(theirs)


def _follows(now: Any, here: Any, there: Any) -> Any:
    """Return one of the run's generators, advanced by the numbers drawn from this process's.

    A PyTorch generator set to the run's seed would repeat the order of the first epoch, so it is not
    followed.
    """
    if _same(here, there):
        return now
    at, was, run = TwisterState.of(now), TwisterState.of(here), TwisterState.of(there)
    if at is None or was is None or run is None:
        return now
    count = was.to(at)
    if count is not None:
        return run.ahead(count).into(there) if count else there
    return there if at.seed is not None and at.seed == run.seed else now


def _moved(now: Any, there: Any, after: Any) -> Any:
    """Return one of this process's generators, advanced by the numbers the loader drew from the run's."""
    if now is there:
        return after
    at, before, then = TwisterState.of(now), TwisterState.of(there), TwisterState.of(after)
    if at is None or before is None or then is None:
        return now
    count = before.to(then)
    return at.ahead(count).into(now) if count else now
