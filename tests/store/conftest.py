"""What tests of several ways to read have in common."""

from __future__ import annotations

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read by obstore."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("obstore was asked")

    monkeypatch.setattr("upriver.store.store.obstore.get_async", never)
