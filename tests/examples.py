"""Numbers of examples for properties, by tier: ``make test`` tries each on a few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

FEW = 10
"""Examples of a property in ``make test``, by the profile ``quick``."""


def examples(count: int) -> int:
    """Return how many examples a property gets that would have `count`; a fifth of them in ``make test``."""
    return count if settings().max_examples > FEW else max(2, count // 5)


def seeds(count: int) -> list[Any]:
    """Return the seeds of `count` cases, of which ``make test`` runs a tenth."""
    return [
        seed if seed < max(4, count // 10) else pytest.param(seed, marks=pytest.mark.full)
        for seed in range(count)
    ]


def often(names: Iterable[str], *kept: str) -> list[Any]:
    """Return the names as parameters, of which ``make test`` runs those that are kept."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.full) for name in names]


def some(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters, of which ``make test`` runs the first `count`.

    A case that is a plain tuple has a value for each argument.
    """
    found = []
    for number, case in enumerate(cases):
        values = case if type(case) is tuple else (case,)
        each = case if isinstance(case, ParameterSet) else pytest.param(*values)
        marks = each.marks if number < count else [*each.marks, pytest.mark.full]
        found.append(pytest.param(*each.values, marks=marks, id=each.id))
    return found
