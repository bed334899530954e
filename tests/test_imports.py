"""Check that the garbage collector is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from upriver.imports import uncollected


@pytest.fixture
def as_it_was() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_within_and_what_came_in_is_left_alone(
    enabled: bool, fails: bool, as_it_was: None
) -> None:
    frozen = gc.get_freeze_count()
    if not enabled:
        gc.disable()
    with suppress(ImportError), uncollected():
        assert not gc.isenabled()
        if fails:
            raise ImportError("no such module")
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() > frozen
