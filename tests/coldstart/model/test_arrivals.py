"""Check what arrivals tell of a load, and when they let those go on who wait."""

from __future__ import annotations

import threading
import time

import pytest

from upriver.coldstart.model.arrivals import Arrivals
from upriver.errors import StoreError


def test_arrivals_count_each_tensor_once_until_all_are_here() -> None:
    arrivals = Arrivals(2)
    assert arrivals.here([]) and not arrivals.here([0])
    arrivals.filled(0)
    arrivals.filled(0)
    assert arrivals.here([0]) and not arrivals.here([0, 1])
    assert (arrivals.over, arrivals.complete) == (False, False)
    arrivals.filled(1)
    assert arrivals.here([0, 1])
    assert (arrivals.over, arrivals.complete) == (True, True)
    arrivals.wait_for_all()
    assert not arrivals.failed(StoreError("late")) and arrivals.error is None


def test_after_an_error_nothing_arrives_and_each_who_asks_gets_a_copy() -> None:
    arrivals, error = Arrivals(2), StoreError("gone")
    arrivals.filled(0)
    assert arrivals.failed(error) and not arrivals.failed(StoreError("again"))
    arrivals.filled(1)
    assert (arrivals.over, arrivals.complete) == (True, False)
    assert (
        type(arrivals.error) is StoreError and arrivals.error is not error and str(arrivals.error) == "gone"
    )
    for ask in (arrivals.check, arrivals.wait_for_all, lambda: arrivals.here([0])):
        with pytest.raises(StoreError, match="gone") as caught:
            ask()
        assert caught.value is not error


def test_who_waits_hurries_what_is_missing_and_goes_on_when_it_is_here() -> None:
    arrivals, hurried = Arrivals(3), list[int]()
    arrivals.filled(0)
    assert arrivals.wait([0], hurried.append) and hurried == []
    assert not arrivals.wait([0, 1], hurried.append, timeout_s=0.001) and hurried == [1]
    found: list[bool] = []
    waiting = threading.Thread(
        target=lambda: found.append(arrivals.wait([1, 2], hurried.append)), daemon=True
    )
    waiting.start()
    while len(hurried) < 3:
        time.sleep(0.001)
    for index in (1, 2):
        assert not found
        arrivals.filled(index)
    waiting.join(60)
    assert found == [True] and hurried == [1, 1, 2]
