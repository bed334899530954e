"""What a server says of its own load, on a clock that the test moves."""

import pytest

from upriver.server.load import MAX_JOBS, LoadMeter


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
    clock.now += 4  # 112 to 116, and on
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
    assert meter.load(running=1).expected_wait_s == 0  # the other one is free
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
