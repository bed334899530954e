"""Randomness of a user's own code, tied to the sample and not to where or when it is made.

Code that nobody declared draws from the generators that everybody shares: Python's, NumPy's and PyTorch's.
They are set by (seed, epoch, sample, stage) before each call, so that the numbers a sample sees move with it.

NumPy's is imported here and now: NumPy puts that off, and a forked process may fail that does it while its
parent had other threads (a KeyError in Python's import locks, seen with 3.11).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from numpy import random as numpy_random

from upriver.pipeline.draw import Draw

_WORD = 2**32


def seed_generators(draw: Draw) -> None:
    """Set the three generators of this process to what belongs to one call.

    A generator that the code keeps for itself (``np.random.default_rng()``, a ``torch.Generator``) is not
    reached, nor are those of accelerators.
    """
    key = draw.key()
    random.seed(key)
    numpy_random.seed([key >> shift & _WORD - 1 for shift in (0, 32, 64, 96)])
    torch.default_generator.manual_seed(key & 2**63 - 1)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn inside, the three generators go on afterwards as if nothing had been."""
    ours, numpy, torchs = random.getstate(), numpy_random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        numpy_random.set_state(numpy)
        torch.default_generator.set_state(torchs)


@contextmanager
def apart() -> Iterator[None]:
    """Samples are made inside as in a process of their own.

    Whatever is drawn, the three generators go on afterwards as if nothing had been; and PyTorch computes with
    one thread, as in its own loader's processes: with more, some kernels give other low bits.
    """
    threads = torch.get_num_threads()
    with generators_kept():
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
