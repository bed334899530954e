"""Compute the seconds from process start as if each process had the usual import time.

Before its loader begins, a process imports PyTorch and the model's library: half of the time to an answer, or
more. All processes import the same code, except for the modules of their way. Other load on the machine makes
the imports a tenth longer or shorter from one process to the next, which is more than the 3 % in question. So
each import time is replaced by the usual one of its turn, whose processes run soon after one another, plus
the usual addition of its way, over all turns of all models of a library. Both come from the median polish of
two-way tables (Tukey, Exploratory Data Analysis, 1977). All later times stay as measured.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.cold_start.found import Found
from benchmarks.cold_start.models import MODELS
from benchmarks.cold_start.settings import OURS, STREAMED, way_of

Key = TypeVar("Key", bound=Hashable)

ROUNDS = 20
"""Rounds of the polish, which converges long before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imports:
    """Import times of a library's models.

    Attributes:
        turns: Number of examined turns of all settings.
        usual_s: Seconds that upriver's own imports take, the median of all turns.
        extra_s: Usual additional seconds of other kinds of process, by `kind_of`.
        off_s: Median distance of a process from its usual import time.
    """

    turns: int
    usual_s: float
    extra_s: Mapping[str, float]
    off_s: float


def even_imports(found: Sequence[Found]) -> dict[str, Imports]:
    """Add to all correct runs their time with usual imports.

    Args:
        found: All settings; see `Found.even`.

    Returns:
        The usual import times, by library.
    """
    of_library: dict[str, list[Found]] = defaultdict(list)
    for each in found:
        of_library[MODELS[each.setting.model].library].append(each)
    return {library: imports for library, some in of_library.items() if (imports := _even(some)) is not None}


def _even(found: Iterable[Found]) -> Imports | None:
    seen = {
        (each, number, run): row["imported_s"]
        for each in found
        for run, rows in each.turns.items()
        for number, row in rows.items()
        if row.get("equal")
    }
    if not seen:
        return None
    in_turn, extra = polished(
        ((each, number), kind_of(run), seconds) for (each, number, run), seconds in seen.items()
    )
    ours = extra.get(OURS, 0.0)
    usual: dict[Found, dict[tuple[int, str], float]] = defaultdict(dict)
    for each, number, run in seen:
        usual[each][number, run] = in_turn[each, number] + extra[kind_of(run)]
    for each, imports in usual.items():
        each.even(imports)
    return Imports(
        turns=len(in_turn),
        usual_s=statistics.median(in_turn.values()) + ours,
        extra_s={kind: seconds - ours for kind, seconds in extra.items() if kind != OURS},
        off_s=statistics.median(
            abs(seconds - usual[each][number, run]) for (each, number, run), seconds in seen.items()
        ),
    )


def kind_of(run: str) -> str:
    """Return the kind of a process by its imports. All ways of upriver's loader import the same modules."""
    return OURS if way_of(run) in STREAMED else run


def polished(
    table: Iterable[tuple[Hashable, str, float]],
) -> tuple[dict[Hashable, float], dict[str, float]]:
    """Return the terms of each row and each column, whose sums approximate the values.

    Args:
        table: Rows, columns and values. A row may lack columns, and may have several values in one.
    """
    cells = list(table)
    of_row, of_column = dict[Hashable, float](), {column: 0.0 for _, column, _ in cells}
    for _ in range(ROUNDS):
        of_row = _medians((row, value - of_column[column]) for row, column, value in cells)
        of_column = _medians((column, value - of_row[row]) for row, column, value in cells)
    return of_row, of_column


def _medians(values: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    kept: dict[Key, list[float]] = defaultdict(list)
    for key, value in values:
        kept[key].append(value)
    return {key: statistics.median(each) for key, each in kept.items()}
