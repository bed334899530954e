"""Test what the transfers over a link tell about its bandwidth and latency."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.link import FIRST_PROBE, LEAST_PROBE, MOST_PROBE, PROBE_SHARE, ROUND_TRIPS, LinkEstimator

# ------------------------------------------------------------------------------------ whole transfers


def seen(link: LinkEstimator, *sizes: float, rate: float = 1e6, rtt_s: float = 0.01) -> None:
    for size in sizes:
        link.add_transfer(size, rtt_s + size / rate)


def test_round_trip_and_rate_are_told_apart() -> None:
    link = LinkEstimator.of_requests()
    assert (link.latency_s, link.bandwidth()) == (None, None)
    for _ in range(3):
        link.add_transfer(1, 0.01)
    assert (link.latency_s, link.bandwidth()) == (0.01, None)
    seen(link, 4e3, 5e5, 2e4)
    assert link.bandwidth() == pytest.approx(1e6)


def test_a_transfer_says_whether_it_tells_a_rate() -> None:
    link = LinkEstimator.of_requests()
    assert link.add_transfer(1e5, 0.1) and link.add_transfer(1e5, 0.1, request=True)
    ignored = ((1024, 0.1), (1e5, -0.1), (1e5, math.nan))
    assert not any(link.add_transfer(size, seconds) for size, seconds in ignored)
    assert len(link._samples) == 2


def test_one_odd_transfer_moves_nothing() -> None:
    link = LinkEstimator.of_requests()
    link.add_transfer(1, 0.01)
    seen(link, *[1e5] * 5)
    for seconds in (5.0, 0.0101):
        link.add_transfer(1e5, seconds)
        assert link.newest != pytest.approx(1e6, rel=0.5)
        assert link.bandwidth() == pytest.approx(1e6)
        seen(link, 1e5)
        assert link.newest == pytest.approx(1e6)
    link.add_transfer(1, 3.0)
    link.add_transfer(1, 0.01)
    assert link.latency_s == pytest.approx(0.01)


def test_one_transfer_counts_alone_where_the_caller_says_so() -> None:
    link = LinkEstimator.of_requests()
    link.restart()
    assert link.newest is None and link.bandwidth() is None
    seen(link, *[1e5] * 8)
    seen(link, 1e5, rate=0.8e6)
    link.restart()
    assert link.newest == link.bandwidth() == pytest.approx(0.8e6, rel=0.15)
    assert link.latency_s is None


@pytest.mark.parametrize("rate", [1e5, 1e7])
def test_two_in_a_row_are_believed(rate: float) -> None:
    link = LinkEstimator.of_requests(8)
    link.add_transfer(1, 0.01)
    seen(link, *[1e5] * 8)
    seen(link, 1e5, rate=rate)
    assert link.newest == pytest.approx(rate) and link.bandwidth() == pytest.approx(1e6)
    seen(link, 1e5, rate=rate)
    assert link.bandwidth() == pytest.approx(rate)


@pytest.mark.parametrize(("before", "after"), [(0.005, 0.105), (0.105, 0.005)])
def test_a_round_trip_of_another_length_is_none_of_the_rate(before: float, after: float) -> None:
    link = LinkEstimator.of_requests()
    for _ in range(ROUND_TRIPS):
        link.add_transfer(1, before)
    seen(link, *[2e5] * 8, rate=8e6, rtt_s=before)
    seen(link, 2e5, rate=8e6, rtt_s=after)
    assert link.newest != pytest.approx(8e6, rel=0.5), "until its round trip is known it may be the rate"
    for _ in range(ROUND_TRIPS):
        link.add_transfer(1, after)
    assert link.latency_s == after
    assert link.bandwidth() == pytest.approx(8e6), "those before it were not quicker or slower"
    for _ in range(20):
        seen(link, 2e5, rate=8e6, rtt_s=after)
        assert link.newest == pytest.approx(8e6) == pytest.approx(link.bandwidth())


def test_jitter_is_no_change() -> None:
    link, rng = LinkEstimator.of_requests(), random.Random(0)
    link.add_transfer(1, 0.01)
    for _ in range(100):
        link.add_transfer(1e5, 0.01 + 1e5 / (1e6 * rng.uniform(0.85, 1.15)))
        assert link.bandwidth() == pytest.approx(1e6, rel=0.15)


def test_probes_are_as_large_as_requests_and_no_burden() -> None:
    link = LinkEstimator.of_requests()
    assert link.probe_bytes(5.0) == LEAST_PROBE, "whatever the link is"
    seen(link, LEAST_PROBE, rate=1e8, rtt_s=0.0)
    assert link.probe_bytes(5.0) == FIRST_PROBE
    for size, wanted in ((2e3, LEAST_PROBE), (2e5, 200_000), (1e8, MOST_PROBE)):
        link = LinkEstimator.of_requests()
        link.add_transfer(1, 0.001)
        link.add_transfer(size, 0.001 + size / 1e8, request=True)
        assert link.probe_bytes(5.0) == wanted
    link = LinkEstimator.of_requests()
    link.add_transfer(2e5, 2e5 / 1e5, request=True)
    assert link.probe_bytes(5.0) == pytest.approx(PROBE_SHARE * 5.0 * 1e5)


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -1.0, 1e-9, 1e-6, 1.0, 1e300, math.nan, math.inf, -math.inf]),
)


TRANSFERS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=30)


@given(transfers=TRANSFERS, window=st.integers(1, 9))
def test_no_bandwidth_is_ever_anything_but_a_number_above_0(
    transfers: list[tuple[float, float, bool]], window: int
) -> None:
    link = LinkEstimator.of_requests(window)
    for num_bytes, seconds, request in transfers:
        link.add_transfer(num_bytes, seconds, request=request)
        bandwidth = link.bandwidth()
        assert bandwidth is None or 0 < bandwidth <= 1e15
        assert link.latency_s is None or 0 < link.latency_s < math.inf
        assert LEAST_PROBE <= link.probe_bytes(5.0) <= MOST_PROBE


# ---------------------------------------------------------------------------- overlapping transfers


class Stream:
    """A link that a test uses for so many seconds at such a rate."""

    def __init__(self) -> None:
        self.link, self.now_s = LinkEstimator(), 1000.0

    def carry(self, bytes_per_s: float, seconds: float = 1.0) -> float:
        """Carry one transfer, in pieces of 50 ms."""
        self.link.begin(self.now_s)
        for _ in range(round(seconds * 20)):
            self.now_s += 0.05
            self.link.arrive(round(bytes_per_s / 20), self.now_s)
        self.link.end(self.now_s)
        observed = self.link.bandwidth(self.now_s)
        assert observed is not None
        return observed


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_bandwidth_is_over_busy_time_alone(stream: Stream) -> None:
    assert stream.link.bandwidth(stream.now_s) is None
    for _ in range(6):
        observed = stream.carry(4e6, 0.1)
        stream.now_s += 0.1  # the server computes: the link is not the cause
    assert observed == pytest.approx(4e6)


def test_overlapping_transfers_count_once(stream: Stream) -> None:
    for _ in range(3):
        stream.link.begin(stream.now_s)
    assert stream.carry(4e6) == pytest.approx(4e6)


def test_bandwidth_forgets(stream: Stream) -> None:
    stream.carry(1000, 20)
    assert stream.carry(1300, 20) == pytest.approx(1300, rel=0.01)


@pytest.mark.parametrize(("before", "after"), [(25e6, 2.5e6), (2.5e6, 25e6), (25e6, 14e6)])
def test_a_link_that_changes_is_known_after_a_second(stream: Stream, before: float, after: float) -> None:
    stream.carry(before, 30)
    assert stream.carry(after, 1.3) == pytest.approx(after, rel=0.1)
    assert stream.carry(after, 3) == pytest.approx(after, rel=0.05)


def test_a_link_that_stops_carries_less_and_less(stream: Stream) -> None:
    stream.carry(1e6, 20)
    stream.link.begin(stream.now_s)
    for _ in range(50):
        stream.now_s += 0.1
        observed = stream.link.bandwidth(stream.now_s)
    assert observed is None or observed < 0.1e6


def test_jitter_of_a_fifth_is_smoothed(stream: Stream) -> None:
    rates = (0.8e6, 1.2e6)
    stream.carry(1e6, 10)
    for second in range(60):
        assert 0.9e6 < stream.carry(rates[second % 2]) < 1.1e6


def test_after_a_pause_what_crosses_counts_alone(stream: Stream) -> None:
    stream.carry(25e6, 20)
    stream.now_s += 120
    assert stream.link.idle_s(stream.now_s) == pytest.approx(120)
    assert stream.link.bandwidth(stream.now_s) == pytest.approx(25e6, rel=0.01), "all that is known"
    assert stream.carry(2e5, 0.05) == pytest.approx(25e6, rel=0.01), "10 kB say nothing"
    assert not stream.link.known
    assert stream.carry(2.5e6, 0.25) == pytest.approx(2.5e6, rel=0.2)
    assert stream.link.known and stream.link.idle_s(stream.now_s) == 0


def test_a_link_in_little_use_is_judged_by_its_last_minute(stream: Stream) -> None:
    for _ in range(100):
        stream.carry(25e6, 0.1)
        stream.now_s += 2
    for _ in range(40):
        observed = stream.carry(20e6, 0.1)
        stream.now_s += 2
    assert observed == pytest.approx(20e6, rel=0.01), "four busy seconds, but more than a minute"


def test_a_given_bandwidth_holds_until_enough_has_crossed() -> None:
    link = LinkEstimator(bandwidth_bytes_per_s=1e8, burst_s=0.05)
    link.begin(1.0)
    link.arrive(10**7, 1.04)  # one burst
    assert (link.bandwidth(1.04), link.known) == (1e8, False)
    link.arrive(10**7, 1.04)  # more than a burst
    assert (link.bandwidth(1.04), link.known) == (pytest.approx(2e7 / 0.04), True)


def test_the_least_latency_of_many_requests_counts() -> None:
    link = LinkEstimator()
    for seconds in (0.9, 0.25, 0.5):  # on a full link, heads wait for other bytes, too
        link.add_latency(seconds)
    assert link.latency_s == 0.25
    for _ in range(64):
        link.add_latency(0.7)
    assert link.latency_s == 0.7


INTERVALS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 100), st.integers(0, 10**6)), min_size=1, max_size=20
)
"""Begin and length of transfers in hundredths of a second, and their bytes, which arrive at the end."""


@given(intervals=INTERVALS)
def test_bandwidth_is_all_bytes_over_the_union_of_intervals(intervals: list[tuple[int, int, int]]) -> None:
    busy = {at for begin, length, _ in intervals for at in range(begin, begin + length)}
    events = [(begin, 1, 0) for begin, _, _ in intervals]
    events += [(begin + length, 0, num_bytes) for begin, length, num_bytes in intervals]
    link = LinkEstimator(window=10**6, changed=10**6)
    for at, begins, num_bytes in sorted(events, key=lambda event: (event[0], -event[1])):
        if begins:
            link.begin(at / 100)
        else:
            link.arrive(num_bytes, at / 100)
            link.end(at / 100)
    observed, num_bytes = link.bandwidth(), sum(each for _, _, each in intervals)
    if link.known and num_bytes:
        assert observed == pytest.approx(100 * num_bytes / len(busy))
    else:
        assert observed is None
    assert link.known == (len(busy) > 12 or num_bytes >= 256 * 1024)


@given(rates=st.lists(st.integers(1, 40), min_size=1, max_size=120))
def test_samples_before_a_change_are_forgotten_and_no_others(rates: list[int]) -> None:
    """The oracle looks at every slice of an eighth of a second anew."""
    link, now_s, kept = LinkEstimator(), 1000.0, list[int]()
    for rate in rates:
        link.begin(now_s)
        now_s += 0.125
        link.arrive(rate * 125_000, now_s)
        link.end(now_s)
        kept = [*kept, rate][-80:]
        if len(kept) > 8:
            usual = sum(kept[:-8]) / len(kept[:-8])
            if not usual / 1.6 <= sum(kept[-8:]) / 8 <= 1.6 * usual:
                kept = kept[-8:]
        assert link.bandwidth() == pytest.approx(1e6 * sum(kept) / len(kept))
