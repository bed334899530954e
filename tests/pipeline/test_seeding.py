"""Check generators that are restored elsewhere."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
import torch
from numpy import random as numpy_random

from upriver.pipeline import Draw
from upriver.pipeline.draw import _PERSON
from upriver.pipeline.seeding import Generators, apart, generators_kept, seed_generators


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (1, 2, 3, 4), (-1, 7, 2**62, 1)])
def test_seed_generators_sets_all_three_by_a_hash_of_seed_epoch_sample_and_stage(
    numbers: tuple[int, int, int, int],
) -> None:
    """Pin the draws of a user's code: a sample must have the same ones in every version."""
    seed, epoch, sample, stage = numbers
    hashed = hashlib.blake2b(struct.pack("<4q", *numbers), digest_size=16, person=_PERSON).digest()
    whole = int.from_bytes(hashed, "little")
    with generators_kept():
        seed_generators(Draw(seed=seed, epoch=epoch, sample=sample, stage=stage))
        assert random.random() == random.Random(whole).random()
        words = np.frombuffer(hashed, "<u4").tolist()
        assert numpy_random.random() == numpy_random.RandomState(words).random()
        expected = torch.Generator().manual_seed(whole & 2**63 - 1)
        assert torch.equal(torch.rand(5), torch.rand(5, generator=expected))


def test_apart_computes_with_one_thread_and_draws_nothing_from_outside() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = Generators.now()
        with apart():
            assert torch.get_num_threads() == 1
            torch.rand(3)
            random.random()
            numpy_random.random()
        assert torch.get_num_threads() == 2
        assert Generators.now().same(before)
        with pytest.raises(KeyError), apart():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_state_that_lies_behind_others_in_memory_is_taken_as_it_is() -> None:
    """A state sent within a task is such a tensor: torch reads the bytes before it, or aborts the process."""
    with generators_kept():
        torch.manual_seed(1)
        states = []
        for _ in range(2):
            torch.rand(3)
            states.append(torch.default_generator.get_state())
        expected = torch.rand(5)
        Generators.move({"torch": torch.stack(states)[1]})
        assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize("position", [625, 700, 2**30, -1, -(2**30), True, 3.0, None])
def test_a_generator_that_stands_beyond_its_words_is_refused(position: object) -> None:
    """NumPy accepts such a state, and then draws from arbitrary memory."""
    with generators_kept():
        before = Generators.now()
        numpy_random.rand()
        name, words, _, *rest = Generators.now().moved_since(before)["numpy"]
        for allowed in (0, 624):
            Generators.move({"numpy": [name, words, allowed, *rest]})
        here = Generators.now()
        with pytest.raises(ValueError, match=r"0\.\.624"):
            Generators.move({"numpy": [name, words, position, *rest]})
        assert Generators.now().same(here)
