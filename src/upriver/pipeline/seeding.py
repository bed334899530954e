"""Seed the randomness of a user's own code by the sample, not by the place or time of its making.

Such code draws from the generators that the whole process shares: Python's, NumPy's and PyTorch's. They are
set by (seed, epoch, sample, stage) before each call, so a sample's random numbers move with it.

`numpy.random` is imported here on purpose, as NumPy delays that import. A forked process that imports it may
fail if its parent had other threads (a KeyError in Python's import locks, seen with 3.11).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import random as numpy_random

from upriver.pipeline.draw import Draw
from upriver.program.graph.devices import generators_kept

_WORD = 2**32
_WORDS = "<u4"
"""Words in the form in which they are sent."""
NUMBER_OF_WORDS = 624
"""Words of a Mersenne Twister. NumPy (2.4) accepts a position beyond them, and draws from other memory."""


def seed_generators(draw: Draw) -> None:
    """Set the three generators of this process for one call.

    Generators of the code's own (``np.random.default_rng()``, a ``torch.Generator``) are not set, nor are
    those of accelerators.
    """
    key = draw.key()
    random.seed(key)
    numpy_random.seed([key >> shift & _WORD - 1 for shift in (0, 32, 64, 96)])
    torch.default_generator.manual_seed(key & 2**63 - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Generators:
    """States of the three generators of this process."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> Generators:
        """Return the current states."""
        return cls(random.getstate(), numpy_random.get_state(), torch.default_generator.get_state())

    def same(self, other: Generators) -> bool:
        """Return whether all states are equal."""
        return not self.moved_since(other)

    def moved_since(self, before: Generators) -> dict[str, Any]:
        """Return the states that differ, by name, as lists of numbers, words and bytes, and tensors."""
        found: dict[str, Any] = {}
        if self.python != before.python:
            version, words, gauss = self.python
            found["python"] = [version, np.array(words, dtype=_WORDS).tobytes(), gauss]
        (name, key, *ours), (_, old_key, *theirs) = self.numpy, before.numpy
        if ours != theirs or not np.array_equal(key, old_key):
            found["numpy"] = [name, key.astype(_WORDS).tobytes(), *ours]
        if not torch.equal(self.torch, before.torch):
            found["torch"] = self.torch
        return found

    @staticmethod
    def move(moved: dict[str, Any]) -> None:
        """Set this process's generators to the states of others that have moved.

        Raises:
            Exception: If it is not such a result.
        """
        if "python" in moved:
            version, words, gauss = moved["python"]
            random.setstate((version, tuple(np.frombuffer(words, dtype=_WORDS).tolist()), gauss))
        if "numpy" in moved:
            name, key, position, *rest = moved["numpy"]
            # NumPy does not check (2.3): beyond its words it would draw from other memory of this process.
            if type(position) is not int or not 0 <= position <= NUMBER_OF_WORDS:
                raise ValueError(
                    f"NumPy's generator stands at a word in 0..{NUMBER_OF_WORDS}, got {position!r:.80}"
                )
            numpy_random.set_state((name, np.frombuffer(key, dtype=_WORDS), position, *rest))
        if "torch" in moved:
            # A copy, as PyTorch reads from the start of a tensor's storage (2.13), whatever it holds.
            torch.default_generator.set_state(moved["torch"].clone())


@contextmanager
def apart() -> Iterator[None]:
    """Make samples inside the context as in a process of their own.

    The three generators continue afterwards as if nothing had been drawn. PyTorch computes with one thread,
    as in its own loader's processes: with more, some kernels give other low bits.
    """
    threads = torch.get_num_threads()
    with generators_kept():
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
