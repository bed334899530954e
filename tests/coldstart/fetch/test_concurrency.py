"""Test how many requests a load keeps in flight, and what it says of the link."""

from __future__ import annotations

import math

import pytest

from tests.coldstart.scripted import feed
from upriver.coldstart.fetch.concurrency import ConcurrencySearch
from upriver.coldstart.link_cache import StoreLink


def said(bandwidth: float, *, requests: int = 1, most: int = 8, bound: float = math.inf) -> ConcurrencySearch:
    link = StoreLink(latency_s=0.03, bandwidth_bytes_per_s=bandwidth, requests=requests)
    return ConcurrencySearch(link, most=most, bound_bytes_per_s=bound)


def test_one_request_is_enough_for_a_link_that_it_fills() -> None:
    flow = said(1e8)
    feed(flow, lambda _: 0.97e8, seconds=2)
    assert flow.wanted == 1
    assert flow.link.bandwidth_bytes_per_s == pytest.approx(0.97e8)
    assert flow.link.latency_s == 0.02
    assert flow.link.hidden_bytes == pytest.approx(0.02 * 0.97e8)


@pytest.mark.parametrize(("fills", "wanted"), [(1, 1), (2, 2), (4, 4), (5, 8), (100, 8)])
def test_requests_are_added_as_long_as_that_brings_more(fills: int, wanted: int) -> None:
    flow = said(1e9)
    feed(flow, lambda under_way: 5e7 * min(under_way, fills), seconds=2)
    assert flow.wanted == wanted


@pytest.mark.parametrize(("requests", "begins"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (100, 5)])
def test_a_load_begins_with_half_of_those_that_the_last_one_ended_with(requests: int, begins: int) -> None:
    assert said(1e8, requests=requests, most=5).wanted == begins


def test_what_takes_several_is_found_sooner_each_time_and_forgotten_when_it_is_over() -> None:
    def loads(fills: int, requests: int) -> tuple[int, int]:
        """Return the request counts at the start and the end of a load of 0.25 s.

        ``fills`` requests fill the link.
        """
        flow = said(1e9, requests=requests)
        begins = flow.wanted
        feed(flow, lambda under_way: 5e7 * min(under_way, fills), seconds=0.25)
        assert flow.link.requests == flow.wanted
        return begins, flow.wanted

    found = [(0, 1)]
    for fills in (8, 8, 8, 8, 1, 1, 1, 1):
        found.append(loads(fills, found[-1][1]))
    assert found[1:] == [(1, 4), (2, 8), (4, 8), (4, 8), (4, 4), (2, 2), (1, 1), (1, 1)]


def test_a_load_that_tries_nothing_keeps_what_the_last_one_found() -> None:
    flow = said(1e9, requests=8)
    feed(flow, lambda _: 1e9, seconds=0.05)
    assert (flow.wanted, flow.link.requests) == (4, 8)
    assert flow.known


@pytest.mark.parametrize("bandwidth", [1e8, 9.5e7, 1e6])
def test_what_a_link_is_said_to_have_is_no_reason_not_to_try(bandwidth: float) -> None:
    flow = said(bandwidth)
    feed(flow, lambda under_way: 9.5e7 * min(under_way, 8), seconds=2)
    assert flow.wanted == 8


def test_a_bound_that_one_request_reaches_is_not_tried_with_more() -> None:
    flow, most = said(1e9, bound=5e7), 0
    for number in range(20):
        feed(flow, lambda _: 4.8e7, seconds=0.1, now_s=10.0 + number)
        most = max(most, flow.wanted)
    assert (most, flow.bounded) == (1, True)
    flow = said(1e9, bound=5e7)
    feed(flow, lambda _: 3e7, seconds=1)
    assert not flow.bounded
    assert not said(1e12).bounded


def test_there_are_never_more_than_allowed() -> None:
    for most in (1, 3):
        flow = said(1e12, most=most)
        feed(flow, lambda under_way: 5e7 * under_way, seconds=2)
        assert flow.wanted == most


def test_a_link_is_what_it_was_said_to_be_until_it_has_shown_itself() -> None:
    flow = said(1e8)
    assert flow.link == StoreLink(latency_s=0.03, bandwidth_bytes_per_s=1e8)
    flow.begun(1.0, 0.5)
    flow.came(1.04, 10**7)  # one burst
    assert flow.link == StoreLink(latency_s=0.5, bandwidth_bytes_per_s=1e8)
    flow.came(1.04, 10**7)
    assert flow.link == StoreLink(latency_s=0.5, bandwidth_bytes_per_s=pytest.approx(2e7 / 0.04))


def test_only_what_a_link_did_lately_counts() -> None:
    flow = said(1e8, most=1)
    now_s = feed(flow, lambda _: 1e7, seconds=5)
    feed(flow, lambda _: 4e7, seconds=4, now_s=now_s + 100)
    assert flow.link.bandwidth_bytes_per_s == pytest.approx(4e7, rel=0.01)
