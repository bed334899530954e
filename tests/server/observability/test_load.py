"""Test the load that a server reports, on a clock that the test sets."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.protocol import Load
from upriver.server.observability.load import MAX_JOBS, MOST_SLOWED, LoadMeter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meter(clock):
    meter = LoadMeter(2, window_s=10.0, now=clock)
    for worker in (1, 2):
        meter.came(worker)
    return meter


def test_a_server_that_did_nothing_is_free(meter, clock):
    clock.now += 5
    load = meter.load(running=0)
    assert (load.utilisation, load.queue, load.expected_wait_s, load.k) == (0.0, 0, 0.0, 1.0)
    assert load.workers == (1.0, 1.0)
    assert load.window_s == 5


def test_utilisation_counts_what_lies_in_the_window_and_what_is_under_way(meter, clock):
    meter.began(1)
    clock.now += 12
    meter.ended(1)  # 100 to 112
    meter.began(2)
    clock.now += 4  # from 112 to 116 and on
    load = meter.load(running=1)
    assert load.window_s == 10
    assert load.utilisation == pytest.approx((6 + 4) / 20)


def test_workers_with_very_many_jobs_are_no_less_busy(meter, clock):
    for _ in range(2 * MAX_JOBS):
        meter.began(1)
        clock.now += 1 / 1024
        meter.ended(1)
    load = meter.load(running=1)
    assert load.utilisation == pytest.approx(1 / 2)
    assert 0 < load.window_s <= 10


def test_expected_wait_is_the_queue_at_the_rate_of_the_workers(meter, clock):
    meter.began(1)
    clock.now += 2
    meter.ended(1)
    meter.began(1)
    assert meter.load(running=1).expected_wait_s == 0  # the other worker is free
    meter.began(2)
    with meter.waiting(), meter.waiting():
        load = meter.load(running=4)
    assert (load.queue, load.expected_wait_s) == (2, 3 * 2 / 2)
    assert meter.load(running=2).queue == 0


def test_k_is_recent_over_best(meter, clock):
    for seconds in (0.1, 0.1, 0.3):
        meter.saw(1, "a", {1: seconds, 2: 2 * seconds})
    for _ in range(2):
        meter.saw(1, "a", {1: 0.3, 2: 0.6})
    meter.saw(2, "a", {1: 0.2})
    load = meter.load(running=0)
    assert load.workers == pytest.approx((3.0, 2.0))
    assert load.k == pytest.approx(2.5)


def test_works_are_not_mixed_and_input_stages_do_not_count(meter):
    meter.saw(1, ("a", 4), {1: 0.1})
    meter.saw(1, ("a", 16), {1: 0.4})
    meter.saw(1, ("a", 4), {0: 5.0, -1: 7.0})
    meter.saw(1, ("a", 4), {0: 9.0, 1: 0.1})
    assert meter.load(running=0).k == 1


def test_a_load_that_is_over_is_forgotten(meter, clock):
    meter.saw(1, "a", {1: 0.1})
    clock.now += 11
    meter.saw(1, "a", {1: 0.4})
    assert meter.load(running=0).workers[0] == pytest.approx(4)
    clock.now += 11
    assert meter.load(running=0).k == 1
    meter.saw(1, "a", {1: 0.2})
    assert meter.load(running=0).workers[0] == pytest.approx(2)  # the best is not forgotten


def test_a_worker_that_died_is_forgotten(meter):
    meter.began(1)
    meter.gone(1)
    meter.saw(1, "a", {1: 0.1})
    assert meter.load(running=0).workers == (1.0,)


def test_a_worker_that_says_nonsense_makes_no_factor_that_cannot_be_told(meter):
    for seconds in (math.inf, math.nan, -1.0, 0.0):
        meter.saw(1, "a", {1: seconds})
    assert meter.k == 1
    for seconds in (5e-324, 1e308, 1e308, 1e308):
        meter.saw(1, "a", {1: seconds, 2: seconds})
    assert meter.k == MOST_SLOWED
    assert msgspec.json.decode(msgspec.json.encode(meter.load(running=0)), type=Load).k == MOST_SLOWED


# ----------------------------------------------------------------------------- load by other processes

BUSY, FREE = 0.95, 0.2


def slowed(meter, worker=1, by=3.0):
    """Report a worker's best time once, and ``by`` times that time twice."""
    meter.saw(worker, "a", {1: 0.1})
    for _ in range(2):
        meter.saw(worker, "a", {1: 0.1 * by})


def test_workers_that_were_not_measured_lately_say_nothing_of_k(meter):
    slowed(meter)
    load = meter.load(running=0)
    assert load.workers == pytest.approx((3.0, 1.0))
    assert load.k == pytest.approx(3.0) == pytest.approx(meter.k)


def test_a_busy_machine_without_requests_does_not_look_free(meter, clock):
    slowed(meter)
    for _ in range(100):
        clock.now += 5
        meter.looked(BUSY)
    assert meter.k == pytest.approx(3.0)
    assert meter.load(running=0).machine == BUSY


def test_what_was_measured_before_a_busy_machine_s_last_micro_batches_is_not_recent(meter, clock):
    meter.looked(BUSY)
    slowed(meter)
    clock.now += 11
    meter.looked(BUSY)
    meter.saw(1, "a", {1: 0.2})
    clock.now += 100
    assert meter.k == pytest.approx(2.0)


def test_a_machine_that_is_free_again_bounds_what_was_measured_before(meter, clock):
    slowed(meter)
    clock.now += 5
    meter.looked(BUSY)
    assert meter.k == pytest.approx(3.0)
    clock.now += 5
    meter.looked(FREE)
    assert meter.k == pytest.approx(1 / (1 - FREE)) == pytest.approx(1.25)
    meter.looked(0.0)
    assert meter.k == 1
    assert meter.load(running=0).machine == 0


