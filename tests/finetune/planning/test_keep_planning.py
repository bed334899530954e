"""Check how many stored rows an epoch reads: as many as servers would compute, and more where that pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning import cluster
from tests.policies.keeping import Question, one_stage, questions
from upriver.cost import CostModel, route_at
from upriver.finetune.planning.keep_planning import stored_share
from upriver.types import Route, Workload

SAMPLES = 1000


def share_of(
    routes: list[Route],
    *,
    bandwidth: float,
    compute_s: float,
    stored: float = 1.0,
    row_bytes: float = 1000.0,
) -> float:
    """Return the share of the rows that are read; samples of 10 kB are stored."""
    model = CostModel(
        one_stage(storage_s=1e-1, compute_s=compute_s, row_bytes=row_bytes),
        cluster(bandwidth),
        Workload(batch_size=10, num_samples=SAMPLES),
    )
    return stored_share(model, routes, cut=1, stored=stored)


def routes_of(local: float) -> list[Route]:
    profile = one_stage()
    both = [(profile.unsplit, local), (1, 1 - local)]
    return [route_at(profile, cut, share=share) for cut, share in both if share]


def test_all_rows_are_read_where_the_link_is_faster_than_this_machine() -> None:
    assert share_of(routes_of(1.0), bandwidth=1e6, compute_s=1.0) == pytest.approx(1.0, abs=0.01)


def test_no_row_is_read_over_a_link_that_is_slower_than_this_machine() -> None:
    assert share_of(routes_of(1.0), bandwidth=1e6, compute_s=1e-4, row_bytes=1e5) <= 0.02


def test_servers_read_what_they_would_compute() -> None:
    asked = share_of(routes_of(0.4), bandwidth=1e6, compute_s=1e-4, row_bytes=1e5)
    assert asked == pytest.approx(0.6, abs=0.02)


def test_no_more_rows_are_read_than_there_are() -> None:
    assert share_of(routes_of(0.0), bandwidth=1e6, compute_s=1.0, stored=0.25) == 0.25


@given(question=questions(), stored=st.floats(0, 1), here=st.floats(0, 1))
def test_share_lies_between_nothing_and_all(question: Question, stored: float, here: float) -> None:
    here = min(here, 1 - stored)
    share = stored_share(
        question.model, question.routes, cut=question.profile.freeze, stored=stored, here=here
    )
    assert 0 <= share <= stored + 1e-9
