"""Check how many runs fit into the measuring budget, and how long its parts took."""

from __future__ import annotations

import pytest

from upriver.finetune.calibration import time_budget
from upriver.finetune.calibration.time_budget import Stopwatch, affordable_repeats, allowed_s


def test_three_hundredths_of_ten_epochs_may_go_into_measuring() -> None:
    assert allowed_s(100.0) == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("allowed", "repeats"),
    # 2 s once, 3 s a turn, one turn to warm up
    [
        (100.0, 5),
        (20.0, 5),
        (19.9, 4),
        (17.0, 4),
        (16.9, 3),
        (11.0, 2),
        (10.9, None),
        (0.0, None),
        (-5, None),
    ],
)
def test_as_many_runs_as_fit_and_at_least_two(allowed: float, repeats: int | None) -> None:
    assert affordable_repeats(allowed, once_s=2.0, turn_s=3.0) == repeats


@pytest.mark.parametrize(("allowed", "repeats"), [(2.1, 5), (2.0, None), (1.0, None)])
def test_runs_that_take_no_time_still_need_what_comes_before_them(
    allowed: float, repeats: int | None
) -> None:
    assert affordable_repeats(allowed, once_s=2.0, turn_s=0.0) == repeats


def test_of_nested_parts_each_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time_budget.time, "perf_counter", lambda: now)
    clock = Stopwatch()
    for _ in range(2):
        with clock.part("outer"):
            now += 1
            with clock.part("inner"):
                now += 10
            now += 100
    with pytest.raises(KeyError), clock.part("failed"):
        now += 1000
        raise KeyError
    assert clock.seconds == {"inner": 20, "outer": 202, "failed": 1000}
