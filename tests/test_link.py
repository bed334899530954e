"""Test what a window of transfers tells about a link."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.link import FIRST_PROBE, LEAST_PROBE, MOST_PROBE, ROUND_TRIPS, LinkWindow


def seen(link: LinkWindow, *sizes: float, rate: float = 1e6, rtt_s: float = 0.01) -> None:
    for size in sizes:
        link.saw(size, rtt_s + size / rate)


def test_round_trip_and_rate_are_told_apart() -> None:
    link = LinkWindow()
    assert (link.rtt_s, link.bandwidth_bytes_per_s) == (0.0, None)
    for _ in range(3):
        link.saw(1, 0.01)
    assert (link.rtt_s, link.bandwidth_bytes_per_s) == (0.01, None)
    seen(link, 4e3, 5e5, 2e4)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e6)


def test_a_transfer_says_whether_it_tells_a_rate() -> None:
    link = LinkWindow()
    assert link.saw(1e5, 0.1) and link.saw(1e5, 0.1, request=True)
    assert not any(link.saw(size, seconds) for size, seconds in ((1024, 0.1), (1e5, -0.1), (1e5, math.nan)))
    assert len(link._rates) == 2


def test_one_odd_transfer_moves_nothing() -> None:
    link = LinkWindow()
    link.saw(1, 0.01)
    seen(link, *[1e5] * 5)
    for seconds in (5.0, 0.0101):
        link.saw(1e5, seconds)
        assert link.unsettled
        assert link.bandwidth_bytes_per_s == pytest.approx(1e6)
        seen(link, 1e5)
        assert not link.unsettled
    link.saw(1, 3.0)
    link.saw(1, 0.01)
    assert link.rtt_s == pytest.approx(0.01)


@pytest.mark.parametrize("rate", [1e5, 1e7])
def test_two_in_a_row_are_believed(rate: float) -> None:
    link = LinkWindow(window=8)
    link.saw(1, 0.01)
    seen(link, *[1e5] * 8)
    seen(link, 1e5, rate=rate)
    assert link.unsettled and link.bandwidth_bytes_per_s == pytest.approx(1e6)
    seen(link, 1e5, rate=rate)
    assert not link.unsettled and link.bandwidth_bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize(("before", "after"), [(0.005, 0.105), (0.105, 0.005)])
def test_a_round_trip_of_another_length_is_none_of_the_rate(before: float, after: float) -> None:
    link = LinkWindow()
    for _ in range(ROUND_TRIPS):
        link.saw(1, before)
    seen(link, *[2e5] * 8, rate=8e6, rtt_s=before)
    seen(link, 2e5, rate=8e6, rtt_s=after)
    assert link.unsettled, "until its round trip is known it may be the rate"
    for _ in range(ROUND_TRIPS):
        link.saw(1, after)
    assert link.rtt_s == after
    assert link.bandwidth_bytes_per_s == pytest.approx(8e6), "those before it were not quicker or slower"
    for _ in range(20):
        seen(link, 2e5, rate=8e6, rtt_s=after)
        assert not link.unsettled
        assert link.bandwidth_bytes_per_s == pytest.approx(8e6)


def test_jitter_is_no_change() -> None:
    link, rng = LinkWindow(), random.Random(0)
    link.saw(1, 0.01)
    for _ in range(100):
        link.saw(1e5, 0.01 + 1e5 / (1e6 * rng.uniform(0.85, 1.15)))
        assert not link.unsettled
    assert link.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.15)


def test_probes_are_as_large_as_requests_and_no_burden() -> None:
    link = LinkWindow()
    assert link.probe_bytes(5.0) == LEAST_PROBE, "whatever the link is"
    seen(link, LEAST_PROBE)
    assert link.probe_bytes(5.0) == FIRST_PROBE
    for size, wanted in ((2e3, LEAST_PROBE), (2e5, 200_000), (1e8, MOST_PROBE)):
        link = LinkWindow()
        link.saw(1, 0.001)
        link.saw(size, 0.001 + size / 1e8, request=True)
        assert link.probe_bytes(5.0) == wanted
    link = LinkWindow()
    link.saw(2e5, 2e5 / 1e5, request=True)
    assert link.probe_bytes(5.0) == pytest.approx(0.1 * 5.0 * 1e5)


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -1.0, 1e-9, 1e-6, 1.0, 1e300, math.nan, math.inf, -math.inf]),
)


@given(transfers=st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=30), window=st.integers(1, 9))
def test_no_bandwidth_is_ever_anything_but_a_number_above_0(
    transfers: list[tuple[float, float, bool]], window: int
) -> None:
    link = LinkWindow(window)
    for num_bytes, seconds, request in transfers:
        link.saw(num_bytes, seconds, request=request)
        bandwidth = link.bandwidth_bytes_per_s
        assert bandwidth is None or 0 < bandwidth <= 1e15
        assert 0 <= link.rtt_s < math.inf
        assert LEAST_PROBE <= link.probe_bytes(5.0) <= MOST_PROBE
