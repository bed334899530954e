"""Test the bound on what a tenant stores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import StorageFull
from upriver.server.programs.quota import check_stored
from upriver.server.tenants import ANYONE, Tenant

SIZES = st.integers(0, 50)


@given(
    stored=SIZES, coming=SIZES, more=SIZES, own=st.none() | st.integers(1, 100), default=st.integers(1, 100)
)
def test_more_is_refused_if_and_only_if_the_limit_would_be_exceeded(
    stored: int, coming: int, more: int, own: int | None, default: int
) -> None:
    limit = default if own is None else own
    refused = False
    try:
        check_stored(Tenant(name="alice", stored_bytes=own), stored, coming, more, default=default)
    except StorageFull:
        refused = True
    assert refused == (more > 0 and stored + coming + more > limit)


@pytest.mark.parametrize(
    ("coming", "named", "said"),
    [
        (0, {}, "has stored 60 kB; this program takes 50 kB more: the operator"),
        (
            7_000,
            {},
            "has stored 60 kB, 7 kB more are on their way; this program takes 50 kB more: the operator",
        ),
        (0, {"what": "these features"}, "has stored 60 kB; these features take 50 kB more: the operator"),
    ],
)
def test_the_error_names_the_limit_and_all_that_counts(coming: int, named: dict[str, str], said: str) -> None:
    with pytest.raises(StorageFull) as raised:
        check_stored(Tenant(name="alice"), 60_000, coming, 50_000, default=100_000, **named)
    assert str(raised.value) == (
        f"tenant 'alice' may store 100 kB (stored_bytes) and {said} can remove what is unused (upriver gc), "
        "or raise stored_bytes"
    )


def test_the_error_names_no_tenant_where_there_is_none() -> None:
    with pytest.raises(StorageFull, match=r"^everyone together may store 1 kB \(stored_bytes\)"):
        check_stored(ANYONE, 900, 0, 200, default=1000)