def test_what_was_measured_on_a_machine_that_is_in_part_free_stays(meter, clock):
    slowed(meter, by=2.0)
    clock.now += 5
    meter.looked(0.6)  # a job there takes up to 2.5 times as long
    assert meter.k == pytest.approx(2.0)
    clock.now += 600
    meter.looked(0.6)
    assert meter.k == pytest.approx(2.0), "nothing says otherwise"
    meter.looked(0.3)
    assert meter.k == pytest.approx(1 / 0.7)


def test_a_short_stretch_moves_nothing_beside_long_ones(meter, clock):
    """A scheduler interrupts a stretch of half a second, and none of a millisecond."""
    meter.looked(BUSY)
    meter.saw(1, "a", {1: 0.1, 2: 0.001})
    clock.now += 20
    meter.saw(1, "a", {1: 0.9, 2: 0.009})
    for _ in range(9):
        clock.now += 0.1
        meter.saw(1, "a", {2: 0.001})
    assert meter.k == pytest.approx(9.0)


def test_a_long_micro_batch_is_a_load_by_itself(meter, clock):
    meter.looked(BUSY)
    for _ in range(9):
        clock.now += 0.5
        meter.saw(1, "a", {1: 0.1})
    clock.now += 3.0
    meter.saw(1, "a", {1: 3.0})
    assert meter.k == pytest.approx(30.0)


def test_by_default_a_load_that_comes_is_known_after_some_micro_batches_of_one_a_second(clock):
    meter = LoadMeter(1, now=clock)
    meter.came(1)
    meter.looked(1.0)
    for _ in range(60):
        clock.now += 1
        meter.saw(1, "a", {1: 0.1})
    seen = []
    for _ in range(6):
        clock.now += 1
        meter.saw(1, "a", {1: 0.3})
        seen.append(meter.k)
    assert seen[0] == 1, "an odd one does not show"
    assert seen[3:] == pytest.approx([3.0] * 3)


def test_where_nobody_can_tell_the_window_alone_forgets(meter, clock):
    slowed(meter)
    for _ in range(2):
        clock.now += 5
        meter.looked(None)
    assert meter.k == pytest.approx(3.0)
    clock.now += 1
    assert meter.k == 1
    assert meter.load(running=0).machine == 0


def test_the_threshold_is_the_operator_s(clock):
    meter = LoadMeter(1, free_below=0.5, now=clock)
    meter.came(1)
    slowed(meter)
    clock.now += 1
    meter.looked(0.5)
    clock.now += 100
    assert meter.k == pytest.approx(3.0)
    meter.looked(0.49)
    assert meter.k == pytest.approx(1 / 0.51)


def test_a_work_that_never_ran_on_a_free_machine_is_held_against_its_prediction(meter, clock):
    predicted_s = {1: 0.05, 2: 0.05}
    meter.looked(BUSY)
    meter.saw(1, "a", {0: 9.0, 1: 0.4, 2: 0.4}, predicted_s)  # its own best, and no worker has a better one
    assert meter.k == pytest.approx(8.0)
    meter.saw(2, "b", {1: 0.3})
    assert meter.k == pytest.approx((8.0 + 1.0) / 2), "the best seen has to do"


def test_a_stage_without_a_prediction_counts_by_its_best(meter):
    meter.saw(1, "a", {1: 0.4, 2: 0.1}, {1: 0.1})
    assert meter.k == pytest.approx(0.5 / 0.2)


def test_a_prediction_that_is_too_long_counts_for_less_than_the_best_seen(meter):
    meter.saw(1, "a", {1: 0.1}, {1: 5.0})
    meter.saw(1, "a", {1: 0.3}, {1: 5.0})
    assert meter.k == pytest.approx(3.0)


@pytest.mark.parametrize("machine", [FREE, 0.7, None])
def test_a_prediction_counts_until_the_work_has_run_on_a_free_machine(machine, meter, clock):
    predicted_s = {1: 0.05}
    meter.saw(1, "a", {1: 0.1}, predicted_s)
    meter.looked(machine)
    clock.now += 60
    meter.looked(BUSY)
    meter.saw(1, "a", {1: 0.3}, predicted_s)
    assert meter.k == pytest.approx(3.0 if machine == FREE else 6.0)


@pytest.mark.parametrize("nonsense", [math.inf, math.nan, 0.0, -1.0])
def test_a_prediction_that_is_none_does_not_count(nonsense, meter):
    meter.saw(1, "a", {1: 0.1}, {1: nonsense})
    assert meter.k == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("saw"), st.integers(1, 3), st.floats()),
            st.tuples(st.just("looked"), st.none() | st.floats(0, 1)),
            st.tuples(st.just("goes on"), st.floats(0, 30)),
            st.tuples(st.just("gone"), st.integers(1, 3)),
        ),
        max_size=40,
    )
)
def test_whatever_happens_it_is_a_factor_that_a_free_machine_bounds_and_forgets(events):
    clock = Clock()
    meter = LoadMeter(2, window_s=10.0, now=clock)
    for worker in (1, 2):
        meter.came(worker)
    for what, *about in events:
        match what:
            case "saw":
                worker, seconds = about
                meter.saw(worker, "a", {1: seconds})
            case "looked":
                meter.looked(*about)
            case "goes on":
                clock.now += about[0]
            case "gone":
                meter.gone(*about)
        load = meter.load(running=0)
        assert 1 <= load.k == meter.k <= MOST_SLOWED
        assert all(1 <= factor <= MOST_SLOWED for factor in load.workers)
        assert 0 <= load.machine <= 1
    meter.looked(FREE)
    assert meter.k <= 1 / (1 - FREE)
    meter.looked(0.0)
    assert meter.k == 1
