"""Check how refusals are counted and logged."""

from __future__ import annotations

import pytest

from upriver.control.server_choice import MAX_REST_S
from upriver.errors import Overloaded, QuotaExceeded
from upriver.rpc.refusal_log import LOG_EVERY_S, RefusalLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


FULL = Overloaded("all of 8 connections are in use", retry_after_s=2)


def test_a_log_names_the_server_its_reason_and_how_long_it_is_to_be_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = RefusalLog()
    refusals.add("http://a", FULL)
    refusals.add("http://b", QuotaExceeded("", retry_after_s=0.5))
    refusals.add("http://c", Overloaded("http://c answered 503 Service\x1b[2J\nUnavailable"))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            "http://a refused a request, to be asked again after 2 s: all of 8 connections are in use",
        ),
        ("WARNING", "http://b refused a request, to be asked again after 0.5 s"),
        (
            "WARNING",
            "http://c refused a request, to be asked again after 1 s: answered 503 Service?[2J Unavailable",
        ),
    ]


def test_one_line_stands_for_all_that_a_server_refuses_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = RefusalLog(now=clock)
    for url in ("http://a", "http://a", "http://b", "http://a", "http://b"):
        refusals.add(url, FULL)
    clock.now += LOG_EVERY_S - 1
    refusals.add("http://a", FULL)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "http://a refused a request",
        "http://b refused a request",
    ]
    clock.now += 1
    for _ in range(2):
        refusals.add("http://a", FULL)
    assert [record.message.split(",")[0] for record in caplog.records[2:]] == ["http://a refused 4 requests"]
    assert refusals.remark.startswith("servers refused 8 requests so far (the last: http://a, ")


def test_a_remark_counts_all_and_quotes_the_last() -> None:
    refusals = RefusalLog()
    assert refusals.remark == ""
    refusals.add("http://a", FULL)
    assert refusals.remark == (
        "servers refused a request so far (the last: http://a, to be asked again after 2 s: all of 8 "
        "connections are in use): that work was asked for again, or done here"
    )
    refusals.add("http://b", Overloaded("full", retry_after_s=3))
    assert "2 requests so far (the last: http://b, to be asked again after 3 s: full)" in refusals.remark


def test_a_server_is_said_to_be_asked_again_when_it_is() -> None:
    """The message caps the pause that the server asks for, because no pause is that long."""
    refusals = RefusalLog()
    refusals.add("http://a", Overloaded("full", retry_after_s=3600))
    assert f"to be asked again after {MAX_REST_S:g} s: full" in refusals.remark
