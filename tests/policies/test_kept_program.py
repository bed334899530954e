"""Check the program of kept rows against another solver, which is given every life that the rules allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.policies.keeping import FullLife, FullProgram, Question, full_lives, full_program, questions
from upriver.cost import Array
from upriver.policies._kept.costs import OPEN, Life, SourceCosts
from upriver.policies._kept.program import _running_argmin
from upriver.policies._kept.rounding import whole_counts, whole_lives
from upriver.policies._kept.search import KeptSearch


def searched(question: Question) -> KeptSearch:
    return KeptSearch(question.model, question.keeping, question.routes, question.epochs, None)


def solved(search: KeptSearch, views: int, *, most: bool = False) -> dict[Life, float]:
    cuts, places = tuple(search.fitting), tuple(search.readable)
    return search.solve(views, search.scope(views, first=cuts, later=cuts, places=places, most=most))


def total_s(shares: dict[Life, float], search: KeptSearch, views: int) -> float:
    costs, at = search.costs, len(search.costs.cuts)
    first, later = np.zeros(len(costs.busy)), np.zeros(len(costs.busy))
    for life, share in shares.items():
        first += share * costs.busy[:, life[0]] if life[0] != OPEN else 0.0
        later += share * costs.busy[:, life[1]] if life[1] != OPEN else 0.0
        first += share * costs.write_busy[:, life[1] - at] if costs.writes(life) else 0.0
    firsts, laters = search._periods(views)
    return float(firsts * first.max() + laters * later.max())


def least_s(program: FullProgram, periods: tuple[int, int]) -> float:
    """Return the least sum of busiest resources, by another solver."""
    resources, lives = program.first.shape
    used = np.isfinite(program.limits)
    limits = np.maximum(program.limits[used], 1.0)
    scale = max(program.first.max(), program.later.max(), 1e-300)
    blank, ones = np.zeros((resources, 1)), np.ones((resources, 1))
    found = linprog(
        [*np.zeros(lives), *periods],
        A_ub=np.vstack(
            (
                np.hstack((program.first / scale, -ones, blank)),
                np.hstack((program.later / scale, blank, -ones)),
                np.hstack((program.limited[used] / limits[:, np.newaxis], np.zeros((used.sum(), 2)))),
            )
        ),
        b_ub=[*np.zeros(2 * resources), *(program.limits[used] / limits)],
        A_eq=[[*np.ones(lives), 0.0, 0.0]],
        b_eq=[1.0],
    )
    assert found.success
    return float(found.fun * scale)


def allowed(search: KeptSearch, life: FullLife) -> bool:
    """Return whether the search considers the places of a life at all."""
    at = len(search.costs.cuts)
    return all(
        source in search.fitting if source < at else source - at in search.readable
        for source in (life.first, life.later)
    )


@given(question=questions())
def test_program_of_any_question_is_as_short_as_another_solvers(question: Question) -> None:
    search = searched(question)
    for views in search.groups:
        lives = [life for life in full_lives(question, views) if allowed(search, life)]
        best_s = least_s(full_program(question, lives), search._periods(views))
        found_s = total_s(solved(search, views), search, views)
        assert found_s == pytest.approx(best_s, rel=1e-5, abs=1e-6 * search.best_s)


@given(question=questions())
def test_shares_of_lives_keep_the_limits_and_are_few(question: Question) -> None:
    search = searched(question)
    for views in search.groups:
        shares = solved(search, views)
        for half in (0, 1):
            share = sum(share for life, share in shares.items() if life[half] != OPEN)
            assert share == pytest.approx(1, abs=1e-6)
        resources, known = len(search.costs.busy), np.count_nonzero(search.costs.there)
        # A row each for both sums, the open halves, and the time of the second search; a time is no life.
        assert len(shares) <= 2 * resources + 4 + known + len(question.keeping.tiers) - 2


@given(question=questions())
def test_rounded_lives_hold_whole_samples_within_every_limit(question: Question) -> None:
    search = searched(question)
    costs, at = search.costs, len(search.costs.cuts)
    for views in search.groups:
        counts = whole_lives(solved(search, views), costs, (search.fitting[0], search.fitting[0]))
        for half in (0, 1):
            assert sum(count for life, count in counts.items() if life[half] != OPEN) == costs.num_samples
        assert sum(count for life, count in counts.items() if max(life) >= at) <= costs.num_samples
        for place, share in enumerate(costs.there):
            assert known_reads(counts, costs, at + place) <= share * costs.num_samples + 1e-6
        for tier, room in question.keeping.tiers.items():
            held = {
                (life, place): count * float(costs.sample_bytes[place - at])
                for life, count in counts.items()
                for place in set(life)
                if place >= at and costs.places[place - at][1] is tier
            }
            assert sum(held.values()) <= room.budget_bytes


def known_reads(counts: dict[Life, int], costs: SourceCosts, source: int) -> int:
    return sum(
        count
        for life, count in counts.items()
        if life[0] == source or (life[1] == source and not costs.writes(life))
    )


@given(shares=st.lists(st.integers(0, 50), min_size=1, max_size=6), total=st.integers(0, 1000))
def test_whole_counts_sum_to_the_total_and_are_within_one(shares: list[int], total: int) -> None:
    assume(sum(shares) > 0)
    counts = whole_counts(dict(enumerate(map(float, shares))), total)
    assert sum(counts.values()) == total
    for key, count in counts.items():
        assert abs(count - shares[key] / sum(shares) * total) < 1 + 1e-5


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_running_argmin_is_the_first_least_value_so_far(values: list[int]) -> None:
    array: Array = np.array(values, dtype=float)
    assert _running_argmin(array).tolist() == [int(array[: end + 1].argmin()) for end in range(len(array))]
