"""A profile that follows a running job."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.planning import alexnet, cluster
from upriver.errors import ConfigError
from upriver.profile.live import ENOUGH, STEPS, UNSEEN, WINDOW, LiveProfile
from upriver.types import StageProfile, Tier, Timings


def seconds(live: LiveProfile, tier: str, position: int) -> float:
    profile, _ = live.now()
    fixed, each = profile.stage(position).seconds[tier]
    assert fixed == 0.0
    return each


def test_untouched_it_is_what_was_measured() -> None:
    profile, machines = LiveProfile(alexnet(), cluster(), samples=16).now()
    assert (profile, machines) == (alexnet(), cluster())


def test_the_median_of_the_window_counts() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=10)
    before = seconds(live, "storage", 3)
    for count, took in enumerate((1.0, 1.0, 50.0, 1.0, 1.0)):
        assert seconds(live, "storage", 3) == (before if count < ENOUGH else pytest.approx(0.1))
        live.saw(Tier.STORAGE, Timings(stages={3: took}))
    assert seconds(live, "storage", 3) == pytest.approx(0.1)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={3: 4.0}))
    assert seconds(live, "storage", 3) == pytest.approx(0.4), "what has left the window is forgotten"


def test_a_stage_that_is_not_seen_slows_with_those_beside_it() -> None:
    live = LiveProfile(alexnet(storage_s=1e-3), cluster(), samples=10)
    for _ in range(ENOUGH):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.02, 2: 0.04}))
    assert seconds(live, "storage", 1) == pytest.approx(2e-3)
    assert seconds(live, "storage", 17) == pytest.approx(3e-3), "1 + 1 ms became 2 + 4 ms"
    assert seconds(live, "compute", 17) == pytest.approx(2e-5), "the other tier has not been seen"
    profile, _ = live.now()
    assert profile.stages[20] == alexnet(storage_s=1e-3).stages[20], "past the freeze point the tail counts"


def test_steps_count_once_there_are_enough() -> None:
    live = LiveProfile(alexnet(), cluster(), samples=16)
    for step in range(STEPS):
        assert live.now()[0].tail == alexnet().tail
        live.trained(0.5 if step else 9.0, 100)
    assert live.now()[0].tail.seconds == (0.0, 0.005)


def test_read_and_encode_are_seconds_a_byte() -> None:
    live = LiveProfile(alexnet(stored_bytes=1000), cluster(), samples=10)
    live.saw(Tier.STORAGE, Timings(phases={"read": 0.5, "encode": 0.2, "queue": 9.0}), sent_bytes=2000)
    rates = live.now()[1].storage.seconds_per_byte
    assert rates == pytest.approx({"read": 0.5 / 10_000, "encode": 1e-4})


def test_the_link_is_what_it_last_carried() -> None:
    live = LiveProfile(alexnet(), cluster(bandwidth=1e6), samples=10)
    for bandwidth in (2e6, 9e9, 2e6):
        live.carried(bandwidth)
    assert live.now()[1].link.bandwidth_bytes_per_s == 2e6
    assert live.recent_bandwidths(2) == (9e9, 2e6)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="bandwidth_bytes_per_s"):
            live.carried(bad)


def test_a_stage_that_ran_once_follows_those_that_run_now() -> None:
    live = LiveProfile(alexnet(storage_s=1e-3), cluster(), samples=10)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.01, 2: 0.07}))
    assert seconds(live, "storage", 2) == pytest.approx(7e-3), "as seen"
    for _ in range(UNSEEN * WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.01}))
    assert seconds(live, "storage", 2) == pytest.approx(7e-3), "a route with few micro-batches has run it"
    before = seconds(live, "storage", 1)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.03}))
    assert seconds(live, "storage", 1) == pytest.approx(3 * before)
    slower = seconds(live, "storage", 2)
    for _ in range(WINDOW):
        live.saw(Tier.STORAGE, Timings(stages={1: 0.06}))
    assert seconds(live, "storage", 2) == pytest.approx(2 * slower), "as those beside it since"


def test_input_stages_on_cores_of_their_own_are_followed_under_that_name() -> None:
    inputs = (StageProfile(name="decode", kind="decode", out_bytes=9.0, seconds={"compute.cpu": (0.0, 0.5)}),)
    live = LiveProfile(replace(alexnet(), input_stages=inputs), cluster(), samples=10)
    for _ in range(WINDOW):
        live.saw(Tier.COMPUTE, Timings(stages={0: 20.0}))
    assert live.now()[0].stage(0).seconds == {"compute.cpu": (0.0, 2.0)}
