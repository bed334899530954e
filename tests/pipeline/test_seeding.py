"""Generators that go on elsewhere."""

from __future__ import annotations

import torch

from upriver.pipeline.seeding import Generators, generators_kept


def test_a_state_that_lies_behind_others_in_memory_is_taken_as_it_is() -> None:
    """As it came with the rest of a task: PyTorch takes what lies before it, or ends the process."""
    with generators_kept():
        torch.manual_seed(1)
        states = []
        for _ in range(2):
            torch.rand(3)
            states.append(torch.default_generator.get_state())
        expected = torch.rand(5)
        Generators.move({"torch": torch.stack(states)[1]})
        assert torch.equal(torch.rand(5), expected)
