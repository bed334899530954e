"""Test which bodies may come in."""

from __future__ import annotations

import pytest

from upriver.control.body_memory import BodyMemory, IncomingBodyMemory
from upriver.control.memory_budget import MemoryBudget
from upriver.errors import Overloaded


def test_bodies_leave_half_of_the_memory_to_what_computes() -> None:
    budget = MemoryBudget(100 * IncomingBodyMemory.STEP_BYTES)
    asked: list[int] = []
    bodies = BodyMemory(budget, asked.append)
    first, second = IncomingBodyMemory(bodies, "anyone"), IncomingBodyMemory(bodies, "anyone")
    first.room(40 * IncomingBodyMemory.STEP_BYTES)
    second.room(1)
    second.room(10 * IncomingBodyMemory.STEP_BYTES)
    with pytest.raises(Overloaded):
        second.room(10 * IncomingBodyMemory.STEP_BYTES + 1)
    assert budget.reserved_bytes == sum(asked) == 50 * IncomingBodyMemory.STEP_BYTES
    first.release()
    first.release()
    second.room(90 * IncomingBodyMemory.STEP_BYTES)  # no other request's bytes are here
    second.release()
    assert budget.reserved_bytes == 0
