"""Share fixtures among tests of several ways to read."""

from __future__ import annotations

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep obstore from reading anything."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("obstore was asked")

    monkeypatch.setattr("upriver.store.store.obstore.get_async", never)
