"""Check generators that are restored elsewhere."""

from __future__ import annotations

import pytest
import torch
from numpy import random as numpy_random

from upriver.pipeline.seeding import Generators, generators_kept


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
        Generators.move({"numpy": [name, words, 624, *rest]})
        here = Generators.now()
        with pytest.raises(ValueError, match=r"0\.\.624"):
            Generators.move({"numpy": [name, words, position, *rest]})
        assert Generators.now().same(here)
